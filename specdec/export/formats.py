"""What a checkpoint format is: the engine that reads it, its config, its tensors, and how it is served.

Legend: D draft vocabulary, V target vocabulary.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
from safetensors.torch import save_file

from specdec.drafter import MLA, Drafter, PostNorm
from specdec.export import keys
from specdec.export import tensors as named
from specdec.export.checkpoint import CONFIG, WEIGHTS
from specdec.export.engine_targets import target_flags
from specdec.export.quantize import FUSION_MATRIX, LAYER_MATRICES, quantization_config
from specdec.export.subject import EMBEDDING, Subject
from specdec.export.switches import SGLANG, SWITCHES, VLLM, lint
from specdec.export.tensors import Raw, Weights
from specdec.target import NotServable, TargetSource
from specdec.utils.files import write_json

VOCABULARY = "vocab.target_ids_D"
DRAFT_TOKENS = 3  # a pass, where nobody says
BLOCK_CLASSES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}  # by method


class DrafterCheckpoint(NamedTuple):
    """A checkpoint for vLLM, and what vLLM has to be told about it."""

    directory: Path | str
    method: str  # eagle, eagle3, dflash or dspark
    architecture: str  # the target's, as its config.json names the class
    parallel: bool = False  # whether one call makes all drafts of a pass
    block_drafts: int = 0  # of a block drafter; an engine must make all

    @classmethod
    def of(cls, directory: Path | str, subject: Subject) -> Self:
        """Return the checkpoint of a drafter's export."""
        return cls(
            directory,
            subject.method,
            subject.architecture,
            subject.parallel,
            subject.config.drafting.fixed_drafts,
        )

    def drafts(self, asked: int | None) -> int:
        """Return the drafts of a pass; see :func:`drafts_of`."""
        return drafts_of(self.block_drafts, asked)


def drafts_of(block_drafts: int, asked: int | None) -> int:
    """Return how many tokens an engine is set to draft: as many as asked for, else a block drafter's or three.

    Raises:
        ValueError: a block drafter is asked for another number than its block makes. The nodes of a block see each
            other, and it has learned with this many.
    """
    if block_drafts and asked not in (None, block_drafts):
        raise ValueError(
            f"--draft_tokens {asked}: the drafter's block makes {block_drafts} drafts: leave it out"
        )
    return asked or block_drafts or DRAFT_TOKENS


