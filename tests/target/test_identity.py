"""One identity of everything that decides a target's numbers: what differs is found, and what does not is not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.data.tokenizer import tokenizer_digest
from specdec.target import Target
from specdec.target.identity import (
    PARTS,
    TOKENIZER,
    WEIGHTS,
    distinct_targets,
    model_digests,
    target_difference,
)
from tests.tiny import tiny_target


def lowest_bit(directory: Path) -> None:
    """Change the lowest bit of one weight in float32."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"].view(torch.int32)[7, 5] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})


def chat_template(directory: Path) -> None:
    """Give the tokenizer another chat template."""
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}!{% endfor %}"
    )


def vocabulary(directory: Path) -> None:
    """Exchange the ids of two words of the vocabulary."""
    file = directory / "tokenizer.json"
    text = file.read_text()
    swapped = text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    assert swapped != text
    file.write_text(swapped)


def epsilon(directory: Path) -> None:
    """Another epsilon of the norms, in config.json alone."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))


def special_token(directory: Path) -> None:
    """Texts are padded with another token."""
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"pad_token": "a"}))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "the lowest bit of a weight": (lowest_bit, WEIGHTS),
    "a value of the configuration": (epsilon, WEIGHTS),
    "the chat template": (chat_template, TOKENIZER),
    "two words of the vocabulary": (vocabulary, TOKENIZER),
    "a special token": (special_token, TOKENIZER),
}


@pytest.mark.parametrize(("change", "difference"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("parts", [False, True])
def test_each_part_of_it_is_found(
    target_directory: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    difference: str,
    parts: bool,
) -> None:
    copy = shutil.copytree(target_directory, tmp_path / "copy")
    first = Target.load(target_directory).identity
    assert target_difference(first, Target.load(copy, parts=parts).identity) is None
    change(copy)
    second = Target.load(copy, parts=parts).identity
    if parts and difference == WEIGHTS:
        difference = PARTS
    assert target_difference(first, second) == target_difference(second, first) == difference
    assert distinct_targets([first, second, first]) == [first, second]


def test_low_bits_count_between_targets_of_one_dtype() -> None:
    """A checkpoint in float32 is one model in both dtypes, so that a drafter may be trained with either."""
    wide = tiny_target(dtype=torch.float32)
    narrow = Target(tiny_target(dtype=torch.float32).model.to(torch.bfloat16))
    assert wide.identity["exact"] != narrow.identity["exact"]
    assert target_difference(wide.identity, narrow.identity) is None


def test_parts_in_another_dtype_do_not_take_the_whole_targets_bits(target_directory: Path) -> None:
    wide = Target.load(target_directory, dtype="float32").identity
    parts = Target.load(target_directory, dtype="bfloat16", parts=True)
    parts.take_identity(wide)
    narrow = Target.load(target_directory, dtype="bfloat16").identity
    assert parts.identity["fingerprint"] == narrow["fingerprint"]
    assert target_difference(parts.identity, narrow) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 5000, 2**22 + 3])
def test_any_bit_of_any_value_counts(dtype: torch.dtype, count: int) -> None:
    values = torch.arange(count + 1, dtype=torch.float32).to(dtype)[1:]  # begins at an odd place
    first = model_digests({}, {"w": values})
    assert first == model_digests({}, {"w": values.clone()})
    for place in {0, count // 2, count - 1}:
        changed = values.clone()
        bits = changed.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        bits[place] ^= 1
        second = model_digests({}, {"w": changed})
        assert second.exact != first.exact


def test_what_the_last_call_has_set_does_not_count(target_directory: Path) -> None:
    tokenizer: Any = Target.load(target_directory).tokenizer
    first = tokenizer_digest(tokenizer)
    tokenizer.pad_token = "</s>"
    with_padding = tokenizer_digest(tokenizer)
    assert with_padding != first
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer_digest(tokenizer) == with_padding


def test_what_is_unknown_says_nothing() -> None:
    known = tiny_target(dtype=torch.float32).identity
    older = {name: known[name] for name in ("source", "fingerprint", "parts")}
    assert target_difference(known, older) is None and target_difference(known, {}) == PARTS
