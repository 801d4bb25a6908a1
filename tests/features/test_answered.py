"""Answers that producers write during training: the numbers of regenerate, and of training on its file."""

import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from specdec.answering.settings import AnswerSettings
from specdec.data import Batch, ChatData, UnansweredData
from specdec.data.chat import encode, read_conversations
from specdec.data.loader import content_of
from specdec.features import Answered, Cached, Features, OnTheFly, Streamed
from specdec.features.answered import AnsweredSource
from specdec.features.answering_actors import AnsweringProducer, DueRow
from specdec.features.contract import Contract
from specdec.features.producers import unpack
from specdec.features.store import PackedRow
from specdec.target import Target, TargetOutput, TargetSource
from specdec.training.module import DrafterModule
from specdec.training.schedule import WarmupCosine
from tests.engines.conftest import chat_target
from tests.features.answered_runs import (
    ROW,
    SETTINGS,
    RegeneratedData,
    check_states,
    documents_of_batch,
    regenerate,
    write_conversations,
)
from tests.features.test_source import Losses
from tests.features.test_streamed import below, ran, started
from tests.short_run import short_run
from tests.tiny import presets
from tests.training.test_module import trainer

__all__ = ["chat_target"]  # a fixture
pytestmark = pytest.mark.timeout(600)
LAYERS = [1, 2]


def answered(**more: Any) -> Answered:
    return Answered(**{**vars(SETTINGS), "batch_size": 4, "ahead": 2, **more})


def kill_producer() -> None:
    victims = [pid for pid, command in below(os.getpid()) if command.startswith("ray::Answering")]
    assert victims
    os.kill(victims[0], signal.SIGKILL)


def faults(states: TargetOutput) -> Iterator[TargetOutput]:
    """States a token late, of the next boundary, of another row, and a final state before its norm."""
    aux_BTNH, final_BTH = states
    yield TargetOutput(aux_BTNH.roll(1, 1), final_BTH)
    yield TargetOutput(aux_BTNH, final_BTH.roll(1, 1))
    yield TargetOutput(aux_BTNH.roll(1, 2), final_BTH)
    yield TargetOutput(aux_BTNH.roll(1, 0), final_BTH.roll(1, 0))
    yield TargetOutput(aux_BTNH, aux_BTNH[:, :, -1])


@pytest.mark.slow
def test_tokens_and_states_whatever_dies(chat_target: Path, tmp_path: Path) -> None:
    """Two epochs, of which the second answers nothing again; a producer gets SIGKILL in each."""
    train, val = write_conversations(tmp_path)
    ordinary = RegeneratedData(
        train, regenerate(chat_target, train, tmp_path / "own.jsonl"), batch_size=3
    )
    target = Target.load(chat_target)
    ordinary.prepare(target.tokenizer)
    data = UnansweredData(str(train), str(val), seq_len=ROW, batch_size=3)
    data.prepare(target.tokenizer)
    with pytest.raises(ValueError, match="answered during training"):
        data.splits  # noqa: B018
    source: Any = answered().open(target, data, LAYERS, False)
    try:
        # validation: the rows of ChatData on regenerate's file, every time
        own_val = regenerate(chat_target, val, tmp_path / "own_val.jsonl")
        chats = ChatData(str(own_val), val=str(own_val), seq_len=ROW, batch_size=3)
        chats.prepare(target.tokenizer)
        assert content_of(data.splits.validation) == content_of(chats.splits.validation)
        data.reader = source
        ours = data.train_dataloader()
        theirs = ordinary.train_dataloader()
        planted = 0
        for epoch in range(2):
            for number, (batch, expected) in enumerate(zip(ours, theirs, strict=True)):
                assert documents_of_batch(batch) == documents_of_batch(expected)
                states = source(target, batch, LAYERS, False)
                own = OnTheFly(rows=1)(target, batch, range(target.num_layers + 1), False)
                check_states(target, batch, states, LAYERS, own)
                if epoch == 1:  # by one pass, on its document
                    assert torch.allclose(states.final_BTH, own.final_BTH, atol=1e-4)
                elif (batch.documents_BT >= 0).any(1).sum() > 1:
                    for fault in faults(states):
                        planted += 1
                        with pytest.raises(AssertionError):
                            check_states(target, batch, fault, LAYERS, own)
                if number == 1:
                    kill_producer()
        assert planted
        rows, tokens, reasons = source._ray.get(source._queue.written.remote())
        assert rows + sum(reasons.values()) == len(data.conversations) + 5 and tokens
        assert (
            reasons["the assistant speaks before any user does"] == 2
        )  # of training, of validation
        assert reasons["an answer ran out of tokens"] >= 2
        # the answers of another seed are others
        other = regenerate(
            chat_target,
            train,
            tmp_path / "other.jsonl",
            AnswerSettings(**{**vars(SETTINGS), "seed": 6}),
        )
        assert tokens_in(other, target) != tokens_in(tmp_path / "own.jsonl", target)
    finally:
        source.close()