class Format:
    """``--format vllm``, and what the others change of it: one directory of ``config.json`` and ``model.safetensors``.

    SGLang reads it too where it can serve the drafter.
    """

    name: ClassVar[str] = "vllm"
    engine: ClassVar[str] = VLLM
    weights_file: ClassVar[str] = WEIGHTS
    # Whether it is a layout in which others publish drafters, which `import` reads.
    published: ClassVar[bool] = True
    # The prefix of EAGLE-3's first layer that most versions of the engine know.
    first_layer: ClassVar[str] = "midlayer."
    # The modules whose matrices the engine reads in eight bits; see specdec.export.quantize.
    matrices: ClassVar[tuple[str, ...]] = (*LAYER_MATRICES, FUSION_MATRIX)

    def check(self, subject: Subject) -> None:
        """Raise NotServable for what the engine cannot express, with each switch and why."""
        reasons = [f"{switch.name}: {reason}" for switch, reason in lint(subject, self.engine)]
        if reasons:
            raise NotServable(f"{self.engine} cannot serve this drafter: {'; '.join(reasons)}")

    def needs(self, subject: Subject) -> str | None:
        """Return the engine's oldest release that has every switch in use, as far as that is known."""
        releases = {switch.cell(self.engine).since for switch in SWITCHES if switch.used(subject)}
        releases.discard("")
        return max(releases, key=lambda release: [*map(int, release.split("."))], default=None)

    def config(self, subject: Subject, target: str, draft_tokens: int) -> Raw:
        """Return the whole ``config.json``; some formats name the target and the drafts a pass in it."""
        written = _keys(subject)
        # Without this key EAGLE's own code reads the target's embedding.
        if EMBEDDING in subject.shared:
            written.pop("target_hidden_size")
        return {"architectures": self.architectures(subject), **written}

    def write(
        self, folder: Path, weights: Weights, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> None:  # fmt: skip
        """Write what the engine reads.

        Args:
            weights: see :meth:`tensors`.
        """
        save_file(weights, folder / self.weights_file, metadata={"format": "pt"})
        config = self.config(subject, target.directory(), draft_tokens)
        write_json(folder / CONFIG, config | quantization_config(weights))

    def verify(self, folder: Path, weights: Weights, subject: Subject) -> None:
        """Read back what ``import`` does not, nothing here; ValueError if it is not what was written."""

    def architectures(self, subject: Subject) -> list[str]:
        """Return the names of the classes that the engine looks for.

        SGLang loads every drafter whose class it knows, so a name that it knows is written only where it drafts the
        same.
        """
        config = subject.config
        for_sglang = not any(lint(subject, SGLANG))
        if subject.method == "eagle":
            return ["EagleLlamaForCausalLM"]
        if subject.block:
            return [BLOCK_CLASSES[subject.method]]
        if type(subject.config.attention) is MLA:
            return [f"Eagle3DeepseekV{2 if for_sglang else 3}ForCausalLM"]
        if subject.config.norms.query_key:
            return ["Eagle3Qwen3ForCausalLM"]
        # SGLang knows of a window only by a flag of its server.
        if for_sglang and config.num_layers == 1 and config.attention_window == "full":
            return ["LlamaForCausalLMEagle3"]
        return ["Eagle3LlamaForCausalLM"]

    def tensors(self, drafter: Drafter, subject: Subject) -> Weights:
        """Return the checkpoint's tensors, contiguous, in the drafter's dtype; vocabulary maps are int64 and bool."""
        names = named.name_table(subject.config)
        weights: Weights = {}
        for published, value in named.to_published(drafter.state_dict(), subject.config).items():
            if published == VOCABULARY or published in subject.shared:
                continue
            name = named.translate(published, names)
            if name is None:
                raise NotServable(
                    f"{self.engine} cannot serve this drafter: it has no place for the weights {published}"
                )
            if name == named.MASK:
                name = name.removesuffix(".weight")
                value = value.reshape(1, 1, -1)
            if subject.method == "eagle3":
                name = name.replace("layers.0.", self.first_layer)
            weights[name] = value
        # A class that builds a bias on queries builds one on the attention's output, and leaves at random what a file
        # lacks; but EAGLE-1's and Qwen3's of method eagle3 build none.
        qwen3 = subject.method == "eagle3" and subject.config.norms.query_key
        if subject.config.attention_bias == "qkv" and subject.method != "eagle" and not qwen3:
            for name in [*weights]:
                if name.endswith("self_attn.o_proj.weight"):
                    weights[name.replace(".weight", ".bias")] = weights[name].new_zeros(
                        len(weights[name])
                    )
        if not drafter.vocab.complete:
            ids_D = drafter.vocab.target_ids_D
            weights[named.DRAFT_TO_TARGET] = ids_D - torch.arange(len(ids_D), device=ids_D.device)
            weights[named.TARGET_TO_DRAFT] = drafter.vocab.draft_ids_V >= 0
        return {name: value.detach().cpu().contiguous() for name, value in weights.items()}

    def command(
        self, directory: str, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> str:
        """Return the line that serves the target with the drafter, a chain of drafts a pass.

        vLLM's second model runner hands every drafter of method eagle3 fused states, whatever its config says.
        """
        drafter = DrafterCheckpoint.of(directory, subject)
        arguments = vllm_arguments(from_anywhere(target), drafter, draft_tokens)
        line = shlex.join(["vllm", *arguments])
        last_state = subject.method == "eagle3" and not subject.config.fusion.mixes
        return f"VLLM_USE_V2_MODEL_RUNNER=0 {line}" if last_state else line


def _keys(subject: Subject) -> Raw:
    return keys.config_to_keys(
        subject.config,
        subject.method,
        unbounded=subject.narrowed,
        own_rope=subject.rope_is_changed,
    )


def from_anywhere(target: TargetSource) -> TargetSource:
    """Return a target by a name that holds in every working directory."""
    place = Path(target.directory())
    return replace(target, source=str(place.resolve())) if place.exists() else target


def vllm_arguments(
    target: TargetSource,
    drafter: DrafterCheckpoint | None = None,
    draft_tokens: int = 0,
) -> list[str]:
    """Return the arguments of ``vllm`` for a target, alone or with a drafter."""
    arguments = ["serve", target.servable()]
    if drafter is not None:
        speculative: Raw = {
            "method": drafter.method,  # else vLLM guesses it from the path
            "model": str(drafter.directory),
            "num_speculative_tokens": draft_tokens,
        }
        if drafter.parallel:
            speculative["parallel_drafting"] = True
        arguments += ["--speculative-config", json.dumps(speculative)]
    if target.revision is not None:
        arguments += ["--revision", target.revision, "--tokenizer-revision", target.revision]
    if target.trust_remote_code:
        arguments.append("--trust-remote-code")
    if drafter is not None:
        arguments += target_flags(drafter.architecture, drafter.method)
    return arguments


class SglangFormat(Format):
    """``--format sglang``, which vLLM reads too. More is written, as SGLang leaves at random what it does not find."""

    name: ClassVar[str] = "sglang"
    engine: ClassVar[str] = SGLANG
    # Its classes build fc as a plain layer of torch, which would take eight-bit numbers for weights without a word.
    matrices: ClassVar[tuple[str, ...]] = LAYER_MATRICES

    def architectures(self, subject: Subject) -> list[str]:
        """Return SGLang's class first; vLLM takes the first one that it knows."""
        if subject.method == "eagle":
            return ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
        if type(subject.config.attention) is MLA:
            return ["Eagle3DeepseekV2ForCausalLM"]
        return ["LlamaForCausalLMEagle3"]

    def tensors(self, drafter: Drafter, subject: Subject) -> Weights:
        """Return the base's tensors, EAGLE-1's bias even if zero, and both engines' names of further input norms."""
        weights = super().tensors(drafter, subject)
        if subject.method == "eagle":
            weights.setdefault(
                "fc.bias", torch.zeros(subject.config.hidden_size, dtype=weights["fc.weight"].dtype)
            )
            return weights
        for i in range(1, subject.config.num_layers):
            weights[f"layers.{i}.hidden_norm.weight"] = weights[
                f"layers.{i}.input_layernorm.weight"
            ].clone()
        return weights

    def command(
        self, directory: str, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> str:
        """Return the line that serves a chain, as vLLM's does; a larger ``--speculative-eagle-topk`` makes a tree."""
        arguments: Raw = {
            "model-path": from_anywhere(target).servable(),
            "speculative-algorithm": subject.method.upper(),
            "speculative-draft-model-path": directory,
            "speculative-num-steps": draft_tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": draft_tokens + 1,
        }
        if target.revision is not None:
            arguments["revision"] = target.revision
        if subject.config.attention_window != "full":
            arguments["speculative-draft-window-size"] = subject.config.attention_window
        flags = (f" --{name} {shlex.quote(str(value))}" for name, value in arguments.items())
        line = f"python -m sglang.launch_server{''.join(flags)}"
        return f"{line} --trust-remote-code" if target.trust_remote_code else line


LAYER = "transformer_layer_config"
# The classes by kind.
SPECULATORS = {
    "eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator", "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}  # fmt: skip
SPECULATORS_VERSION = "0.9.0"
# The flat keys that stand at the top in the speculators format; the others describe the layer.
TOP = {
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    keys.IDS, keys.AUX, "tie_word_embeddings", "mask_token_id", "block_size", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor",
}  # fmt: skip


class SpeculatorsFormat(Format):
    """``--format speculators``: the format of vLLM's library, which ``vllm serve`` takes without further arguments."""

    name: ClassVar[str] = "speculators"
    first_layer: ClassVar[str] = "layers.0."  # the library's layers are all numbered

    def tensors(self, drafter: Drafter, subject: Subject) -> Weights:
        """Return the base's tensors and the token embedding, which the library would leave uninitialized."""
        return super().tensors(drafter, subject) | {
            EMBEDDING: drafter.embed_tokens.weight.detach().cpu().contiguous()
        }

    def needs(self, subject: Subject) -> str | None:
        """Return the base's release, or 0.25.0 for switches that earlier ones ignore in this format."""
        config = subject.config
        dropped = config.norms.aux == "each" or type(config.recurrence) is PostNorm
        return "0.25.0" if dropped and not subject.parallel else super().needs(subject)

    def check(self, subject: Subject) -> None:
        """Raise NotServable for what the engine, or this format, cannot express."""
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

    def config(self, subject: Subject, target: str, draft_tokens: int) -> Raw:
        """Return the layer's config in a block, the drafter's switches at the top, and the target by name."""
        flat = _keys(subject)
        top = {key: value for key, value in flat.items() if key in TOP}
        kind = "peagle" if subject.parallel else subject.method
        if subject.block:
            top[keys.AUX] = list(subject.config.aux_layers)
            top["mask_token_id"] = subject.config.recurrence.mask_token_id  # type: ignore[attr-defined]
        layer = {key: value for key, value in flat.items() if key not in TOP}
        for key in ("eagle_config", "dflash_config", "target_layer_ids", "num_anchors"):
            layer.pop(key, None)  # of other layouts
        if subject.parallel:
            # vLLM 0.32 passes these on from the layer alone, the library reads them at the top.
            layer |= {key: flat[key] for key in ("fc_norm", "norm_output")}
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": draft_tokens,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        verifier = {
            "name_or_path": str(Path(target).resolve()) if Path(target).is_dir() else target,
            "architectures": [subject.architecture],
        }
        return {
            "architectures": [SPECULATORS[kind]],
            "speculators_model_type": kind,
            "speculators_version": SPECULATORS_VERSION,
            LAYER: layer | {"tie_word_embeddings": False},
            **top,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
        }

    def command(
        self, directory: str, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> str:
        """Return the line that serves the checkpoint, which names target, method and number of drafts itself."""
        flags = target_flags(subject.architecture, subject.method)
        return shlex.join(["vllm", "serve", directory, *flags])


def flat(raw: Raw) -> Raw:
    """Return the keys of a ``config.json`` without nesting, which only speculators has.

    Raises:
        ValueError: a key that tells how to read the nested ones is missing.
    """
    if "speculators_config" not in raw and "speculators_model_type" not in raw:
        return raw
    kind = raw.get("speculators_model_type")
    if kind not in [*SPECULATORS]:  # a stranger may have written what has no hash
        raise ValueError(
            f"speculators_model_type is {kind!r}; only eagle3, peagle, dflash and dspark can be read"
        )
    if not isinstance(raw.get(LAYER), Mapping):
        raise ValueError(f"{LAYER} is missing")
    if "norm_before_residual" not in raw and kind == "eagle3":
        raise ValueError(
            "norm_before_residual is absent, which vLLM takes for true and speculators for false: write it"
        )
    if "sample_from_anchor" not in raw and kind == "dspark":
        raise ValueError(
            "sample_from_anchor is absent, which vLLM takes for false and speculators for true: write it"
        )
    return {**raw[LAYER], **{key: raw[key] for key in TOP if key in raw}}
