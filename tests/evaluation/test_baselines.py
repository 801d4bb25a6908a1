"""What is decoded beside ours."""

import json
import shutil
from pathlib import Path

import pytest

from specdec.decoding import PlainDecoder, Request, Sampling
from specdec.evaluation.baselines import parse_baseline
from specdec.target import Target

PROMPTS = [Request([5, 6, 7], 12), Request(list(range(20, 40)), 12)]


def test_an_assistant_drafts_and_the_target_speaks(target_directory: Path) -> None:
    """The target is its own assistant here."""
    target = Target.load(str(target_directory))
    wanted = [PlainDecoder(target).generate(*request[:2]).ids for request in PROMPTS]
    baseline = parse_baseline(f"assisted:{target_directory}")
    assert str(target_directory) in baseline.name
    decoder = baseline.decoder(target, Sampling(), 1)
    assert [made.ids for _, made in decoder.generate_all(PROMPTS, ())] == wanted
    assert decoder.how["assistant_model"] is not target.model


def test_an_assistant_with_another_tokenizer_is_refused(target_directory: Path, tmp_path: Path) -> None:
    other = shutil.copytree(target_directory, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"assisted: .*other has another tokenizer than the target"):
        parse_baseline(f"assisted:{other}").decoder(Target.load(str(target_directory)), Sampling(), 1)


@pytest.mark.parametrize(
    "text", ["", "lookup", "assisted", "assisted:", "prompt_lookup:5", "prompt_lookup:tokens=0", "plain_eager:x"]
)
def test_what_is_no_baseline_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected plain_eager, transformers, prompt_lookup"):
        parse_baseline(text)


def test_prompt_lookup_takes_its_number() -> None:
    assert "lookup of 5" in parse_baseline("prompt_lookup:tokens=5").name
    assert "lookup of 3" in parse_baseline("prompt_lookup").name
