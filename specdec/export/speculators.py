"""Checkpoints of vLLM's speculators library, which ``vllm serve`` takes without further arguments."""

import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.drafter import PostNorm
from specdec.export import keys
from specdec.export.format import Format, Served
from specdec.export.switches import VLLM, NotServable, Subject

LAYER, VERSION = "transformer_layer_config", "0.9.0"
# of the flat keys, those that stand at the top; the others describe the layer
TOP = {
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "tie_word_embeddings",
}
DROPPED = {"eagle_config"}  # SGLang's, which does not read this format


class SpeculatorsFormat(Format):
    """``--format speculators``."""

    name: ClassVar[str] = "speculators"
    engine: ClassVar[str] = VLLM

    def needs(self, subject: Subject) -> str | None:
        """As the base; earlier releases drop fc_norm and norm_output from this format without a word."""
        config = subject.config
        dropped = config.norms.aux == "each" or type(config.recurrence) is PostNorm
        return "0.25.0" if dropped else super().needs(subject)

    def check(self, subject: Subject) -> None:
        """As the base; and EAGLE-1 is no speculator any more."""
        super().check(subject)
        if subject.method == "eagle":
            raise NotServable(
                f"{VLLM} cannot serve this drafter: the speculators format has no method eagle: use --format vllm"
            )

    def architectures(self, subject: Subject) -> list[str]:
        """The library's class."""
        return ["Eagle3Speculator"]

    def config(self, subject: Subject, served: Served) -> dict[str, Any]:
        """The layer's config apart, the drafter's switches at the top, and the target by name."""
        flat = keys.write(subject.config, subject.method)
        layer = {key: value for key, value in flat.items() if key not in TOP | DROPPED}
        return {
            "architectures": self.architectures(subject),
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            LAYER: layer | {"tie_word_embeddings": False},
            **{key: value for key, value in flat.items() if key in TOP},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": served.draft_tokens,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": served.target, "architectures": served.architectures},
            },
        }

    def flat(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layer's keys and the switches together.

        Raises:
            ValueError: ``norm_before_residual`` is absent, which vLLM and the library read differently.
        """
        kind = raw.get("speculators_model_type")
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type is {kind!r}; only eagle3 can be read")
        if not isinstance(raw.get(LAYER), Mapping):
            raise ValueError(f"{LAYER} is missing")
        if "norm_before_residual" not in raw:
            raise ValueError(
                "norm_before_residual is absent, which vLLM takes for true and speculators for false: write it"
            )
        return {**raw[LAYER], **{key: raw[key] for key in TOP if key in raw}}

    def spelled(self, name: str, subject: Subject) -> str:
        """The library's layers are all numbered."""
        return name

    def command(self, directory: str, subject: Subject, served: Served) -> str:
        """The checkpoint names target, method and number of drafts itself."""
        return shlex.join(["vllm", "serve", directory])
