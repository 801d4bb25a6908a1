"""A chat template that is wrong is found, whatever is wrong with it; one that is right is sound."""

import copy
from functools import cache
from typing import Any

import pytest

from benchmarks.chat_oracle.conversations import KINDS
from benchmarks.chat_oracle.faults import planted_faults
from benchmarks.chat_oracle.tokenizers import sources, stops_of, tokenizer_of, twin_of
from specdec.data.chat import Report, conversation, encode
from specdec.data.layouts import ChatConversation
from specdec.data.rows import DataRow
from specdec.diagnostics.doctor_data import template_findings
from specdec.diagnostics.doctor_setup import CheckResult
from tests.data.families import in_default_run

NAMES = [
    "glm4moe",
    "gptoss",
    "llama3",
    "llama3_1",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "lfm2_2_5",
    "gemma3",
]


def with_template(name: str, template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of(name))
    tokenizer.chat_template = template
    return tokenizer


@cache
def rows_of(name: str) -> list[ChatConversation]:
    """The conversations that the unbroken template can write whole."""
    rows = []
    for rows_of_kind in KINDS.values():
        for row in rows_of_kind:
            messages = conversation(DataRow("a.jsonl, line 1", "line-1", row))
            report = Report()
            try:
                list(encode([messages], tokenizer_of(name), 4096, report=report))
            except ValueError:
                continue
            if not report.reasons:
                rows.append(messages)
    return rows


def findings(name: str, template: str) -> list[Any]:
    tokenizer = with_template(name, template)
    end_ids = [tokenizer.convert_tokens_to_ids(token) for token in stops_of(name)]
    return list(template_findings(rows_of(name), tokenizer, end_ids))


def tokens(name: str, template: str) -> list[tuple[list[int], list[bool]]]:
    documents = encode(rows_of(name), with_template(name, template), 4096)
    return [(document.ids_T.tolist(), document.loss_mask_T.tolist()) for document in documents]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_s_own_template_is_sound(name: str) -> None:
    assert {finding.result for finding in findings(name, sources()[name])} == {CheckResult.SOUND}


@pytest.mark.parametrize("name", in_default_run(NAMES, "qwen3", "llama3"))
def test_every_fault_that_is_planted_in_a_template_is_found(name: str) -> None:
    found = 0
    for fault, template in planted_faults(sources()[name]).items():
        if CheckResult.FAULTY in {finding.result for finding in findings(name, template)}:
            found += 1
        elif (name, fault) != ("glm4moe", "prompt differs"):
            # GLM's own answers begin with that line end
            # then it changes no token: nobody of that role speaks, or the thought has another way into the template
            assert tokens(name, template) == tokens(name, sources()[name]), fault
    assert found >= 4


@pytest.mark.parametrize("fault", ["tag moved back", "tag moved forward", "end tag moved"])
def test_a_generation_tag_that_is_moved_is_found(fault: str) -> None:
    twin = twin_of("llama3")
    assert twin is not None
    assert {finding.result for finding in findings("llama3", twin)} == {CheckResult.SOUND}
    broken = planted_faults(twin)[fault]
    assert CheckResult.FAULTY in {finding.result for finding in findings("llama3", broken)}
