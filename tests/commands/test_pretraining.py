"""The training of the embedded target, in small."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.commands.pretraining import (
    WEIGHTS,
    PretrainConfig,
    Pretraining,
    llama,
    next_tokens,
    pretrain,
)
from specdec.data import Batch
from specdec.embedded import RECORD
from specdec.embedded.corpus import SEED, train_tokenizer
from specdec.nn.view import View
from specdec.utils.reading import check_sums, read_json
from tests.embedded import conftest

SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "num_layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16,
    "intermediate": 48, "max_position_embeddings": 128, "seq_len": 64, "steps": 12, "lr": 1e-2, "precision": "32-true",
    "every_n_train_steps": 6,
}  # fmt: skip


small_library = conftest.small_library


@pytest.fixture(autouse=True)
def _small(small_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    conftest.use_library(monkeypatch, small_library)
    monkeypatch.chdir(tmp_path)


def weights(path: str) -> dict[str, torch.Tensor]:
    return load_file(f"{path}/{WEIGHTS}")


def recipe(out: str, **settings: Any) -> PretrainConfig:
    return PretrainConfig(out=Path(out), **(SMALL | settings))


def test_the_recipe_trains_a_model_and_writes_its_record() -> None:
    assert pretrain(recipe("model")) == 0
    check_sums(Path("model"), "")
    record = read_json(f"model/{RECORD}")
    assert record["config"] == recipe("model").determinants
    assert record["held_out_loss"] < 5.5  # log 300 is 5.7
    assert {tensor.dtype for tensor in weights("model").values()} == {torch.bfloat16}
    assert not Path("model.partial").exists()
    assert pretrain(recipe("model")) == 0  # is there already
    with pytest.raises(ValueError, match="choose another --out"):
        pretrain(recipe("model", seed=1))


@pytest.mark.slow
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pretrain(recipe("whole")) == 0
    step = Pretraining.training_step

    def interrupted(self: Pretraining, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.global_step == 8:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "training_step", interrupted)
        assert pretrain(recipe("cut")) == 130
    assert not Path("cut").exists() and Path("cut.partial").exists()
    with pytest.raises(ValueError, match="choose another --out"):
        pretrain(recipe("cut", lr=2e-2))
    assert pretrain(recipe("cut")) == 0
    whole = weights("whole")
    cut = weights("cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.fixture
def tokenizer(small_library: Path) -> Any:
    return train_tokenizer((file.read_text() for file in sorted(small_library.iterdir())), 300, 128)


def test_documents_of_a_row_do_not_see_each_other(tokenizer: Any) -> None:
    model = llama(recipe("model"), tokenizer)
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
        llama(recipe("model", seed=seed), tokenizer).lm_head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


def test_the_embedding_of_bos_is_long(tokenizer: Any) -> None:
    rows_VH = llama(recipe("model"), tokenizer).model.embed_tokens.weight.detach()
    long = float(rows_VH[tokenizer.bos_token_id].norm())
    assert long > 8 * float(rows_VH.norm(dim=1).median())


def test_the_seed_is_the_splits() -> None:
    config = PretrainConfig(out=Path("model"))
    assert config.seed == SEED
    assert json.loads(json.dumps(config.determinants)) == config.determinants
