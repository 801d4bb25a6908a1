"""The drafter's directory: ``config.json``, ``model.safetensors`` and ``SHA256SUMS``, complete, checked when read."""

import hashlib
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialized

from specdec.drafter.config import DrafterConfig
from specdec.drafter.model import Drafter
from specdec.utils import hub
from specdec.utils.files import SUMS, check_sums, read_json, sha256, staged_directory, write_json
from specdec.utils.text import tensor_fault

FORMAT = "specdec-drafter"
WEIGHTS = "model.safetensors"
METADATA = {"format": "pt"}


def save_drafter(drafter: Drafter, directory: Path | str, replace: bool = False) -> Path:
    """Write a drafter's directory, whole or not at all.

    Raises:
        ValueError: the directory exists and ``replace`` is false, or it cannot be written.
    """
    directory = Path(directory)
    tensors = _tensors(drafter)
    with staged_directory(directory, replace) as temporary:
        try:
            save_file(tensors, temporary / WEIGHTS, metadata=METADATA)
        except SafetensorError as error:
            raise ValueError(f"{directory}: the weights cannot be written: {error}") from error
        about = {"format": FORMAT, "weights_sha256": sha256(temporary / WEIGHTS), "drafter": drafter.config.to_json()}
        write_json(temporary / "config.json", about)
    return directory


def weights_sha256(drafter: Drafter) -> str:
    """What ``config.json`` says of these weights in this dtype, wherever they were saved."""
    return hashlib.sha256(serialized(_tensors(drafter), metadata=METADATA)).hexdigest()


def located(drafter: Path | str) -> Path:
    """A saved drafter's directory: the one of that name, or ``USER/NAME[@REVISION]`` fetched from the Hugging Face Hub.

    Raises:
        ValueError: there is no such directory, and it cannot be had from the Hub. A name in a folder that is here is
            not looked for there.
    """
    path = Path(drafter)
    if path.is_dir():
        return path
    if path.parent.exists() or not (name := re.fullmatch(r"(\w[\w.-]*/[\w.-]+)(?:@(.+))?", str(drafter))):
        raise ValueError(f"{drafter}: no such drafter directory")
    return hub.fetch(name[1], name[2], ("*.json", WEIGHTS, SUMS))


def load_drafter(
    directory: Path | str, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu"
) -> Drafter:
    """Read a drafter's directory, in evaluation mode.

    Args:
        directory: one, or a name on the Hub; see :func:`located`.
        dtype: None for the one it is stored in.

    Raises:
        ValueError: a file is missing, damaged or of another format; a tensor is missing, unexpected or of another
            shape than the config says.
    """
    directory = located(directory)
    check_sums(directory, f"copy the drafter again or, if you changed it on purpose, remove {SUMS}")
    where, weights = directory / "config.json", directory / WEIGHTS
    stored = read_json(where)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise ValueError(f"{where}: not a specdec drafter (its format is not {FORMAT!r}): import a checkpoint first")
    config = DrafterConfig.from_json(stored.get("drafter"), str(where))
    if sha256(weights) != stored.get("weights_sha256"):
        raise ValueError(f"{weights}: its SHA-256 is not the one in config.json: the file was changed or damaged")
    tensors = load_file(weights)
    stored_dtype = tensors["lm_head.weight"].dtype if "lm_head.weight" in tensors else torch.float32
    drafter = Drafter(config, torch.arange(config.draft_vocab_size)).to(dtype or stored_dtype)
    wanted = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    if fault := tensor_fault({name: tensor.shape for name, tensor in tensors.items()}, wanted):
        raise ValueError(f"{weights}: not as config.json says: {fault}")
    drafter.load_state_dict(tensors)
    drafter.vocab.refresh()
    return drafter.to(device).eval().requires_grad_(False)


def _tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
