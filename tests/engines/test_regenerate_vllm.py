"""What a real vLLM writes, on a CPU in float32, is kept token by token: targets that think and call tools.

Each family takes about 40 seconds. ``SPECDEC_CHAT_FAMILIES="gpt_oss deepseek_r1 qwen3 glm llama3_1"`` tries all.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.cli import main
from specdec.data import ChatData
from specdec.engines.server import VllmLaunch
from specdec.target import TargetSource
from specdec.utils.vllm import VARIABLE, find_vllm
from tests.data.tiny import write_jsonl
from tests.engines import inside_vllm
from tests.engines.chat_targets import FAMILIES, asked_ids, generated, make_chat_target
from tests.engines.test_regenerate_chats import answers, check_words
from tests.engines.test_regenerate_trains import (
    ROW,
    batch_turns,
    changed,
    encoded_turns,
    without_ids,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MOST = 60  # tokens an answer
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager")
FREE = {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}  # else a grammar writes parts of GLM's calls
Asked = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Asked:
    """The rows that a family's target makes in a vLLM."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no Python with vLLM; docs/serve.md says how to make one")
    for variable, value in (inside_vllm.QUIET | FREE).items():
        monkeypatch.setenv(variable, value)

    def ask(name: str) -> list[dict[str, Any]]:
        family = FAMILIES[name]
        target = make_chat_target(name, tmp_path / "target")
        data = write_jsonl(
            tmp_path / "in.jsonl", [talk.row(kind) for kind, talk in family.talks.items()]
        )
        flags = (*FLAGS, *family.parsers)
        launch = VllmLaunch(
            find_vllm(), TargetSource(str(target)), port=0, timeout=300, extra=flags
        )
        argv = ["regenerate", "--engine", "vllm", "--data", str(data), "--truncated", "keep"]
        argv += ["--max_new_tokens", str(MOST)]
        with launch.server(None, tmp_path / "log") as server:
            argv += ["--url", server.url]
            status = main([*argv, "--out", str(tmp_path / "out.jsonl")])
            # nothing else tells it from here but that the prompt is the same
            if not family.switched:
                assert (
                    main([*argv, "--out", str(tmp_path / "thinking.jsonl"), "--thinking", "true"])
                    == 2
                )
                assert "has no switch for thinking" in capsys.readouterr().err
        record = json.loads((tmp_path / "out.json").read_text())
        if family.parsers:
            assert status == 0
        else:
            assert status == 1 and "--tool-call-parser NAME" in record["failed"]["tools"]
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    return ask


@pytest.mark.parametrize("name", os.environ.get("SPECDEC_CHAT_FAMILIES", "glm").split())
def test_the_tokens_of_the_rows_are_those_that_transformers_generates(
    name: str, asked: Asked, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    rows = asked(name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert [row["id"] for row in rows] == list(family.talks)[: len(rows)]
    assert len(rows) == (len(family.talks) if family.parsers else 1)
    for row in rows:
        talk, messages = family.talks[row["id"]], answers(row)
        assert [message["role"] for message in row["messages"]][::2] == [
            asked["role"] for asked in talk.asked
        ]
        prompts = [message["prompt_token_ids"] for message in messages]
        assert [message["token_ids"] for message in messages] == generated(
            tmp_path / "target", prompts, MOST
        )
        assert prompts[0] == asked_ids(tokenizer, [talk.asked[0]], talk.tools)
        assert tokenizer.decode(messages[0]["token_ids"]) == family.write(talk.turns[0])
        if family.parsers:
            check_words(messages[0], talk.turns[0], family.thinks)
        if talk.tools:
            assert family.remembered is not None and family.remembered in tokenizer.decode(
                prompts[1]
            )
    path = tmp_path / "out.jsonl"
    turns = [message for row in rows for message in answers(row)]
    supervised = [(message["prompt_token_ids"], message["token_ids"]) for message in turns]
    assert encoded_turns(path, tokenizer) == supervised
    data = ChatData(str(path), val=str(path), seq_len=ROW, batch_size=8)
    data.prepare(tokenizer)
    (batch,) = data.train_dataloader()
    assert sorted(batch_turns(batch)) == sorted(supervised)
    if family.parsers:  # it read all that was written, so that the words alone give the same tokens
        assert encoded_turns(changed(path, without_ids), tokenizer) == supervised
