"""What a checkpoint format is: the engine that reads it, its config, its tensors, and how it is served.

Legend: D draft vocabulary, V target vocabulary.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from specdec.drafter import MLA, Drafter, PostNorm
from specdec.export import keys, tensors
from specdec.export.engine_targets import target_flags
from specdec.export.subject import EMBEDDING, Subject
from specdec.export.switches import SGLANG, SWITCHES, VLLM, lint
from specdec.target import NotServable, TargetSource
from specdec.utils.vllm import configured_python

VOCABULARY = "vocab.target_ids_D"
DRAFT_TOKENS = 3  # a pass, where nobody says


class DrafterCheckpoint(NamedTuple):
    """A checkpoint for vLLM."""

    directory: Path | str
    method: str  # eagle, eagle3 or dflash
    architecture: str  # the target's, as its config.json names the class
    parallel: bool = False  # whether its drafts come of one call
    masks: int = 0  # of a block drafter, which an engine must run all

    @classmethod
    def of(cls, directory: Path | str, subject: Subject) -> Self:
        """That of a drafter's export."""
        return cls(
            directory,
            subject.method,
            subject.architecture,
            subject.parallel,
            subject.config.recurrence.masks,
        )

    def drafts(self, asked: int | None) -> int:
        """The drafts of a pass; see :func:`drafts_of`."""
        return drafts_of(self.masks, asked)


def drafts_of(masks: int, asked: int | None) -> int:
    """How many tokens an engine is told to draft: those asked for, else a block drafter's masks or three.

    ValueError for another number than its masks: they see each other, and it has learned with as many.
    """
    if masks and asked not in (None, masks):
        raise ValueError(
            f"--draft_tokens {asked}: the drafter's block has {masks} masks, and each is a draft: leave it out"
        )
    return asked or masks or DRAFT_TOKENS


