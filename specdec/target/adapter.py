"""A LoRA adapter of a target (https://arxiv.org/abs/2106.09685), by PEFT: merged into the model when it is loaded.

What a stranger's ``adapter_config.json`` may say is held to what merging needs: no module by its name, no pattern.
"""

import re
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from specdec.target.files import check_files, failing_in_one_line, is_local
from specdec.utils.reading import check_sum, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# what makes the merged weights; all else has to be as LoraConfig has it by itself
TAKEN = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora", "use_dora",
    "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
}  # fmt: skip
WITHOUT_EFFECT = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout",
}  # fmt: skip
LARGEST_RANK = 2**14


def merge_adapter(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """The model with an adapter's updates added to its weights, in the model's dtype.

    Args:
        model: as loaded; it is changed.
        adapter: a directory with ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT saves them, or a
            Hub id.

    Raises:
        ValueError: there is none, it is no LoRA, it is of another model, or ``peft`` is missing.
    """
    with failing_in_one_line(adapter):
        if not is_peft_available():
            raise ValueError("an adapter is read by one more package: pip install peft")
        from peft import get_peft_model, set_peft_model_state_dict

        if is_local(adapter):
            check_files(adapter)
            files = [Path(adapter) / name for name in (CONFIG, WEIGHTS)]
            if missing := [path.name for path in files if not path.is_file()]:
                raise ValueError(f"it has no {missing[0]}: give what PEFT's save_pretrained wrote")
            for path in files:
                check_sum(path)
        else:
            files = [Path(hf_hub_download(adapter, name)) for name in (CONFIG, WEIGHTS)]
        tensors = load_file(files[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that lack, which is an error below
            wrapped = get_peft_model(model, lora_config(read_json(files[0])))
            report = set_peft_model_state_dict(wrapped, tensors)
        # PEFT drops what has no place: count what came in
        places = {
            name for name in wrapped.state_dict() if "lora_" in name or "modules_to_save" in name
        }
        lacking = sorted(places & set(report.missing_keys))
        if lacking or report.unexpected_keys:
            name = lacking[0] if lacking else report.unexpected_keys[0]
            raise ValueError(
                f"{name} is {'missing' if lacking else 'unknown'}: it is an adapter of another model"
            )
        merged: PreTrainedModel = wrapped.merge_and_unload(safe_merge=True)
    return merged


def lora_config(said: Any) -> Any:
    """PEFT's configuration of what an ``adapter_config.json`` says; ``ValueError`` for all that merging does not need.

    PEFT would import a module that is named there, and match a pattern however long that takes.
    """
    from peft import LoraConfig

    if not isinstance(said, dict) or said.get("peft_type") != "LORA":
        raise ValueError(f"{CONFIG}: no LoRA adapter: merge it into its model and give that")
    taken = {name: said[name] for name in TAKEN & said.keys()}
    defaults = LoraConfig().to_dict()
    for name in sorted(said.keys() - TAKEN - WITHOUT_EFFECT):
        if (
            said[name]
            and said[name] != defaults.get(name)
            and (name, said[name]) != ("init_lora_weights", "gaussian")
        ):
            raise ValueError(
                f"{CONFIG}: {name} is {str(said[name])[:40]!r}, which is not read: merge it into its model"
            )
    patterns: dict[str, Any] = {
        name: taken.get(name) or {} for name in ("rank_pattern", "alpha_pattern")
    }
    names = [
        taken.get(name) or [] for name in ("target_modules", "exclude_modules", "modules_to_save")
    ]
    ranks = [taken.get("r"), *patterns["rank_pattern"].values()]
    words = [
        *patterns["rank_pattern"],
        *patterns["alpha_pattern"],
        *(word for part in names for word in part),
    ]
    words += [taken["layers_pattern"]] if taken.get("layers_pattern") else []
    if not all(isinstance(part, list) for part in names) or not all(
        isinstance(word, str) and re.fullmatch(r"[\w.]+", word) for word in words
    ):
        raise ValueError(
            f"{CONFIG}: modules are to be named in lists, without patterns: merge it into its model"
        )
    if not all(type(rank) is int and 0 < rank <= LARGEST_RANK for rank in ranks):
        raise ValueError(f"{CONFIG}: a rank is a whole number up to {LARGEST_RANK:,}: correct it")
    return LoraConfig(**taken)
