"""Checkpoints as SGLang reads them; vLLM reads them too."""

import shlex
from typing import ClassVar

import torch
from torch import Tensor

from specdec.drafter import Drafter
from specdec.export.format import Format, Served
from specdec.export.switches import SGLANG, Subject


class SglangFormat(Format):
    """``--format sglang``. What SGLang does not find it leaves at random, so that more is written than vLLM needs."""

    name: ClassVar[str] = "sglang"
    engine: ClassVar[str] = SGLANG

    def architectures(self, subject: Subject) -> list[str]:
        """SGLang's class first; of two vLLM takes the one that it knows."""
        if subject.method == "eagle":
            return ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
        return ["LlamaForCausalLMEagle3"]

    def tensors(self, drafter: Drafter, subject: Subject) -> dict[str, Tensor]:
        """EAGLE-1's bias, a zero one too; further layers' input norms under both engines' names."""
        made = super().tensors(drafter, subject)
        if subject.method == "eagle":
            made.setdefault("fc.bias", torch.zeros(subject.config.hidden_size, dtype=made["fc.weight"].dtype))
            return made
        for i in range(1, subject.config.num_layers):
            made[f"layers.{i}.hidden_norm.weight"] = made[f"layers.{i}.input_layernorm.weight"].clone()
        return made

    def command(self, directory: str, subject: Subject, served: Served) -> str:
        """A chain, which is what vLLM drafts too; a larger ``--speculative-eagle-topk`` makes it a tree."""
        words = {
            "--model-path": served.target,
            "--speculative-algorithm": subject.method.upper(),
            "--speculative-draft-model-path": directory,
            "--speculative-num-steps": str(served.draft_tokens),
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": str(served.draft_tokens + 1),
        }
        words |= {"--revision": served.revision} if served.revision is not None else {}
        trust = ["--trust-remote-code"] if served.trust_remote_code else []
        pairs = (word for pair in words.items() for word in pair)
        return shlex.join(["python", "-m", "sglang.launch_server", *pairs, *trust])