def test_a_producer_writes_the_same_whatever_it_is_handed(
    chat_target: Path, tmp_path: Path
) -> None:
    """Conversations together or one by one; states of another document are refused."""
    train, val = write_conversations(tmp_path, copies=1)
    target = Target.load(chat_target)
    data = UnansweredData(str(train), str(val), seq_len=ROW)
    data.prepare(target.tokenizer)
    source = TargetSource(str(chat_target))
    contract = Contract.of(target, data, LAYERS, "target", "tests")
    producer = AnsweringProducer(answered().setup_of(source, data), contract, ROW)
    rows = list(map(DueRow.of, data.conversations))
    written, *sent = producer.features_of(rows)
    documents = [document for row in written for document in row.documents()]
    assert len(documents) > 2 and len(written) == len(rows)
    assert [row.left_out for row in written].count("the assistant speaks before any user does") == 1
    for row, together in zip(rows, written, strict=True):
        ((alone,), _) = producer.features_of([row])
        assert pickle.dumps(alone) == pickle.dumps(together)
    first, second = [states for row in sent for states in row][:2]
    document = PackedRow.of_document(documents[0].ids_T)
    unpack(contract, first, document, contract.empty(document.tokens))
    with pytest.raises(ValueError, match="was changed on its way"):
        unpack(contract, second, document, contract.empty(document.tokens))


def losses_of(target: Path, features: Features, data: Any, steps: int = 12) -> list[float]:
    pl.seed_everything(0, verbose=False)
    module = DrafterModule(
        target=TargetSource(str(target)), drafter=presets()["eagle1"], ttt_steps=2, schedule=WarmupCosine(0.0),
        features=features, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    )  # fmt: skip
    losses = Losses()
    arguments: dict[str, Any] = {"precision": "32-true", "max_epochs": -1, "max_steps": steps}
    trainer(callbacks=[losses], **arguments).fit(module, datamodule=data)
    return losses.found


@pytest.mark.slow
def test_losses_are_those_of_regenerate_and_fit(chat_target: Path, tmp_path: Path) -> None:
    """Over two epochs and more; another seed's answers give other losses."""
    train, val = write_conversations(tmp_path)
    own = regenerate(chat_target, train, tmp_path / "own.jsonl")
    expected = losses_of(
        chat_target, OnTheFly(rows=1), RegeneratedData(train, own, batch_size=3, seed=1)
    )
    data = {"seq_len": ROW, "batch_size": 3, "seed": 1}
    losses = losses_of(chat_target, answered(), UnansweredData(str(train), str(val), **data))
    other = losses_of(chat_target, answered(seed=6), UnansweredData(str(train), str(val), **data))
    assert expected[0] != expected[-1]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert other != pytest.approx(expected, rel=1e-2)


def tokens_in(file: Path, target: Target) -> list[list[int]]:
    """The token ids of the documents that training makes of a file."""
    documents = encode(list(read_conversations(str(file))), target.tokenizer, ROW)
    return [document.ids_T.tolist() for document in documents]


