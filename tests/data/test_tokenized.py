"""Examples that a user has tokenized: every token arrives once, and what is supervised is what the user marked."""

from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from specdec import DrafterModule, TokenizedData
from specdec.data import Document
from specdec.data.loader import Batch
from specdec.data.tokenized import documents_of, read_examples

EXAMPLES: list[dict[str, Any]] = [
    {"input_ids": [10 * n + t for t in range(3 + n)], "labels": [-100] + [10 * n + t for t in range(1, 3 + n)]}
    for n in range(1, 9)
]  # fmt: skip


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As transformers' collators pad: zeros, and labels of -100."""
    longest = max(len(example["input_ids"]) for example in examples)
    padding = [longest - len(example["input_ids"]) for example in examples]
    return {
        "input_ids": torch.tensor([e["input_ids"] + [0] * n for e, n in zip(examples, padding, strict=True)]),
        "attention_mask": torch.tensor([[1] * (longest - n) + [0] * n for n in padding]),
        "labels": torch.tensor([e["labels"] + [-100] * n for e, n in zip(examples, padding, strict=True)]),
    }  # fmt: skip


class OwnModule(pl.LightningDataModule):
    """A data module as one has it from elsewhere: shuffled, padded batches."""

    def __init__(self, validates: bool) -> None:
        super().__init__()
        self.validates = validates

    def setup(self, stage: str) -> None:
        self.examples = EXAMPLES

    def train_dataloader(self) -> Any:
        return DataLoader(self.examples[:6], batch_size=4, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        if not self.validates:
            return super().val_dataloader()
        return DataLoader(self.examples[6:], batch_size=1, collate_fn=collate)  # type: ignore[arg-type]

    def test_dataloader(self) -> Any:
        return DataLoader(EXAMPLES[4:6], collate_fn=collate)  # type: ignore[arg-type]


def documents_in(rows: Batch) -> list[tuple[list[int], list[bool]]]:
    """The packed documents, sorted: ids and what is supervised."""
    documents = []
    for ids_T, mask_T, numbers_T in zip(*rows, strict=True):
        for number in range(int(numbers_T.max()) + 1):
            place = numbers_T == number
            documents.append((ids_T[place].tolist(), mask_T[place].tolist()))
    return sorted(documents)


def wanted(examples: list[dict[str, Any]]) -> list[tuple[list[int], list[bool]]]:
    return [(e["input_ids"], [label != -100 for label in e["labels"]]) for e in examples]


def test_a_data_modules_padded_batches_arrive_token_by_token_without_padding() -> None:
    data = TokenizedData(OwnModule(validates=True), seq_len=24)
    data.prepare(None)
    assert documents_in(data.splits.train) == wanted(EXAMPLES[:6])
    assert documents_in(data.splits.validation) == wanted(EXAMPLES[6:])


def test_a_data_modules_test_examples_are_tested_and_else_the_validation_rows() -> None:
    data = TokenizedData(OwnModule(validates=True), seq_len=24)
    data.prepare(None)
    assert documents_in(data.test_dataloader().rows) == wanted(EXAMPLES[4:6])
    given = TokenizedData(EXAMPLES, EXAMPLES[:1], test=EXAMPLES[1:3], seq_len=24)
    given.prepare(None)
    assert documents_in(given.test_dataloader().rows) == wanted(EXAMPLES[1:3])
    none = TokenizedData(EXAMPLES, EXAMPLES[:1], seq_len=24)
    none.prepare(None)
    assert documents_in(none.test_dataloader().rows) == wanted(EXAMPLES[:1])


def test_a_data_module_that_does_not_validate_leaves_a_fraction_of_its_examples() -> None:
    data = TokenizedData(OwnModule(validates=False), val_fraction=0.4, seq_len=24)
    data.prepare(None)
    train, validation = (documents_in(rows) for rows in data.splits)
    assert len(train) == 4 and len(validation) == 2
    assert sorted(train + validation) == wanted(EXAMPLES[:6])


def test_a_loader_that_shuffles_is_read_in_the_data_sets_own_order() -> None:
    loader = OwnModule(validates=False)
    loader.setup("fit")
    first, second = (list(read_examples(loader.train_dataloader(), "train")) for _ in range(2))
    assert [document.ids_T.tolist() for document in first] == [e["input_ids"] for e in EXAMPLES[:6]]
    assert all(torch.equal(a.ids_T, b.ids_T) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mask", ["loss_mask", "assistant_masks"])
def test_masks_by_either_name_say_what_is_supervised(mask: str) -> None:
    (document,) = documents_of({"input_ids": [5, 6, 7], mask: [0, 1, 0]})
    assert document.loss_mask_T.tolist() == [False, True, False]


def test_a_hugging_face_data_set_is_read_and_everything_is_supervised_without_a_mask() -> None:
    rows = datasets.Dataset.from_list([{"input_ids": e["input_ids"]} for e in EXAMPLES])
    documents = list(read_examples(rows, "train"))
    assert [document.ids_T.tolist() for document in documents] == [e["input_ids"] for e in EXAMPLES]
    assert all(document.loss_mask_T.all() for document in documents)


def test_long_examples_are_cut_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    data = TokenizedData(EXAMPLES, EXAMPLES[:1], seq_len=5)
    data.prepare(None)
    assert documents_in(data.splits.train) == [
        (ids[:5], mask[:5]) for ids, mask in wanted(EXAMPLES)
    ]
    assert "6 examples cut: data.seq_len is 5 tokens" in caplog.text


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": "one"}, "example 1: a mapping with input_ids is needed, not the keys text: tokenize the text first"),
        ("one", "a mapping with input_ids is needed, not str"),
        ({"input_ids": [1, 2], "labels": [1]}, r"labels have the shape \[1\], input_ids \[2\]"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, r"loss_mask have the shape \[1\]"),
        ({"input_ids": ["a"]}, "input_ids are no rectangular numbers"),
        ({"input_ids": [0.5]}, "input_ids are torch.float32 of 1 dimensions, not integers"),
        ({"input_ids": [[[1]]]}, "input_ids have 3 dimensions"),
    ],
)  # fmt: skip
def test_examples_that_cannot_be_read_are_named(example: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_examples([EXAMPLES[0], example], "train"))


def test_a_drafter_trains_and_is_tested_on_a_users_own_data(target_directory: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    examples = [
        Document(torch.randint(2, 250, (20,), generator=generator), torch.ones(20, dtype=torch.bool)) for _ in range(8)
    ]  # fmt: skip
    module = DrafterModule(target=target_directory, ttt_steps=2)
    data = TokenizedData(examples, val_fraction=0.25, seq_len=20, batch_size=2)
    trainer = pl.Trainer(
        max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    (validated,) = trainer.validate(module, datamodule=data, verbose=False)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    assert tested["test/loss"] == pytest.approx(validated["val/loss"])
    assert {name.removeprefix("test/") for name in tested} == {
        name.removeprefix("val/") for name in validated
    }
