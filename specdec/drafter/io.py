"""The drafter's directory: ``config.json``, ``model.safetensors`` and ``SHA256SUMS``, complete, checked when read."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialized

from specdec.drafter.config import DrafterConfig
from specdec.drafter.model import Drafter, skeleton_of
from specdec.drafter.of_run import check_of_run
from specdec.utils import hub
from specdec.utils.files import staged_directory, write_json
from specdec.utils.reading import SUMS, check_sums, explained, read_json, regular, sha256
from specdec.utils.text import tensor_fault

FORMAT = "specdec-drafter"
WEIGHTS = "model.safetensors"
METADATA = {"format": "pt"}
# a weight's dtype, as safetensors calls it; any of them will do
FLOATS = ("F64", "F32", "F16", "BF16")
WHOLE = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
WHOLE |= {torch.bool: "BOOL"}  # these must be as they are


class Measured(NamedTuple):
    """A tensor by the header of its file."""

    dtype: str  # as safetensors calls it
    shape: list[int]


def measure(file: Path) -> dict[str, Measured]:
    """The tensors of a safetensors file by its header, which says how much each will take before any is read.

    Raises:
        ValueError: it is no regular file, or header and length contradict each other.
    """
    regular(file)
    try:
        with explained(file), safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  no mapping
            measured = {
                name: Measured(tensor.get_dtype(), tensor.get_shape())
                for name, tensor in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(
            f"{file}: damaged or cut off ({' '.join(str(error).split()):.120}): fetch it again"
        ) from error
    if odd := [name for name in measured if not name.isprintable() or len(name) > 500]:
        raise ValueError(f"{file}: {odd[0]!r:.120} is no name of a tensor")
    return measured


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, with its name, if a weight is NaN or infinite."""
    for name, value in tensors.items():
        if value.is_floating_point() and value.numel():
            low, high = value.aminmax()  # NaN if any is; takes no memory
            if not (low.isfinite() and high.isfinite()):
                raise ValueError(
                    f"the weights {name} are not all finite: such a drafter accepts nothing"
                )


def save_drafter(
    drafter: Drafter,
    directory: Path | str,
    replace: bool = False,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Write a drafter's directory, whole or not at all.

    Args:
        about: JSON-ready, kept in ``config.json`` next to the design, for readers; loading asks for none of it.

    Raises:
        ValueError: a weight is not finite, the directory exists and ``replace`` is false, or it cannot be written.
    """
    directory = Path(directory)
    tensors = _tensors(drafter)
    check_finite(tensors)
    with staged_directory(directory, replace) as temporary:
        try:
            save_file(tensors, temporary / WEIGHTS, metadata=METADATA)
        except SafetensorError as error:
            raise ValueError(f"{directory}: the weights cannot be written: {error}") from error
        of = {
            "format": FORMAT,
            "weights_sha256": sha256(temporary / WEIGHTS),
            "drafter": drafter.config.to_json(),
        }
        write_json(temporary / "config.json", {**(about or {}), **of})
    return directory


def weights_sha256(drafter: Drafter) -> str:
    """Return what ``config.json`` says of these weights in this dtype, wherever they were saved."""
    return hashlib.sha256(serialized(_tensors(drafter), metadata=METADATA)).hexdigest()


def located(drafter: Path | str) -> Path:
    """Return a saved drafter's directory.

    Args:
        drafter: the directory, a training run's directory (for its ``drafter/``), or ``USER/NAME[@REVISION]`` on the
            Hugging Face Hub.

    Raises:
        ValueError: there is no such directory, and the Hub does not have it. If the name's parent folder exists here,
            the Hub is not asked.
    """
    path = Path(drafter)
    if path.is_dir():
        of_run = path / "drafter"
        is_run = (of_run / WEIGHTS).is_file() and not (path / WEIGHTS).exists()
        return of_run if is_run else path
    if path.parent.exists() or not (
        name := re.fullmatch(r"(\w[\w.-]*/[\w.-]+)(?:@(.+))?", str(drafter))
    ):
        raise ValueError(f"{drafter}: no such drafter directory")
    return hub.fetch(name[1], name[2], ("*.json", WEIGHTS, SUMS))


def load_drafter(
    directory: Path | str,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """Read a drafter's directory, in evaluation mode.

    Args:
        directory: one, or a name on the Hub; see :func:`located`.
        dtype: None for the one it is stored in.

    Raises:
        ValueError: a file is missing, damaged or of another format; it lies in another run's directory; a tensor is
            missing, unexpected, not finite, or of another shape or kind than the config says. That is found out by the
            file's header, before a module is built: no config takes more memory than the file has weights.
    """
    directory = located(directory)
    hashes = check_sums(
        directory, f"copy the drafter again or, if you changed it on purpose, remove {SUMS}"
    )
    where = directory / "config.json"
    weights = directory / WEIGHTS
    stored = read_json(where)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise ValueError(
            f"{where}: not a specdec drafter (its format is not {FORMAT!r}): import a checkpoint first"
        )
    config = DrafterConfig.from_json(stored.get("drafter"), str(where))
    if (hashes.get(WEIGHTS) or sha256(weights)) != stored.get("weights_sha256"):
        raise ValueError(
            f"{weights}: its SHA-256 is not the one in config.json: the file was changed or damaged"
        )
    check_of_run(directory)
    headers = measure(weights)
    wanted = skeleton_of(config).state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in wanted.items()}
    if fault := tensor_fault({name: header.shape for name, header in headers.items()}, shapes):
        raise ValueError(f"{weights}: not as config.json says: {fault}")
    for name, tensor in wanted.items():
        if headers[name].dtype not in (
            FLOATS if tensor.is_floating_point() else (WHOLE.get(tensor.dtype),)
        ):
            raise ValueError(
                f"{weights}: {name} is {headers[name].dtype}, wanted {tensor.dtype}".replace(
                    "torch.", ""
                )
            )
    tensors = load_file(weights)
    drafter = Drafter(config, torch.arange(config.draft_vocab_size)).to(
        dtype or tensors["lm_head.weight"].dtype
    )
    drafter.load_state_dict(tensors)
    try:
        check_finite(drafter.state_dict())
    except ValueError as error:
        raise ValueError(f"{weights}: {error}") from error
    drafter.vocab.refresh()
    return drafter.to(device).eval().requires_grad_(False)


def _tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()
    }
