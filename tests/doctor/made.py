"""Set-ups for the doctor."""

import dataclasses
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from transformers import LlamaForCausalLM

from specdec.arguments import parse
from specdec.compose import compose
from specdec.data import ChatData, TextData, TokenData
from specdec.doctor.examine import made
from specdec.doctor.finding import Finding, Verdict
from specdec.doctor.prepare import built
from specdec.doctor.subject import Subject, Trainer
from specdec.drafter import DrafterSpec
from specdec.embedded.source import TargetSource
from specdec.optimizers import AdamW
from specdec.target import Target
from specdec.training.module import DrafterModule
from tests.conftest import TEXT
from tests.data.tiny import CHATML, tiny_tokenizer, write_jsonl
from tests.tiny import llama_config

CONF = Path(__file__).parents[2] / "conf"
CPU = Trainer("32-true", "cpu", 0.5, None)
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
def target(dtype: str) -> Target:
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
    spec = parse(parser, ["--drafter", str(CONF / "drafter" / f"{name}.yaml")]).drafter
    return dataclasses.replace(spec, draft_vocab_size="all" if spec.draft_vocab_size == "all" else 200)


def learner(spec: DrafterSpec | None = None, **more: Any) -> DrafterModule:
    """What would be trained."""
    given: dict[str, Any] = {"target": Tiny(), "ttt_steps": 3, "optimizer": lambda p: AdamW(p, lr=1e-2)}
    return DrafterModule(drafter=spec or DrafterSpec(draft_vocab_size=200), **(given | more))


def text(folder: Path) -> TokenData:
    """Short functions."""
    path = folder / "functions.txt"
    path.write_text(TEXT)
    (folder / "other.txt").write_text(TEXT[:2000])
    return TextData(str(path), str(folder / "other.txt"), seq_len=64, batch_size=2)


def chats(folder: Path, **more: Any) -> ChatData:
    """Conversations of two turns."""
    path = write_jsonl(folder / "chats.jsonl", CHATS)
    return ChatData(str(path), val_fraction=0.2, packing="whole", seq_len=256, batch_size=2, cache=False, **more)


def subject(data: TokenData, module: DrafterModule | None = None, **more: Any) -> Subject:
    """The set-up, whose preparing must find nothing."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"trainer": CPU, "drafter": None, "seconds": 600.0} | more
    with tempfile.TemporaryDirectory() as scratch:
        *before, last = built(module or learner(), data, scratch=Path(scratch), **given)
    assert isinstance(last, Subject)
    assert all(isinstance(one, Finding) and one.verdict is Verdict.SOUND for one in before)
    return last


def faults(checked: Subject, names: Sequence[str]) -> list[Finding]:
    """What these checks find wrong."""
    return [one for name in names for one in made(name, checked) if one.verdict is Verdict.FAULTY]


def recipe_of(name: str) -> dict[str, Any]:
    """``conf/train``'s settings, as the module takes them."""
    config, _ = compose(["--config", str(CONF / "train" / f"{name}.yaml")])
    assert yaml.safe_dump(config)
    return config["model"]