class Format:
    """``--format vllm``, and what the others change of it: one directory of ``config.json`` and ``model.safetensors``.

    SGLang reads it too where it can serve the drafter.
    """

    name: ClassVar[str] = "vllm"
    engine: ClassVar[str] = VLLM
    # of EAGLE-3, in the spelling that most versions of the engine know
    first_layer: ClassVar[str] = "midlayer."

    def check(self, subject: Subject) -> None:
        """Raise NotServable for what the engine cannot express, with each switch and why."""
        if found := "; ".join(
            f"{switch.name}: {reason}" for switch, reason in lint(subject, self.engine)
        ):
            raise NotServable(f"{self.engine} cannot serve this drafter: {found}")

    def needs(self, subject: Subject) -> str | None:
        """The engine's oldest release that has every switch in use, as far as that is known."""
        found = {switch.cell(self.engine).since for switch in SWITCHES if switch.used(subject)} - {
            ""
        }
        return max(
            found, key=lambda version: [int(part) for part in version.split(".")], default=None
        )

    def config(self, subject: Subject, target: str, draft_tokens: int) -> dict[str, Any]:
        """The whole ``config.json``; some formats name the target in it and the drafts a pass."""
        written = keys.config_to_keys(
            subject.config,
            subject.method,
            unbounded=subject.narrowed,
            own_rope=subject.rope_is_changed,
        )
        # EAGLE's own code then reads the target's embedding, if this key is absent
        if EMBEDDING in subject.shared:
            written.pop("target_hidden_size")
        return {"architectures": self.architectures(subject), **written}

    def architectures(self, subject: Subject) -> list[str]:
        """The classes that the engine looks for.

        A name that SGLang knows only where it drafts the same: else it would load the drafter all the same.
        """
        if subject.method == "eagle":
            return ["EagleLlamaForCausalLM"]
        if subject.method == "dflash":
            return ["DFlashDraftModel"]
        if type(subject.config.attention) is MLA:
            return [f"Eagle3DeepseekV{3 if any(lint(subject, SGLANG)) else 2}ForCausalLM"]
        if subject.config.norms.query_key:
            return ["Eagle3Qwen3ForCausalLM"]
        config = subject.config  # of a window, SGLang would know by a flag alone
        shared = (
            not any(lint(subject, SGLANG))
            and config.num_layers == 1
            and config.attention_window == "full"
        )
        return ["LlamaForCausalLMEagle3" if shared else "Eagle3LlamaForCausalLM"]

    def tensors(self, drafter: Drafter, subject: Subject) -> dict[str, Tensor]:
        """The checkpoint's tensors, contiguous, in the drafter's dtype; vocabulary maps int64 and bool."""
        rows = tensors.name_table(subject.config)
        made: dict[str, Tensor] = {}
        for name, value in tensors.published(drafter.state_dict(), subject.config).items():
            if name == VOCABULARY or name in subject.shared:
                continue
            theirs = tensors.translate(name, rows)
            if theirs is None:
                raise NotServable(
                    f"{self.engine} cannot serve this drafter: it has no place for the weights {name}"
                )
            if theirs == tensors.MASK:
                theirs = theirs.removesuffix(".weight")
                value = value.reshape(1, 1, -1)
            made[
                theirs.replace("layers.0.", self.first_layer)
                if subject.method == "eagle3"
                else theirs
            ] = value
        if (
            subject.config.attention_bias == "qkv"
            and subject.method != "eagle"
            and not _is_qwen3(subject)
        ):
            outputs = [name for name in made if name.endswith("self_attn.o_proj.weight")]
            made |= {
                name.replace(".weight", ".bias"): made[name].new_zeros(len(made[name]))
                for name in outputs
            }
        if not drafter.vocab.complete:
            ids_D = drafter.vocab.target_ids_D
            made[tensors.DRAFT_TO_TARGET] = ids_D - torch.arange(len(ids_D), device=ids_D.device)
            made[tensors.TARGET_TO_DRAFT] = drafter.vocab.draft_ids_V >= 0
        return {name: value.detach().cpu().contiguous() for name, value in made.items()}

    def command(
        self, directory: str, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> str:
        """The line that serves the target with the drafter, a chain of drafts a pass.

        vLLM's second model runner hands every drafter of method eagle3 fused states, whatever its config says.
        """
        drafter = DrafterCheckpoint.of(directory, subject)
        arguments = vllm_arguments(
            from_anywhere(target), drafter, draft_tokens, configured_python()
        )
        line = shlex.join(["vllm", *arguments])
        last_state = subject.method == "eagle3" and not subject.config.fusion.mixes
        return f"VLLM_USE_V2_MODEL_RUNNER=0 {line}" if last_state else line


def _is_qwen3(subject: Subject) -> bool:
    """Whether the engine's class is Qwen3's of method eagle3, which builds no bias on the attention's output; the
    others of ``attention_bias`` build four, and leave at random what a file lacks."""
    return subject.method == "eagle3" and bool(subject.config.norms.query_key)


def from_anywhere(target: TargetSource) -> TargetSource:
    """A target by a name that holds in every working directory."""
    place = Path(target.directory())
    return replace(target, source=str(place.resolve())) if place.exists() else target


def vllm_arguments(
    target: TargetSource,
    drafter: DrafterCheckpoint | None = None,
    draft_tokens: int = 0,
    python: str | None = None,
) -> list[str]:
    """The arguments of ``vllm`` for a target, alone or with a drafter, whose method it would guess from the path; with
    one, what the target's architecture needs for that, as the vLLM of ``python`` has it."""
    arguments = ["serve", target.servable()]
    if drafter is not None:
        speculative: dict[str, Any] = {"method": drafter.method, "model": str(drafter.directory)}
        speculative["num_speculative_tokens"] = draft_tokens
        if drafter.parallel:
            speculative["parallel_drafting"] = True
        arguments += ["--speculative-config", json.dumps(speculative)]
    if target.revision is not None:
        arguments += ["--revision", target.revision, "--tokenizer-revision", target.revision]
    arguments += ["--trust-remote-code"] if target.trust_remote_code else []
    if drafter is not None:
        arguments += target_flags(drafter.architecture, drafter.method, python)
    return arguments


class SglangFormat(Format):
    """``--format sglang``, which vLLM reads too. What SGLang does not find it leaves at random: more is written."""

    name: ClassVar[str] = "sglang"
    engine: ClassVar[str] = SGLANG

    def architectures(self, subject: Subject) -> list[str]:
        """SGLang's class first; of two vLLM takes the one that it knows."""
        if subject.method == "eagle":
            return ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
        return [
            "Eagle3DeepseekV2ForCausalLM"
            if type(subject.config.attention) is MLA
            else "LlamaForCausalLMEagle3"
        ]

    def tensors(self, drafter: Drafter, subject: Subject) -> dict[str, Tensor]:
        """EAGLE-1's bias, a zero one too; further layers' input norms under both engines' names."""
        made = super().tensors(drafter, subject)
        if subject.method == "eagle":
            made.setdefault(
                "fc.bias", torch.zeros(subject.config.hidden_size, dtype=made["fc.weight"].dtype)
            )
            return made
        for i in range(1, subject.config.num_layers):
            made[f"layers.{i}.hidden_norm.weight"] = made[
                f"layers.{i}.input_layernorm.weight"
            ].clone()
        return made

    def command(
        self, directory: str, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> str:
        """A chain, which is what vLLM drafts too; a larger ``--speculative-eagle-topk`` makes it a tree."""
        arguments = {
            "model-path": from_anywhere(target).servable(),
            "speculative-algorithm": subject.method.upper(),
            "speculative-draft-model-path": directory,
            "speculative-num-steps": draft_tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": draft_tokens + 1,
        } | ({"revision": target.revision} if target.revision is not None else {})
        if subject.config.attention_window != "full":
            arguments["speculative-draft-window-size"] = subject.config.attention_window
        line = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in arguments.items())
        return (
            f"python -m sglang.launch_server {line}"
            + " --trust-remote-code" * target.trust_remote_code
        )


LAYER = "transformer_layer_config"
SPECULATORS_VERSION = "0.9.0"
# of the flat keys, those that stand at the top in the speculators format; the others describe the layer
TOP = {
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
}
TOP |= {keys.IDS, keys.AUX, "tie_word_embeddings", "mask_token_id", "block_size"}


class SpeculatorsFormat(Format):
    """``--format speculators``: of vLLM's library, which ``vllm serve`` takes without further arguments."""

    name: ClassVar[str] = "speculators"
    first_layer: ClassVar[str] = "layers.0."  # the library's layers are all numbered

    def tensors(self, drafter: Drafter, subject: Subject) -> dict[str, Tensor]:
        """As the base; and the token embedding, which the library would leave uninitialised."""
        return super().tensors(drafter, subject) | {
            EMBEDDING: drafter.embed_tokens.weight.detach().cpu().contiguous()
        }

    def needs(self, subject: Subject) -> str | None:
        """As the base; earlier releases drop fc_norm and norm_output from this format without a word."""
        config = subject.config
        dropped = config.norms.aux == "each" or type(config.recurrence) is PostNorm
        return "0.25.0" if dropped and not subject.parallel else super().needs(subject)

    def check(self, subject: Subject) -> None:
        """As the base; and EAGLE-1 is no speculator any more."""
        super().check(subject)
        lacks = {
            "method eagle": subject.method == "eagle",
            "attention MLA": type(subject.config.attention) is MLA,
            "drafter without fc": not subject.config.fusion.mixes,
        }
        if kind := next((name for name, used in lacks.items() if used), None):
            raise NotServable(
                f"{VLLM} cannot serve this drafter: the speculators format has no {kind}: use --format vllm"
            )

    def config(self, subject: Subject, target: str, draft_tokens: int) -> dict[str, Any]:
        """The layer's config apart, the drafter's switches at the top, and the target by name."""
        flat = keys.config_to_keys(
            subject.config,
            subject.method,
            unbounded=subject.narrowed,
            own_rope=subject.rope_is_changed,
        )
        kind, name = (
            ("peagle", "PEagleSpeculator") if subject.parallel else ("eagle3", "Eagle3Speculator")
        )
        top = {key: value for key, value in flat.items() if key in TOP}
        if subject.method == "dflash":
            kind = "dflash"
            name = "DFlashSpeculator"
            ids = list(subject.config.aux_layers)
            token = flat.pop("dflash_config")["mask_token_id"]
            top |= {keys.AUX: ids, "mask_token_id": token}
        # SGLang's
        layer = {key: value for key, value in flat.items() if key not in TOP | {"eagle_config"}}
        # vLLM 0.32 hands these on from the layer alone, the library reads them at the top
        if subject.parallel:
            layer |= {key: flat[key] for key in ("fc_norm", "norm_output")}
        proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens}
        proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        return {
            "architectures": [name],
            "speculators_model_type": kind,
            "speculators_version": SPECULATORS_VERSION,
            LAYER: layer | {"tie_word_embeddings": False},
            **top,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {
                    "name_or_path": str(Path(target).resolve())
                    if Path(target).is_dir()
                    else target,
                    "architectures": [subject.architecture],
                },
            },
        }

    def command(
        self, directory: str, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> str:
        """The checkpoint names target, method and number of drafts itself."""
        return shlex.join(
            [
                "vllm",
                "serve",
                directory,
                *target_flags(subject.architecture, subject.method, configured_python()),
            ]
        )


FORMATS: dict[str, Format] = {
    each.name: each for each in (Format(), SpeculatorsFormat(), SglangFormat())
}


def flat(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a ``config.json`` without nesting, which only speculators has; ValueError if that is incomplete."""
    if "speculators_config" not in raw and "speculators_model_type" not in raw:
        return raw
    kind = raw.get("speculators_model_type")
    if kind not in ("eagle3", "peagle", "dflash"):
        raise ValueError(
            f"speculators_model_type is {kind!r}; only eagle3, peagle and dflash can be read"
        )
    if not isinstance(raw.get(LAYER), Mapping):
        raise ValueError(f"{LAYER} is missing")
    if "norm_before_residual" not in raw and kind == "eagle3":
        raise ValueError(
            "norm_before_residual is absent, which vLLM takes for true and speculators for false: write it"
        )
    return {**raw[LAYER], **{key: raw[key] for key in TOP if key in raw}}
