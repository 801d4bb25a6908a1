"""The description of a drafter: what the user chose, and what it became for one target."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from specdec.drafter.attention import GQA, AttentionKind, HeadSizes
from specdec.drafter.checks import check_boundaries, check_groups, check_heads, check_window
from specdec.drafter.entry import Entry, Wide
from specdec.drafter.fusion import Concat, Fusion
from specdec.drafter.norms import Norm, Norms
from specdec.drafting import DraftingMode, PostNorm, Recurrence
from specdec.nn.parts import Part, part_from_json, part_to_json
from specdec.nn.rope import frequencies, rope_parameters
from specdec.utils.config import preset_file, preset_names, read_yaml
from specdec.utils.numbers import (
    Heads,
    Intermediate,
    Layers,
    Positions,
    Positive,
    Share,
    Vocabulary,
    Whole,
    Width,
    check_numbers,
)

AXES: dict[str, type[Part]] = {
    "fusion": Fusion,
    "entry": Entry,
    "recurrence": Recurrence,
    "attention": AttentionKind,
}
# anything else at a site is a user's own norm
NORM_WORDS = (True, False, "none", "each", "concat", "raw", "normed")


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter's design, before a target gives it its dimensions. The defaults are EAGLE-3.1.

    Args:
        fusion: how the target's hidden states become the feature.
        entry: how the token embedding meets the feature.
        norms: where normalization happens.
        recurrence: what a drafting step hands to the next.
        head: ``own``, over the draft vocabulary, or the ``target``'s, over everything (EAGLE-1).
        draft_vocab_size: tokens that the head knows; a target with fewer is taken whole. ``all`` takes them all.
        aux_layers: boundaries to tap, numbered as Hugging Face ``hidden_states`` indices, or the fusion's ``default``.
        attention: how a layer attends.
        num_layers: decoder layers of the drafter.
        hidden_size: width, or the ``target``'s.
        intermediate_size: feed-forward width, or the ``target``'s.
        num_attention_heads: query heads of attention GQA, or as many as the ``target`` has. Engines read most designs
            only if they divide ``hidden_size``.
        num_key_value_heads: key heads, of which the query heads are a multiple, or as many as the ``target`` has.
        head_dim: width of a head, even, or the ``target``'s; heads and width need not give ``hidden_size``.
        attention_window: positions back that a node attends to, itself included, or the ``full`` text.
        attention_sinks: first tokens of the text that it attends to beyond its window
            (https://arxiv.org/abs/2309.17453); 0 for none.
        attention_bias: biases on queries, keys, values and the attention's output (``true``), or on the first three
            alone (``qkv``, as Qwen2 has them), as some published drafters do.
        rope_theta: base of the drafter's rotary positions, unscaled, or all as the ``target`` has them. A target
            without such positions (Nemotron-H) needs a number.
    """

    fusion: Fusion = field(default_factory=Concat)
    entry: Entry = field(default_factory=Wide)
    norms: Norms = field(default_factory=lambda: Norms(aux="each"))
    recurrence: Recurrence = field(default_factory=PostNorm)
    head: Literal["own", "target"] = "own"
    draft_vocab_size: Vocabulary | Literal["all"] = 32000
    aux_layers: list[int] | Literal["default"] = "default"
    attention: AttentionKind = field(default_factory=GQA)
    num_layers: Layers = 1
    hidden_size: Width | Literal["target"] = "target"
    intermediate_size: Intermediate | Literal["target"] = "target"
    num_attention_heads: Heads | Literal["target"] = "target"
    num_key_value_heads: Heads | Literal["target"] = "target"
    head_dim: Heads | Literal["target"] = "target"
    attention_window: int | Literal["full"] = "full"
    attention_sinks: Whole = 0
    attention_bias: bool | Literal["qkv"] = False
    rope_theta: float | Literal["target"] = "target"

    def __post_init__(self) -> None:
        """Refuse what no target can make legal, before one is loaded."""
        for name, base in AXES.items():
            if type(getattr(self, name)) is base:
                raise ValueError(
                    f"drafter.{name}={base.__name__} is the abstract base of this axis: choose one of its subclasses"
                )
        check_numbers(DrafterSpec, vars(self))
        check_window(self.attention_window, self.attention_sinks)
        if self.aux_layers != "default":
            check_boundaries(self.aux_layers)
        check_heads(self)
        # these look at the other axes alone
        for axis in (self.entry, self.norms, self.recurrence, self.attention):
            axis.check(self)

    @property
    def drafting(self) -> DraftingMode:
        """How the drafts of a pass are made."""
        return self.recurrence.drafting()

    @classmethod
    def preset(cls, name: str) -> Self:
        """A shipped design by the name of its file in ``conf/drafter``, as ``eagle3``.

        Raises:
            ValueError: there is none of this name.
        """
        known = preset_names("model.drafter")
        if name not in known:
            raise ValueError(f"no preset {name!r} of a drafter: choose from {', '.join(known)}")
        return cls.read(preset_file("model.drafter", name))

    @classmethod
    def read(cls, path: str) -> Self:
        """The design of a YAML file with the keys of ``model.drafter``.

        Raises:
            ValueError: the file cannot be read, or is of no design.
        """
        data = read_yaml(path)
        if not isinstance(data, Mapping) or set(data) - {
            field.name for field in dataclasses.fields(cls)
        }:
            raise ValueError(
                f"{path}: expected the keys of model.drafter, as the files in conf/drafter have them"
            )
        return cls(**_with_parts(data, path))


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The only description of a built drafter: complete, checked, stored whole in its ``config.json``.

    Args:
        aux_layers: boundaries of the target, strictly increasing; b is the residual stream after b layers.
        attention_window: positions back that a node attends to, itself included, or ``full``.
        attention_sinks: first tokens of the text that it attends to beyond its window.
        logit_scale: what the head's products are multiplied by: the target's number where the head is the target's
            (Granite and Cohere scale their logits), else 1; an imported drafter may have another.
        rope: the target's rope block, verbatim; see :func:`specdec.nn.rope.rope_parameters`.
        target: the identity of the target it was built for.

    Raises:
        ValueError: the axes contradict each other or the dimensions; the message says why.
    """

    fusion: Fusion
    entry: Entry
    norms: Norms
    recurrence: Recurrence
    head: Literal["own", "target"]
    aux_layers: tuple[int, ...]
    attention: AttentionKind
    num_layers: Layers
    hidden_size: Width
    intermediate_size: Intermediate
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: Heads
    vocab_size: Vocabulary
    draft_vocab_size: Vocabulary
    attention_window: int | Literal["full"]
    attention_sinks: Whole
    attention_bias: bool | Literal["qkv"]
    logit_scale: Positive
    rms_norm_eps: Share
    rope: Mapping[str, Any]
    max_position_embeddings: Positions
    target_hidden_size: Width
    num_target_layers: Heads
    target: Mapping[str, str | int | None]

    def __post_init__(self) -> None:
        check_numbers(DrafterConfig, vars(self))
        check_window(self.attention_window, self.attention_sinks)
        if type(self.attention_bias) is not bool and self.attention_bias != "qkv":
            raise ValueError(
                f"attention_bias must be true, false or qkv, not {self.attention_bias!r:.60}"
            )
        if self.head not in ("own", "target"):
            raise ValueError(f"head must be own or target, not {self.head!r:.60}")
        if odd := [
            value for value in self.target.values() if not isinstance(value, str | int | None)
        ]:
            raise ValueError(
                f"the target's identity holds {odd[0]!r:.60}, wanted words and whole numbers"
            )
        if self.attention.rotated(self) % 2:
            raise ValueError(
                f"head_dim must be even, not {self.head_dim}: rotary positions pair channels; set "
                "model.drafter.head_dim"
            )
        check_groups(self.num_attention_heads, self.num_key_value_heads)
        check_boundaries(self.aux_layers, self.num_target_layers)
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie in 1..{self.vocab_size}"
            )
        if self.recurrence.of_target(self.vocab_size) != self.recurrence:
            raise ValueError(
                "the mask token of a drafter's config must be its own number, not one from the end"
            )
        if self.head == "target" and self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                "head=target covers the whole vocabulary: set --model.drafter.draft_vocab_size all"
            )
        if self.head == "target" and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"head=target reads states of width {self.target_hidden_size}, the drafter has {self.hidden_size}"
            )
        for axis in (self.fusion, self.entry, self.norms, self.recurrence, self.attention):
            axis.check(self)
        frequencies(self.rope, self.attention.rotated(self), self.max_position_embeddings)

    @property
    def drafting(self) -> DraftingMode:
        """How the drafts of a pass are made."""
        return self.recurrence.drafting()

    @classmethod
    def for_target(
        cls,
        spec: DrafterSpec,
        hf_config: Any,
        *,
        vocab_size: int,
        num_target_layers: int,
        identity: Mapping[str, str | int | None],
        logit_scale: float = 1.0,
    ) -> Self:
        """Give a design the dimensions of a target.

        Args:
            hf_config: the target's transformers config of its text model.
            vocab_size: rows of the target's output head.
            logit_scale: see :class:`DrafterConfig`; a target's own where the head is the target's.
        """
        # layers of several sizes (Gemma 4): the first one's
        if getattr(hf_config, "is_heterogeneous", False):
            hf_config = hf_config.per_layer_config[0]
        chosen = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        for width in ("hidden_size", "intermediate_size"):
            if chosen[width] == "target":
                chosen[width] = getattr(hf_config, width)
        for name, size in spec.attention.heads(hf_config)._asdict().items():
            if chosen[name] == "target":
                chosen[name] = size
        theta = chosen.pop("rope_theta")
        rope = (
            rope_parameters(hf_config)
            if theta == "target"
            else {"rope_type": "default", "rope_theta": float(theta)}
        )
        default = spec.aux_layers == "default"
        chosen["aux_layers"] = tuple(
            spec.fusion.default_layers(num_target_layers) if default else spec.aux_layers
        )
        size = spec.draft_vocab_size
        chosen["draft_vocab_size"] = vocab_size if size == "all" else min(size, vocab_size)
        chosen["recurrence"] = spec.recurrence.of_target(vocab_size)
        chosen["attention"] = spec.attention.of_target(hf_config)
        return cls(
            **chosen,
            logit_scale=logit_scale,
            vocab_size=vocab_size,
            # families without RMSNorm name no such epsilon
            rms_norm_eps=getattr(hf_config, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=hf_config.max_position_embeddings,
            target_hidden_size=hf_config.hidden_size,
            num_target_layers=num_target_layers,
            target=dict(identity),
        )

    def with_window(self, window: int | Literal["full"] | None, sinks: int | None) -> Self:
        """The same config with another attention window and other sinks, as for a measurement.

        Args:
            window: what replaces ``attention_window``; None keeps it.
            sinks: what replaces ``attention_sinks``; None keeps them, or sets none where ``window`` is ``full``.

        Raises:
            ValueError: a number is out of range, sinks come without a window, or the drafter cannot have a window.
        """
        if window is None and sinks is None:
            return self
        if self.entry.context:
            raise ValueError(
                "attention_window and attention_sinks: this drafter drafts in blocks "
                f"(entry {type(self.entry).__name__}) that see the whole text: leave both options out"
            )
        own_sinks = 0 if window == "full" else self.attention_sinks
        return dataclasses.replace(
            self,
            attention_window=self.attention_window if window is None else window,
            attention_sinks=own_sinks if sinks is None else sinks,
        )

    def design(self) -> DrafterSpec:
        """The design that becomes this config for its target again."""
        names = {f.name for f in dataclasses.fields(DrafterSpec)} & {
            f.name for f in dataclasses.fields(self)
        }
        chosen = {name: getattr(self, name) for name in names} | {
            "aux_layers": list(self.aux_layers)
        }
        if self.attention.fixed_heads:
            chosen |= dict.fromkeys(HeadSizes._fields, "target")
        theta = self.rope["rope_theta"]
        plain = dict(self.rope) == {"rope_type": "default", "rope_theta": theta}
        return DrafterSpec(**chosen, rope_theta=theta if plain else "target")

    def to_json(self) -> dict[str, Any]:
        """Lossless JSON-able data."""
        axes = {name: part_to_json(getattr(self, name)) for name in AXES}
        norms = {
            site: part_to_json(norm) if isinstance(norm, Norm) else norm
            for site, norm in vars(self.norms).items()
        }
        plain = {
            "aux_layers": list(self.aux_layers),
            "rope": dict(self.rope),
            "target": dict(self.target),
        }
        return {**vars(self), **axes, **plain, "norms": norms}

    @classmethod
    def from_json(cls, data: Any, where: str = "config") -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: a key is missing or unknown, or a value is not legal.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"{where}: the drafter's config is missing or no mapping")
        names = {f.name for f in dataclasses.fields(cls)}
        if missing := sorted(names - set(data)):
            raise ValueError(f"{where}: the drafter's config lacks {', '.join(missing)}")
        if unknown := sorted(set(data) - names):
            raise ValueError(
                f"{where}: the drafter's config has unknown keys: {', '.join(unknown):.300}"
            )
        try:
            values = {**_with_parts(data, where), "aux_layers": tuple(data["aux_layers"])}
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from error
        try:
            return cls(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from error


def _with_parts(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Plain data of a spec or config with its parts in place of their names; ValueError if they are none."""
    parts: dict[str, Any] = {
        name: part_from_json(base, data[name], f"{where}: {name}")
        for name, base in AXES.items()
        if name in data
    }
    if "norms" not in data:
        return {**data, **parts}
    norms: dict[str, Any] = {
        site: value
        if value in NORM_WORDS
        else part_from_json(Norm, value, f"{where}: norms.{site}")
        for site, value in data["norms"].items()
    }
    if set(norms) != (sites := {field.name for field in dataclasses.fields(Norms)}):
        raise ValueError(
            f"{where}: norms must name {', '.join(sorted(sites))}; found {', '.join(norms):.300}"
        )
    return {**data, **parts, "norms": Norms(**norms)}
