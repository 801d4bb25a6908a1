import logging
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from specdec.data.batch import Batch, Document
from specdec.data.datamodule import TokenData
from tests.data.tiny import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")  # a resumed run saves elsewhere

ROWS, SEQ, BATCH = 11, 4, 2  # 6 batches an epoch, the last of one row


class Counting(TokenData):
    """Row i holds the id i, four times; the second half of each is supervised."""

    reads = 0

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        self.reads += 1
        mask = torch.tensor([False, False, True, True])
        made = [Document(torch.full((SEQ,), i), mask) for i in range(ROWS)]
        return made, made[:3]


class Toy(pl.LightningModule):
    """Remembers the rows it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []
        self.tested: list[list[int]] = []
        self.tokenizer = tiny_tokenizer()

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        assert isinstance(batch, Batch)
        self.seen.append(batch.ids_BT[:, 0].tolist())
        return (self.weight * batch.ids_BT.float().mean()).sum()

    def validation_step(self, batch: Batch, index: int) -> None:
        self.validated.append(batch.ids_BT[:, 0].tolist())

    def test_step(self, batch: Batch, index: int) -> None:
        self.tested.append(batch.ids_BT[:, 0].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def run(path: Path, epochs: int, num_workers: int = 0, ckpt_path: Path | None = None, **options: Any) -> Toy:
    module = Toy()
    callback = ModelCheckpoint(path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {"num_sanity_val_steps": 0, "val_check_interval": 4, "callbacks": [callback]} | options
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=epochs,
        default_root_dir=path,
        **settings,
    )
    data = Counting(SEQ, BATCH, num_workers, seed=3)
    trainer.fit(module, data, ckpt_path=None if ckpt_path is None else str(ckpt_path), weights_only=True)
    return module


def test_a_run_sees_every_row_once_an_epoch(tmp_path: Path) -> None:
    module = run(tmp_path, 2)
    epochs = [list(chain(*module.seen[:6])), list(chain(*module.seen[6:]))]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert epochs[0] != epochs[1]
    assert module.validated == [[0, 1], [2]] * 2


@pytest.mark.parametrize("step", [1, 4, 5, 6, 9, 12, 13])
def test_a_resumed_run_sees_exactly_the_rows_that_were_left(tmp_path: Path, step: int) -> None:
    whole = run(tmp_path / "whole", 3)
    assert len(whole.seen) == 18
    rest = run(tmp_path / "rest", 3, ckpt_path=tmp_path / f"whole/step={step}.ckpt")
    assert rest.seen == whole.seen[step:]
    assert torch.equal(rest.weight, whole.weight)


def test_a_run_resumed_with_workers_sees_exactly_the_rows_that_were_left(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 2, num_workers=2)
    assert whole.seen == run(tmp_path / "plain", 2).seen
    rest = run(tmp_path / "rest", 2, num_workers=2, ckpt_path=tmp_path / "whole/step=3.ckpt")
    assert rest.seen == whole.seen[3:]


def test_a_run_of_more_epochs_goes_on_after_one_that_ended(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 3, val_check_interval=1.0)
    run(tmp_path / "short", 2, val_check_interval=1.0)
    rest = run(tmp_path / "rest", 3, ckpt_path=tmp_path / "short/step=12.ckpt", val_check_interval=1.0)
    assert rest.seen == whole.seen[12:]


def test_a_shortened_epoch_and_a_sanity_check_leave_the_order_alone(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 2)
    checked = run(tmp_path / "checked", 2, num_sanity_val_steps=2, val_check_interval=1.0)
    assert checked.seen == whole.seen
    short = run(tmp_path / "short", 2, limit_train_batches=4)
    assert short.seen == whole.seen[:4] + whole.seen[6:10]


def test_the_test_reads_the_validation_rows_unless_given_others(tmp_path: Path) -> None:
    class Tested(Counting):
        def test_documents(self, tokenizer: Any) -> list[Document]:
            return self.documents(tokenizer)[0][5:7]

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    for data, expected in ((Counting(SEQ, BATCH), [[0, 1], [2]]), (Tested(SEQ, BATCH), [[5, 6]])):
        module = Toy()
        trainer.test(module, data, verbose=False)
        assert module.tested == expected


def test_reading_happens_once_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    data = Counting(SEQ, BATCH)
    with pytest.raises(ValueError, match="not read yet: call setup"):
        data.train_dataloader()
    with caplog.at_level(logging.INFO):
        data.prepare(None)
    data.prepare(None)
    assert data.reads == 1
    assert "train: 11 rows of 4 tokens, 50.0 % supervised, 0.0 % padding" in caplog.text


def test_supervised_counts_are_of_the_packed_training_rows() -> None:
    data = Counting(SEQ, BATCH)
    data.prepare(None)
    counts = data.supervised_counts(13)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [2] * ROWS + [0, 0]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    data = Counting(SEQ, BATCH)
    data.prepare(None)
    data.check_vocabulary(ROWS)
    with pytest.raises(ValueError, match="train data holds token id 10"):
        data.supervised_counts(10)
    data.splits.validation.ids_BT[0, 0] = 50
    with pytest.raises(ValueError, match="validation data holds token id 50"):
        data.check_vocabulary(ROWS)


def test_each_process_takes_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        world_size = 2
        global_rank = overfit_batches = 0

    data = Counting(SEQ, BATCH)
    data.prepare(None)
    data.trainer = Fake()
    shares = []
    for rank in range(2):
        Fake.global_rank = rank
        shares.append([i for batch in data.train_dataloader() for i in batch.ids_BT[batch.loss_mask_BT][::2].tolist()])
    assert sorted(shares[0] + shares[1]) == list(range(ROWS))
    assert [len(share) for share in shares] == [6, 5]


def test_the_base_has_no_documents_and_a_row_has_two_tokens() -> None:
    with pytest.raises(NotImplementedError):
        TokenData().prepare(None)
    with pytest.raises(ValueError, match="seq_len is 1"):
        TokenData(seq_len=1)
