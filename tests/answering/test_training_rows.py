"""Answers with states: tokens and masks of ``specdec regenerate`` and ``ChatData``, states of a pass over the text."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.answering.settings import AnswerSettings
from specdec.answering.training_rows import (
    UNSUPERVISED,
    AnsweredRow,
    DocumentStates,
    TrainingRows,
    states_of,
)
from specdec.cli import main
from specdec.data import Document
from specdec.data.chat import encode, read_conversations
from specdec.data.turns import Turns
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.rounding import compare_boundary, median_error, own_states
from tests.data.families import in_default_run
from tests.data.tiny import write_jsonl
from tests.engines.chat_targets import FAMILIES
from tests.engines.chats import LEARNT, SYSTEM, asked

LAYERS = [1, 2]  # of two: the last boundary before the final norm, and the final state too
ROW = 1024
Tokens = list[tuple[list[int], list[bool]]]


def tokens_of(documents: Sequence[Document]) -> Tokens:
    return [(ids_T.tolist(), mask_T.tolist()) for ids_T, mask_T in documents]


def regenerated(
    target: Path, data: Path, out: Path, settings: AnswerSettings, turns: Turns, seq_len: int
) -> dict[str, Tokens]:
    """By row id, the documents that training reads of the file that ``specdec regenerate`` writes."""
    argv = ["regenerate", "--target", str(target), "--data", str(data), "--out", str(out)]
    for name, value in vars(settings).items():
        argv += [] if value is None else [f"--{name}", str(value).lower()]
    assert main([*argv, "--batch_size", "2"]) == 0
    tokenizer = Target.load(target).tokenizer
    documents = {}
    for row in read_conversations(str(out)):
        encoded = encode([row], tokenizer, seq_len, turns)
        documents[row.id] = tokens_of(
            [
                Document(document.ids_T, document.loss_mask_T)
                for document in encoded
                if document.loss_mask_T.any()
            ]
        )
    return {name: found for name, found in documents.items() if found}


def answered(
    target: Path, data: Path, settings: AnswerSettings, turns: Turns, seq_len: int, batch: int
) -> dict[str, AnsweredRow]:
    rows = TrainingRows(Target.load(target), settings, batch, LAYERS, seq_len, turns, "refuse")
    conversations = read_conversations(str(data))
    return dict(zip([row.id for row in conversations], rows.rows(conversations), strict=True))


def check_states(target: Target, document: Document, states: DocumentStates) -> None:
    """The states of all tokens but the last are those of one pass, at their own boundary, up to rounding."""
    ids_1R = document.ids_T[None]
    out = target.forward(
        ids_1R, View.packed(torch.zeros_like(ids_1R)), range(target.num_layers + 1)
    )
    *allowed, allowed_final, _ = own_states(target).allowed
    by_boundary = {b: [out.aux_BTNH[0, :-1, b]] for b in range(target.num_layers + 1)}
    assert states.aux_RNH.shape == (len(document.ids_T), len(LAYERS), target.hidden_size)
    for n, boundary in enumerate(LAYERS):
        difference = compare_boundary(boundary, [states.aux_RNH[:-1, n]], by_boundary)
        assert difference.fits(allowed[boundary]), (boundary, difference)
    assert median_error(states.final_RH[:-1], out.final_BTH[0, :-1]) <= allowed_final


def check_equal(
    target: Path, data: Path, tmp_path: Path, settings: AnswerSettings, **more: Any
) -> dict[str, AnsweredRow]:
    """Answered rows are those of regenerate and the data path."""
    turns = more.get("turns", "auto")
    seq_len = more.get("seq_len", ROW)
    out = tmp_path / "own.jsonl"
    expected = regenerated(target, data, out, settings, turns, seq_len)
    rows = answered(target, data, settings, turns, seq_len, more.get("batch", 3))
    assert {name: tokens_of(row.documents) for name, row in rows.items() if row.documents} == (
        expected
    )
    assert expected
    loaded = Target.load(target)
    for row in rows.values():
        assert bool(row.documents) == (row.left_out is None)
        for document, states in zip(row.documents, row.states, strict=True):
            check_states(loaded, document, states)
    return rows


@pytest.mark.parametrize("name", in_default_run(FAMILIES, "qwen3"))
def test_families_with_thoughts_and_tools(
    name: str, chat_targets: Callable[[str], Path], tmp_path: Path
) -> None:
    """Templates that drop earlier thoughts make several documents of a conversation, others one."""
    rows = [talk.row(kind) for kind, talk in FAMILIES[name].talks.items()]
    rows += [
        talk.row(f"{kind}-other", {"a": 1, "b": 1}) for kind, talk in FAMILIES[name].talks.items()
    ]
    data = write_jsonl(tmp_path / "in.jsonl", rows)
    settings = AnswerSettings(max_new_tokens=80)
    check_equal(chat_targets(name), data, tmp_path, settings)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Several turns, a system prompt, a row that is skipped, and rows of one turn."""
    rows: list[dict[str, Any]] = [
        {"id": f"row-{number}", "messages": asked(said)} for number, said in enumerate(LEARNT)
    ]
    rows.append({"id": "system", "messages": [SYSTEM, *asked(LEARNT[1])]})
    rows.append(
        {"id": "first", "messages": [{"role": "assistant", "content": "four"}, *asked(LEARNT[0])]}
    )
    return write_jsonl(tmp_path / "in.jsonl", rows)


