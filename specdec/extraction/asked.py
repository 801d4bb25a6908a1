"""The arguments of ``specdec cache``: a training run's model and data, and what is stored of them."""

import re
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from specdec.arguments import parse, short, target_shorthand
from specdec.compose import compose
from specdec.data import TokenData
from specdec.drafter import DrafterSpec
from specdec.serving.engine import VARIABLE
from specdec.target import Target
from specdec.target.loading import device_named
from specdec.training.building import config_for
from specdec.training.defaults import MODEL_AND_DATA
from specdec.training.module import DrafterModule

NOT_OURS = ("out", "trainer", "checkpoint", "acceptance", "seed_everything", "ckpt_path")  # of a training run's config


class Asked(NamedTuple):
    """What to store."""

    module: DrafterModule
    data: TokenData
    options: Any


def read(argv: list[str], prog: str, description: str) -> Asked:
    """Parse; config files are merged as ``specdec fit`` merges them, and what they say of the trainer is left out.

    Raises:
        ValueError: an argument or a config is wrong.
    """
    config, rest = compose([re.sub(r"^--target\.", "--model.target.", arg) for arg in target_shorthand(argv)])
    config = {key: value for key, value in config.items() if key not in NOT_OURS}
    parser = LightningArgumentParser(prog=prog, description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a config of specdec fit; several are merged in their order")
    parser.add_lightning_class_args(DrafterModule, "model")
    parser.add_lightning_class_args(TokenData, "data", subclass_mode=True)
    parser.add_argument("--out", type=str, required=True, help="the cache's directory; one that is not finished goes on")  # fmt: skip # noqa: E501
    parser.add_argument("--layers", type=list[int], default=[], help="boundaries to store beside the drafter's: [2, 6]")
    parser.add_argument("--drafters", type=list[DrafterSpec], default=[], help="further designs whose boundaries are stored, as a list of presets")  # fmt: skip # noqa: E501
    parser.add_argument("--first_rows", type=int | None, default=None, help="store the training rows that an epoch draws first, so many, beside those of validation and test; by default all")  # fmt: skip # noqa: E501
    parser.add_argument("--dtype", type=str, default="target", help="of what is stored: target, float32, bfloat16 or float16")  # fmt: skip # noqa: E501
    parser.add_argument("--shard_mb", type=float, default=512.0, help="size of a shard, 10^6 bytes")
    parser.add_argument("--device", type=str, default="auto", help="where transformers runs the target; auto takes a GPU if there is one")  # fmt: skip # noqa: E501
    parser.add_argument("--engine", type=str, default="transformers", help="what runs the target: transformers or vllm")
    parser.add_argument("--vllm", type=str | None, default=None, help=f"a Python that has vLLM; by default ${VARIABLE}, else this environment")  # fmt: skip # noqa: E501
    parser.add_argument("--vllm_args", type=dict[str, Any], default={}, help="more arguments of vLLM's engine: '{tensor_parallel_size: 2}'")  # fmt: skip # noqa: E501
    parser.set_defaults(MODEL_AND_DATA)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file, sort_keys=False)
        file.flush()
        try:
            found = parse(parser, [*(["--config", file.name] if config else []), *rest])
        except ValueError as error:
            raise ValueError(short(str(error).replace(file.name, "the config"))) from error
    if found.shard_mb <= 0:
        raise ValueError(f"--shard_mb must be above 0, not {found.shard_mb:g}")
    if found.first_rows is not None and found.first_rows < 1:
        raise ValueError(f"--first_rows must be at least 1, not {found.first_rows}")
    if found.engine not in ("transformers", "vllm"):
        raise ValueError(f"--engine {found.engine}: choose transformers or vllm")
    if found.engine == "vllm" and found.device != "auto":
        raise ValueError(
            "--device is of --engine transformers: vLLM takes the GPUs that CUDA_VISIBLE_DEVICES leaves it"
        )
    if found.engine != "vllm" and found.vllm_args:
        raise ValueError("--vllm_args is of --engine vllm: give both")
    return Asked(found.model, found.data, found)


def boundaries(target: Target, specs: Sequence[DrafterSpec], more: Sequence[int]) -> list[int]:
    """Every boundary that one of the designs taps; the final state, which is always stored, is none.

    Raises:
        ValueError: a design and the target do not go together.
    """
    found = set(more)
    for spec in specs:
        config = config_for(spec, target)
        found.update(b for b in config.aux_layers if b < target.num_layers or not config.aux_final_norm)
    return sorted(found)


def device_of(name: str) -> torch.device:
    """``auto``, or a device's name.

    Raises:
        ValueError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device_named(name)
