import dataclasses
import json
from pathlib import Path

import pytest

from specdec.data import ChatData
from specdec.data.chat import supervised_texts
from specdec.embedded.build import read_record
from specdec.embedded.chats import END, build_chat_target
from specdec.embedded.command import main
from specdec.target import Target
from tests.embedded.conftest import TINY

CONFIG = dataclasses.replace(TINY, vocab_size=290)
ANSWERS = ["It is grey today, and it will rain.", "Two and two are four.", "Nobody knows that.", "Ask me tomorrow."]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [
        [
            {"role": "user", "content": f"Question {n}, what do you say?"},
            {"role": "assistant", "content": ANSWERS[n % 4]},
        ]
        for n in range(80)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def directory(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    build_chat_target([str(chats)], CONFIG, path)
    return path


def test_it_is_a_target_like_any_other(directory: Path) -> None:
    target = Target.load(directory)
    target.prove()
    assert target.vocab_size == len(target.tokenizer) == CONFIG.vocab_size
    assert target.tokenizer.convert_tokens_to_ids(END) in target.eos_token_ids
    record = read_record(directory)
    assert record["conversations"] == {"train": 76, "held_out": 4, "left_out": 0}
    assert len(record["text_sha256"]) == 64


def test_its_template_begins_with_bos_and_says_what_is_the_assistants(directory: Path, chats: Path) -> None:
    tokenizer = Target.load(directory).tokenizer
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    documents, _ = ChatData(str(chats), seq_len=128).documents(tokenizer)
    assert all(document.ids_T[0] == tokenizer.bos_token_id for document in documents)
    assert {text for one in documents for text in supervised_texts(one, tokenizer)} == {a + END for a in ANSWERS}


def test_the_same_data_give_the_same_weights(directory: Path, chats: Path, tmp_path: Path) -> None:
    build_chat_target([str(chats)], CONFIG, tmp_path)
    assert read_record(tmp_path)["files"] == read_record(directory)["files"]


def test_the_command(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--{name}={value}" for name, value in dataclasses.asdict(CONFIG).items()]
    out = tmp_path / "out"
    assert main(["--chats", str(chats), "--out", str(out), *arguments]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: held-out loss ")
    with pytest.raises(ValueError, match="exists already"):
        main(["--chats", str(chats), "--out", str(out), *arguments])


def test_a_broken_conversation_may_be_left_out(chats: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken, out = tmp_path / "broken.jsonl", tmp_path / "out"
    broken.write_text(chats.read_text() + json.dumps({"messages": {"role": 1}}) + "\n")
    arguments = [f"--{name}={value}" for name, value in dataclasses.asdict(CONFIG).items()]
    command = ["--chats", str(broken), "--out", str(out), *arguments]
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 81"):
        main(command)
    assert main([*command, "--broken", "drop"]) == 0
    assert read_record(out)["conversations"] == {"train": 76, "held_out": 4, "left_out": 1}
    assert "1 broken rows were left out" in caplog.text


def test_a_chat_target_needs_a_place(chats: Path) -> None:
    with pytest.raises(ValueError, match="--out"):
        main(["--chats", str(chats)])


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        main(["--chats", str(tmp_path / "nowhere.jsonl"), "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
