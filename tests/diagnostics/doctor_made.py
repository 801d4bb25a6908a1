"""Set-ups for the doctor."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from transformers import LlamaForCausalLM

from specdec.commands.parser import parse_arguments
from specdec.data import ChatData, TextData, TokenData
from specdec.diagnostics.doctor import run_check
from specdec.diagnostics.doctor_setup import CheckResult, Finding, SetUp, set_up
from specdec.drafter import DrafterSpec
from specdec.nn.optimizers import AdamW
from specdec.target import Target, TargetSource
from specdec.training.module import DrafterModule
from tests.conftest import TEXT
from tests.data.tiny import CHATML, tiny_tokenizer, write_jsonl
from tests.tiny import llama_config

CONF = Path(__file__).parents[2] / "conf"
CPU = Namespace(
    precision="32-true", accelerator="cpu", gradient_clip_val=0.5, gradient_clip_algorithm=None
)
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"what is {n} plus two?"},
            {"role": "assistant", "content": f"it is {n + 2}, as the sky is blue"},
            {"role": "user", "content": "and the grass?"},
            {"role": "assistant", "content": f"the grass is green, {n} times"},
        ]
    }
    for n in range(12)
]


@dataclasses.dataclass(frozen=True)
class Tiny(TargetSource):
    """The tests' target with a chat template; one model for all tests of a process."""

    dtype: str = "float32"

    def load(self, device: str = "cpu") -> Target:
        return target(self.dtype)


@cache
def target(dtype: str = "float32") -> Target:
    """A random Llama, whose logits are spread out."""
    tokenizer = tiny_tokenizer(CHATML)
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(vocab_size=len(tokenizer), eos_token_id=1))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return Target(model.to(getattr(torch, dtype)), tokenizer)


def design(name: str) -> DrafterSpec:
    """A shipped preset, its vocabulary cut down."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--drafter", type=DrafterSpec)
    spec = parse_arguments(parser, ["--drafter", str(CONF / "drafter" / f"{name}.yaml")]).drafter
    return dataclasses.replace(
        spec, draft_vocab_size="all" if spec.draft_vocab_size == "all" else 200
    )


def learner(spec: DrafterSpec | None = None, **more: Any) -> DrafterModule:
    """What would be trained."""
    given: dict[str, Any] = {
        "target": Tiny(),
        "ttt_steps": 3,
        "optimizer": lambda p: AdamW(p, lr=1e-2),
    }
    return DrafterModule(drafter=spec or DrafterSpec(draft_vocab_size=200), **(given | more))


def text(folder: Path) -> TokenData:
    """Short functions."""
    (folder / "functions.txt").write_text(TEXT)
    (folder / "other.txt").write_text(TEXT[:2000])
    return TextData(
        str(folder / "functions.txt"), str(folder / "other.txt"), seq_len=64, batch_size=2
    )


def chats(folder: Path, **more: Any) -> ChatData:
    """Conversations of two turns."""
    path = write_jsonl(folder / "chats.jsonl", CHATS)
    return ChatData(str(path), val_fraction=0.2, seq_len=256, batch_size=2, **more)


def subject(data: TokenData, module: DrafterModule | None = None, seconds: float = 600) -> SetUp:
    """The set-up of these data."""
    torch.manual_seed(0)
    return set_up(module or learner(), data, CPU, None, seconds)


def faults(checked: SetUp, *names: str) -> list[Finding]:
    """What these checks find wrong."""
    return [
        one
        for name in names
        for one in run_check(name, checked)
        if one.result is CheckResult.FAULTY
    ]


def told(found: Sequence[Finding], check: str) -> str:
    """What one check says of the faults that it found; there are some."""
    said = [f"{one.what}: {one.note}" for one in found if one.check == check]
    assert said, found
    return "\n".join(said)
