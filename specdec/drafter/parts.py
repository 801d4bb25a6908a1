"""A part of a drafter: a frozen spec that builds a module; parts as plain data; and whether what they build fits.

specdec's own part is saved by its class's name, so that files can move, a user's own by its import path. A part with
arguments is ``{"class_path": name, "init_args": {...}}``, as in a config; one without is its name alone.

Legend: B batch, T nodes, N aux layers, H hidden, W queries, keys and values of the first layer.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from specdec.utils.config import class_name
from specdec.utils.imports import FLAG, ensure

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig
    from specdec.drafter.model import Drafter

Kind = TypeVar("Kind")
Built = TypeVar("Built", bound=nn.Module)

# of a dry run
B = 2
T = 3


class Part:
    """Base of fusion, entry, recurrence and attention: a frozen dataclass whose fields are its arguments."""

    def check(self, config: Any) -> None:
        """Raise ValueError for a DrafterConfig or a DrafterSpec that this part cannot serve."""

    def build(self, config: "DrafterConfig") -> nn.Module:
        """The module."""
        raise TypeError(f"{type(self).__name__} must build a module")


def describe(part: Any) -> str | dict[str, Any]:
    """A frozen spec as JSON-able data, in the spelling that configs use.

    Raises:
        ValueError: its class is no dataclass, so that its arguments are not known.
    """
    cls = type(part)
    if not dataclasses.is_dataclass(cls):
        raise ValueError(
            f"{cls.__name__} cannot be stored: decorate it with @dataclass(frozen=True)"
        )
    arguments = dataclasses.asdict(part)
    return {"class_path": class_name(cls), "init_args": arguments} if arguments else class_name(cls)


def revive(base: type[Kind], data: Any, where: str) -> Kind:
    """The spec that ``data`` describes.

    A module that is not loaded is imported only if the user allowed it; see :mod:`specdec.utils.imports`.

    Raises:
        ValueError: not a part, an unknown class, one that may not be imported, or arguments that it does not take.
    """
    if isinstance(data, str):
        data = {"class_path": data, "init_args": {}}
    if not isinstance(data, dict) or set(data) != {"class_path", "init_args"}:
        raise ValueError(
            f"{where}: expected a part's name, or class_path and init_args, found {data!r:.200}"
        )
    name = str(data["class_path"])
    given = data["init_args"]
    if _find(base, name) is None:
        ensure(name)
    if (cls := _find(base, name)) is None:
        raise ValueError(
            f"{where}: {name!r} is no {base.__name__} that is loaded here; if it is your own, import its module before "
            f"or name it with {FLAG}"
        )
    kinds = {field.name: field.type for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(given, dict) or set(given) != set(kinds):
        raise ValueError(f"{where}: {cls.__name__} takes {sorted(kinds)}, found {given!r:.200}")
    for argument, kind in kinds.items():
        if kind in (bool, int, float, str) and type(given[argument]) not in (
            kind,
            int if kind is float else kind,
        ):
            raise ValueError(
                f"{where}: {argument} is {given[argument]!r:.60}, wanted {kind.__name__}"
            )
    return cls(**given)


def _find(base: type[Kind], name: str) -> type[Kind] | None:
    if dataclasses.is_dataclass(base) and class_name(base) == name:
        return base
    return next((found for cls in base.__subclasses__() if (found := _find(cls, name))), None)


def built(axis: str, config: Any, kind: type[Built]) -> Built:
    """The module of one of a config's axes; ``ValueError`` if its part builds something else."""
    part = getattr(config, axis)
    module = part.build(config)
    if not isinstance(module, kind):
        name = class_name(type(part))
        made = type(module).__name__
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(
            f"{axis} {name}: its build returned a {made}, wanted an instance of {wanted}"
        )
    return module


@torch.no_grad()
def dry_run(drafter: "Drafter") -> None:
    """Send a few nodes through norms, fusion, entry and recurrence, one after another; layers and head stay out of it.

    It runs where the drafter is, on the meta device too, and changes nothing in it.

    Raises:
        ValueError: a part fails, or returns another shape or dtype than the drafter needs; the message names the
            part, what it returned and what was wanted.
    """
    config = drafter.config
    weight = drafter.lm_head.weight
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    projected = sum(config.attention.projections(config).values())
    aux_BTNH = weight.new_zeros(B, T, len(config.aux_layers), config.target_hidden_size)
    h_BTH = weight.new_zeros(B, T, config.hidden_size)
    heads_BTnd = weight.new_zeros(B, T, heads, config.head_dim)
    fusion, entry, recurrence = (
        f"{axis} {type(getattr(config, axis)).__name__}"
        for axis in ("fusion", "entry", "recurrence")
    )
    norms = {
        site: (getattr(drafter.norms, site), h_BTH)
        for site in ("embed", "hidden", "input", "output")
    }
    norms |= {"aux": (drafter.norms.aux, aux_BTNH)}
    if config.norms.query_key:
        norms |= {"query_key": (drafter.layers.layers[0].attention.norm, heads_BTnd)}
    modes = {module: module.training for module in drafter.modules()}
    drafter.eval()  # so that no module counts batches or draws random numbers
    try:
        for site, (norm, x) in norms.items():
            _check(f"norms.{site}", _call(f"norms.{site}", norm, x), x)
        _check(fusion, _call(fusion, drafter.fusion, drafter.norms.aux(aux_BTNH)), h_BTH)
        read = _call(entry, drafter.entry.read, h_BTH)
        if not isinstance(read, Tensor) or read.shape[:2] != (B, T):
            made = (
                f"shape {tuple(read.shape)}"
                if isinstance(read, Tensor)
                else f"a {type(read).__name__}"
            )
            raise ValueError(
                f"{entry} read tokens into {made}, wanted a tensor of shape ({B}, {T}, ...)"
            )
        entered = _call(entry, drafter.entry, read, h_BTH, h_BTH, drafter.norms)
        if not hasattr(entered, "block_BTH"):
            raise ValueError(
                f"{entry} returned a {type(entered).__name__}, wanted Entered(block, beside, residual)"
            )
        _check(entry, entered.block_BTH, h_BTH, " as block_BTH")
        if entered.beside_BTW is not None:
            _check(entry, entered.beside_BTW, weight.new_zeros(B, T, projected), " as beside_BTW")
        _check(entry, entered.residual_BTH, h_BTH, " as residual_BTH")
        _check(recurrence, _call(recurrence, drafter.recurrence, h_BTH, h_BTH), h_BTH)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _call(part: str, module: Callable[..., Any], *inputs: Any) -> Any:
    try:
        return module(*inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs if isinstance(x, Tensor))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{part} cannot take tensors of shape {shapes}: {reason}") from error


def _check(part: str, made: Any, like: Tensor, role: str = "") -> None:
    shape = tuple(like.shape)
    if not isinstance(made, Tensor):
        raise ValueError(
            f"{part} returned a {type(made).__name__}{role}, wanted a tensor of shape {shape}"
        )
    if made.shape != shape or made.dtype != like.dtype:
        raise ValueError(
            f"{part} returned shape {tuple(made.shape)} of {made.dtype}{role}, wanted {shape} of {like.dtype}: "
            "mend the module that it builds"
        )
