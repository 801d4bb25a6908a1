"""What comes with the package is what its record and its card say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.embedded_target import CARD
from specdec.commands.pretraining import WEIGHTS, PretrainConfig
from specdec.embedded import RECORD, EmbeddedData, embedded_target
from specdec.embedded.corpus import ANSWERS
from specdec.evaluation.metrics import loops
from specdec.target import Target, TargetSource
from specdec.utils.reading import check_sums, read_json, sha256

MOST_BYTES = 24_000_000


def test_the_files_are_whole_and_small() -> None:
    path = embedded_target()
    check_sums(path, "")
    assert sum(file.stat().st_size for file in path.iterdir()) <= MOST_BYTES
    with safe_open(path / WEIGHTS, "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_record_is_of_the_recipe_and_the_weights() -> None:
    path = embedded_target()
    record = read_json(path / RECORD)
    assert record["weights_sha256"] == sha256(path / WEIGHTS)
    # the recipe trains this very model
    assert record["config"] == PretrainConfig(out=path).determinants
    # the name of benchmarks/embedded_target.py when it ran
    assert record["provenance"]["command"].startswith("specdec pretrain")
    assert (
        record["attention_sink"]["strongest"]
        == max(map(max, record["attention_sink"]["heads"]))
        >= 0.3
    )
    assert record["looping"] < 0.3
    card = (path / CARD).read_text()
    assert (
        record["weights_sha256"] in card
        and f"{record['attention_sink']['strongest']:.2f} of its attention" in card
    )


def test_it_is_a_target_and_has_the_sink_that_its_card_names() -> None:
    target = Target.load("embedded")
    record = read_json(embedded_target() / RECORD)
    assert target.num_layers == record["config"]["num_layers"] and target.dtype == torch.float32
    target.prove()
    target.model.set_attn_implementation("eager")
    ids_1T = torch.tensor([target.tokenizer.encode(Path(torch.__file__).read_text()[:4000])[:256]])
    seen = target.model(ids_1T, output_attentions=True)
    strongest = max(
        float(weights_1hTT[0, :, 1:, 0].mean(1).max()) for weights_1hTT in seen.attentions
    )
    assert strongest > 0.2  # of another text than the card's


@pytest.mark.slow
def test_its_answers_are_text_for_drafters() -> None:
    tokenizer = TargetSource().load_tokenizer()
    data = EmbeddedData(answers=True, seq_len=256)
    data.prepare(tokenizer)
    starts, held_out = (
        int((part.ids_BT[part.documents_BT >= 0] == tokenizer.bos_token_id).sum())
        for part in (data.splits.train, data.splits.validation)
    )
    rows = [json.loads(line) for line in ANSWERS.read_text().splitlines()]
    assert 0.02 < held_out / starts < 0.08 and starts + held_out <= len(rows)
    assert len(rows) == read_json(embedded_target() / RECORD)["answers"]
    assert not any(loops(tokenizer.encode(row["text"])) for row in rows[:50])


def test_a_package_without_its_data_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("specdec.embedded.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ValueError, match="install specdec again"):
        embedded_target()
