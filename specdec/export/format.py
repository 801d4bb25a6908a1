"""What a checkpoint format is: the engine that reads it, its config, its tensors, and how it is served.

Legend: D draft vocabulary, V target vocabulary.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.drafter import Drafter
from specdec.export import blocks, keys, names, switches
from specdec.export.switches import NotServable, Subject

VOCABULARY = "vocab.target_ids_D"


class Served(NamedTuple):
    """What a checkpoint is served with."""

    target: str
    """Directory or Hub id of the target."""
    architectures: list[str]
    """The target's."""
    draft_tokens: int
    revision: str | None = None
    """Of the target on the Hub."""
    trust_remote_code: bool = False


class Format:
    """Base of the formats: one directory of ``config.json`` and ``model.safetensors``."""

    name: ClassVar[str]
    engine: ClassVar[str]

    def check(self, subject: Subject) -> None:
        """Refuse what the engine cannot express.

        Raises:
            NotServable: it says which switch, which engine and why.
        """
        switches.check(subject, self.engine)

    def needs(self, subject: Subject) -> str | None:
        """The engine's oldest release that serves it, as far as that is known."""
        return switches.needs(subject, self.engine)

    def config(self, subject: Subject, served: Served) -> dict[str, Any]:
        """The whole ``config.json``."""
        return {"architectures": self.architectures(subject), **keys.write(subject.config, subject.method)}

    def architectures(self, subject: Subject) -> list[str]:
        """The classes that the engine looks for."""
        raise TypeError(f"{type(self).__name__} must name the engine's class")

    def flat(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a ``config.json`` of this format without nesting, as :func:`specdec.export.keys.read` takes them.

        Raises:
            ValueError: something that the format demands is missing.
        """
        return dict(raw)

    def tensors(self, drafter: Drafter, subject: Subject) -> dict[str, Tensor]:
        """The checkpoint's tensors, contiguous, in the drafter's dtype; vocabulary maps int64 and bool."""
        rows = names.table(subject.config)
        made: dict[str, Tensor] = {}
        for name, value in blocks.published(drafter.state_dict(), subject.config).items():
            if name == VOCABULARY or name in subject.shared:
                continue
            theirs = names.translate(name, rows)
            if theirs is None:
                raise NotServable(f"{self.engine} cannot serve this drafter: it has no place for the weights {name}")
            made[self.spelled(theirs, subject)] = value
        if not drafter.vocab.complete:
            ids_D = drafter.vocab.target_ids_D
            made[names.DRAFT_TO_TARGET] = ids_D - torch.arange(len(ids_D), device=ids_D.device)
            made[names.TARGET_TO_DRAFT] = drafter.vocab.draft_ids_V >= 0
        return {name: value.detach().cpu().contiguous() for name, value in made.items()}

    def spelled(self, name: str, subject: Subject) -> str:
        """A tensor's name in the spelling that most versions of the engine know."""
        return name.replace("layers.0.", "midlayer.") if subject.method == "eagle3" else name

    def command(self, directory: str, subject: Subject, served: Served) -> str:
        """The line that serves the target with the drafter."""
        raise TypeError(f"{type(self).__name__} must say how it is served")


def vllm_serve(directory: str, subject: Subject, served: Served) -> str:
    """vLLM's command line."""
    words = vllm_words(served.target, subject.method, directory, served.draft_tokens)
    return shlex.join(["vllm", *words, *target_words(served.revision, served.trust_remote_code)])


def vllm_words(target: str, method: str, directory: str, draft_tokens: int) -> list[str]:
    """What ``vllm`` is told to serve a target with a drafter; it would guess the method from the path."""
    speculative = {"method": method, "model": directory, "num_speculative_tokens": draft_tokens}
    return ["serve", target, "--speculative-config", json.dumps(speculative)]


def target_words(revision: str | None, trust_remote_code: bool) -> list[str]:
    """What ``vllm`` is told of a target besides its name."""
    pinned = ["--revision", revision, "--tokenizer-revision", revision] if revision is not None else []
    return [*pinned, *(["--trust-remote-code"] if trust_remote_code else [])]
