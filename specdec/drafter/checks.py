"""Checks of a drafter's design that need no target."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec.drafter.attention import HeadSizes

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterSpec

# the unroll shows a node its own keys of every earlier step, as decoding does inside the window
SMALLEST_WINDOW = 16


def check_window(window: Any, sinks: Any) -> None:
    if window != "full" and (type(window) is not int or window < SMALLEST_WINDOW):
        raise ValueError(
            f"attention_window must be full or at least {SMALLEST_WINDOW}, not {window!s:.60}: a node always sees its "
            "own keys of the earlier unroll steps, which a smaller window would hide in decoding"
        )
    if sinks and window == "full":
        raise ValueError(
            f"attention_sinks {sinks} keep tokens beyond a window, and attention_window is full: set both"
        )


def check_boundaries(layers: Sequence[int], last: int | None = None) -> None:
    """``last`` is the target's last boundary, where it is known."""
    boundaries = list(layers)
    if odd := [boundary for boundary in boundaries if type(boundary) is not int]:
        raise ValueError(f"aux_layers must be whole numbers, not {odd[0]!r:.60}")
    if not boundaries:
        raise ValueError(
            "aux_layers [] taps nothing: name at least one boundary of the target, or set default"
        )
    if boundaries != sorted(set(boundaries)):
        raise ValueError(
            f"aux_layers {boundaries} must be strictly increasing, each boundary once: set {sorted(set(boundaries))}"
        )
    if boundaries[0] < 0 or (last is not None and boundaries[-1] > last):
        reach = "upwards" if last is None else f"to {last}"
        raise ValueError(
            f"aux_layers {boundaries}: the target has boundaries 0 {reach}; leave out what lies outside"
        )


def check_heads(spec: "DrafterSpec") -> None:
    """Refuse heads that are wrong, or not to be chosen, whatever the target."""
    chosen = [name for name in HeadSizes._fields if getattr(spec, name) != "target"]
    if chosen and spec.attention.fixed_heads:
        raise ValueError(
            f"{chosen[0]} {getattr(spec, chosen[0])} belongs to attention GQA: attention "
            f"{type(spec.attention).__name__} {spec.attention.fixed_heads}: leave it out"
        )
    heads = spec.num_attention_heads
    groups = spec.num_key_value_heads
    width = spec.head_dim
    if width != "target" and width % 2:
        raise ValueError(
            f"head_dim must be even, not {width}: rotary positions pair channels; set {width + 1}"
        )
    if heads != "target" and groups != "target":
        check_groups(heads, groups)


def check_groups(heads: int, groups: int) -> None:
    if heads % groups:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}: set model.drafter."
            f"num_key_value_heads to one of {fitting}"
        )