@pytest.mark.parametrize("turns", ["auto", "each", "whole"])
@pytest.mark.parametrize("temperature", [0.0, 1.5, 4.0])
def test_greedy_and_sampled(
    temperature: float, turns: Turns, chat_target: Path, conversations: Path, tmp_path: Path
) -> None:
    settings = AnswerSettings(max_new_tokens=40, temperature=temperature, seed=3, truncated="keep")
    rows = check_equal(chat_target, conversations, tmp_path, settings, turns=turns)
    assert rows["first"].left_out == "the assistant speaks before any user does"
    if temperature == 0:
        assert len(rows["row-1"].documents) == (2 if turns == "each" else 1)


@pytest.mark.parametrize("truncated", ["drop", "keep"])
def test_answers_that_ran_out_of_tokens(
    truncated: Any, chat_target: Path, conversations: Path, tmp_path: Path
) -> None:
    settings = AnswerSettings(max_new_tokens=6, truncated=truncated)
    rows = check_equal(chat_target, conversations, tmp_path, settings)
    dropped = [row for row in rows.values() if row.left_out == "an answer ran out of tokens"]
    assert bool(dropped) == (truncated == "drop")


def test_rows_that_are_cut(chat_target: Path, conversations: Path, tmp_path: Path) -> None:
    settings = AnswerSettings(max_new_tokens=40)
    rows = check_equal(chat_target, conversations, tmp_path, settings, seq_len=18)
    assert UNSUPERVISED in {row.left_out for row in rows.values()}


def test_an_answer_depends_on_no_other_row(chat_target: Path, conversations: Path) -> None:
    """Nor on how many are answered at a time; on the seed it does."""
    settings = AnswerSettings(max_new_tokens=40, temperature=4.0, seed=3, truncated="keep")

    def tokens(settings: AnswerSettings, batch: int) -> dict[str, Tokens]:
        rows = answered(chat_target, conversations, settings, "auto", ROW, batch)
        return {name: tokens_of(row.documents) for name, row in rows.items()}

    expected = tokens(settings, 1)
    assert tokens(settings, 4) == expected
    assert tokens(replace(settings, seed=4), 4) != expected


def test_planted_faults_are_seen(chat_target: Path, conversations: Path) -> None:
    """A token late, another row's, boundaries that changed places, another answer, a mask that is a token late."""
    settings = AnswerSettings(max_new_tokens=40)
    target = Target.load(chat_target)
    rows = answered(chat_target, conversations, settings, "auto", ROW, 3)
    (document,) = rows["row-1"].documents
    (states,) = rows["row-1"].states
    check_states(target, document, states)
    length = len(document.ids_T)
    (other,) = rows["system"].states
    faults = [
        DocumentStates(states.aux_RNH.roll(1, 0), states.final_RH),
        DocumentStates(states.aux_RNH, states.final_RH.roll(1, 0)),
        DocumentStates(states.aux_RNH.flip(1), states.final_RH),
        DocumentStates(states.aux_RNH, states.aux_RNH[:, -1]),
        DocumentStates(other.aux_RNH[:length], other.final_RH[:length]),
    ]
    for fault in faults:
        with pytest.raises(AssertionError):
            check_states(target, document, fault)
    changed = document.ids_T.clone()
    changed[-3] += 1
    with pytest.raises(ValueError, match="other tokens than the target read and wrote"):
        states_of(document._replace(ids_T=changed), [])


def test_what_cannot_be_trained_on(chat_target: Path, tmp_path: Path) -> None:
    """A row whose prompt is longer than the target's positions is left out, as regenerate leaves it out."""
    rows = [
        {"id": "long", "messages": [{"role": "user", "content": "sky " * 300}]},
        {"id": "short", "messages": asked(LEARNT[0])},
    ]
    data = write_jsonl(tmp_path / "in.jsonl", rows)
    settings = AnswerSettings(max_new_tokens=40)
    by_id = answered(chat_target, data, settings, "auto", ROW, 3)
    assert "exceed the target's 256 positions" in str(by_id["long"].left_out)
    assert len(by_id["short"].documents) == 1
    assert json.loads(data.read_text().splitlines()[0])["id"] == "long"
