"""Checkpoints as vLLM reads them; SGLang reads them too where it can serve them."""

from typing import ClassVar

from specdec.export import switches
from specdec.export.format import Format, Served, vllm_serve
from specdec.export.switches import SGLANG, VLLM, Subject


class VllmFormat(Format):
    """``--format vllm``."""

    name: ClassVar[str] = "vllm"
    engine: ClassVar[str] = VLLM

    def architectures(self, subject: Subject) -> list[str]:
        """A name that SGLang knows only where it drafts the same: else it would load the drafter all the same."""
        if subject.method == "eagle":
            return ["EagleLlamaForCausalLM"]
        if subject.config.norms.query_key:
            return ["Eagle3Qwen3ForCausalLM"]
        shared = not any(switches.lint(subject, SGLANG)) and subject.config.num_layers == 1
        return ["LlamaForCausalLMEagle3" if shared else "Eagle3LlamaForCausalLM"]

    def command(self, directory: str, subject: Subject, served: Served) -> str:
        """``vllm serve``, with method and drafter."""
        return vllm_serve(directory, subject, served)
