"""The recipe of the embedded target, in small."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import specdec.pretrain
from specdec.cli import main
from specdec.data import Batch
from specdec.embedded.corpus import SEED, train_tokenizer
from specdec.nn.view import View
from specdec.pretrain import RECORD, WEIGHTS, PretrainConfig, Pretraining, llama, next_tokens
from specdec.utils.reading import check_sums, read_json
from tests.embedded import conftest

SMALL = {
    "vocab_size": 300, "hidden_size": 32, "num_layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16,
    "intermediate": 48, "max_position_embeddings": 128, "seq_len": 64, "steps": 12, "lr": 1e-2, "precision": "32-true",
    "every_n_train_steps": 6,
}  # fmt: skip
OPTIONS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


small_library = conftest.small_library


@pytest.fixture(autouse=True)
def _small(small_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    conftest.use_library(monkeypatch, small_library)
    monkeypatch.setattr(specdec.pretrain, "ANSWERS", 3)
    monkeypatch.setattr(specdec.pretrain, "BEGINNINGS", (12,))
    monkeypatch.setattr(specdec.pretrain, "PROMPT_TOKENS", 24)
    monkeypatch.setattr(specdec.pretrain, "NEW_TOKENS", 16)
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.chdir(tmp_path)


def weights(path: str) -> dict[str, torch.Tensor]:
    return load_file(f"{path}/{WEIGHTS}")


def test_the_recipe_trains_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--out", "model", *OPTIONS]) == 0
    check_sums(Path("model"), "")
    record = read_json(f"model/{RECORD}")
    assert record["config"] == PretrainConfig(**SMALL).determinants
    assert record["held_out_loss"] < 5.5  # log 300 is 5.7
    assert len(record["attention_sink"]["heads"]) == 2 and 0 <= record["looping"] <= 1
    assert {tensor.dtype for tensor in weights("model").values()} == {torch.bfloat16}
    assert not Path("model.partial").exists()
    rows = [json.loads(line) for line in Path("model/answers.jsonl").read_text().splitlines()]
    assert len(rows) == record["answers"] > 0 and all(
        row["text"] and row["ended"] in (True, False) for row in rows
    )
    assert main(["pretrain", "--out", "model", *OPTIONS]) == 0  # is there already
    assert main(["pretrain", "--out", "model", *OPTIONS, "--seed", "1"]) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["pretrain", "--out", "whole", *OPTIONS]) == 0
    step = Pretraining.training_step

    def interrupted(self: Pretraining, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.global_step == 8:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "training_step", interrupted)
        assert main(["pretrain", "--out", "cut", *OPTIONS]) == 130
    assert not Path("cut").exists() and Path("cut.partial").exists()
    assert main(["pretrain", "--out", "cut", *OPTIONS, "--lr", "2e-2"]) == 2
    assert main(["pretrain", "--out", "cut", *OPTIONS]) == 0
    one, two = weights("whole"), weights("cut")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def tokenizer(small_library: Path) -> Any:
    return train_tokenizer((file.read_text() for file in sorted(small_library.iterdir())), 300, 128)


def test_documents_of_a_row_do_not_see_each_other(tokenizer: Any) -> None:
    model = llama(PretrainConfig(**SMALL), tokenizer)
    torch.nn.init.normal_(model.model.layers[0].self_attn.o_proj.weight)
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(2, 300, (1, 12), generator=generator)
    documents_1T = torch.tensor([[0] * 5 + [1] * 5 + [-1] * 2])
    assert View.packed(documents_1T).positions_BT.tolist()[0][:10] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    logits_RV, ids_R = next_tokens(model, Batch(ids_1T, documents_1T >= 0, documents_1T))
    assert ids_R.tolist() == ids_1T[0, [1, 2, 3, 4, 6, 7, 8, 9]].tolist()
    alone_1TV = model(ids_1T[:, 5:10], use_cache=False).logits
    torch.testing.assert_close(logits_RV[4:], alone_1TV[0, :4])


def test_weights_depend_on_the_seed_alone(tokenizer: Any) -> None:
    state = torch.get_rng_state()
    one, same, other = (
        llama(dataclasses.replace(PretrainConfig(**SMALL), seed=seed), tokenizer).lm_head.weight
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


def test_the_embedding_of_bos_is_long(tokenizer: Any) -> None:
    rows_VH = llama(PretrainConfig(**SMALL), tokenizer).model.embed_tokens.weight.detach()
    long = float(rows_VH[tokenizer.bos_token_id].norm())
    assert long > 8 * float(rows_VH.norm(dim=1).median())


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--warmup", "0.8"]])
def test_wrong_settings_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--out", "model", *OPTIONS, *wrong]) == 2
    assert wrong[0][2:] in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_the_seed_is_the_splits() -> None:
    assert PretrainConfig().seed == SEED
    assert json.loads(json.dumps(PretrainConfig().determinants)) == PretrainConfig().determinants