def command_of(out: Path, target: Path, train: Path, val: Path) -> list[str]:
    """The command of a run of two processes that share one producer."""
    given = short_run(
        target, train, model__drafter__draft_vocab_size="all", model__drafter__aux_layers="[1, 2]",
        data="UnansweredData", data__val=val, data__seq_len=ROW, trainer__max_steps=12,
        trainer__devices=2, trainer__strategy="ddp",
        trainer__limit_val_batches=0, trainer__log_every_n_steps=1, checkpoint__every_n_train_steps=3,
        acceptance__every_n_validations=0, out=out,
    )  # fmt: skip
    features = ["--model.features=Answered", "--model.features.batch_size=4"]
    features += [
        f"--model.features.{name}={str(value).lower()}"
        for name, value in vars(SETTINGS).items()
        if value is not None
    ]
    return [sys.executable, "-m", "specdec", "fit", *given, *features]


def losses_in(out: Path) -> list[float]:
    """The losses of a run, step by step."""
    lines = (out / "losses.txt").read_text().splitlines()
    return [float.fromhex(line.split()[2]) for line in lines]


@pytest.mark.slow
def test_two_processes_resume_with_the_same_answers(chat_target: Path, tmp_path: Path) -> None:
    """The first trainer gets SIGKILL; the resumed run has the losses of one that was not disturbed, up to rounding."""
    train, val = write_conversations(tmp_path, copies=2)
    ran(command_of(tmp_path / "whole", chat_target, train, val), tmp_path)
    out = tmp_path / "killed"
    command = command_of(out, chat_target, train, val)
    with started(command, tmp_path) as process:
        assert process.stderr is not None
        while process.poll() is None and not (out / "checkpoints" / "last.ckpt").exists():
            time.sleep(0.005)
        assert process.poll() is None, process.stderr.read()[-3000:]
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
    ran([*command, "--ckpt_path=auto"], tmp_path)
    losses = losses_in(out)
    assert len(losses) == 12 and len(set(losses)) > 8  # a batch without an answer has none
    assert losses == pytest.approx(losses_in(tmp_path / "whole"), rel=1e-4)


@pytest.mark.parametrize(
    ("features", "kind", "message"),
    [
        (OnTheFly(), UnansweredData, "features OnTheFly answer none: set model.features=Answered"),
        (Streamed(), UnansweredData, "features Streamed answer none"),
        (Cached("x"), UnansweredData, "run specdec regenerate and train on its file"),
        (Answered(), ChatData, "data UnansweredData, not of ChatData: set data=UnansweredData"),
    ],
)
def test_features_and_data_that_do_not_go_together(
    features: Features, kind: Any, message: str, chat_target: Path, tmp_path: Path
) -> None:
    train, val = write_conversations(tmp_path)
    with pytest.raises(ValueError, match=message):
        losses_of(chat_target, features, kind(str(train), str(val), seq_len=ROW))


def test_a_draft_vocabulary_needs_answers(chat_target: Path, tmp_path: Path) -> None:
    train, val = write_conversations(tmp_path)
    module = DrafterModule(
        target=str(chat_target), drafter=presets()["eagle1"], features=Answered()
    )
    module.spec = module.spec.__class__(
        **{**vars(module.spec), "draft_vocab_size": 40, "head": "own"}
    )
    with pytest.raises(
        ValueError, match=r"answers have each, and they are not written yet: set model\.drafter"
    ):
        trainer(max_steps=1).fit(
            module, datamodule=UnansweredData(str(train), str(val), seq_len=ROW)
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "model.features.batch_size must be at least 1"),
        ({"max_new_tokens": 0}, "model.features.max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be 0"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Answered(**given)


def test_batches_of_no_answer_are_rows_of_padding() -> None:
    """All conversations of a batch may be left out."""
    data = UnansweredData("x", "y", seq_len=16)
    batch = data.rows_of([])
    assert batch.ids_BT.shape == (1, 16) and not batch.loss_mask_BT.any()
    assert (batch.documents_BT < 0).all() and isinstance(batch, Batch)
    assert AnsweredSource.queue_kind.__name__ == "AnswerQueue"
