"""What a file may reach, and how large it may grow."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from specdec.cli import main
from specdec.commands.parser import call
from specdec.data.mixes import MixSource
from specdec.studies.study_file import read_study
from specdec.utils import imports, machine
from specdec.utils.config import compose, read_yaml
from specdec.utils.machine import provenance
from specdec.utils.trust import (
    DEEPEST,
    check_reach,
    flags_of_keys,
    load_yaml,
    reaching_keys,
    read_yaml_text,
    redacted,
    redacted_words,
)

LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 40)
)
REPEATS = "x0: aaaaaaaa\n" + "".join(f"x{n}: '${{x{n - 1}}}${{x{n - 1}}}'\n" for n in range(1, 40))
LISTS = "x0: [a, a]\n" + "".join(
    f"x{n}: ['${{x{n - 1}}}', '${{x{n - 1}}}']\n" for n in range(1, 40)
)
WRONG = {
    "aliases": (LAUGHS, "aliases"),
    "merges": (MERGES, "aliases"),
    "strings of references": (REPEATS, "could repeat"),
    "lists of references": (LISTS, "could repeat"),
    "deep maps": ("{a: " * 600 + "1" + "}" * 600, "in each other"),
    "deep lists": ("a: " + "[" * 100_000, "nesting|in each other"),
    "deep blocks": ("".join(f"{' ' * n}a:\n" for n in range(600)), "in each other"),
    "NUL": ("a: \0", "character"),
    "a scalar": ("just text", "mapping"),
    "nothing but a number": ("3", "mapping"),
    "many digits": ("a: " + "9" * 5000, "digits"),
    "an object": ("a: !!python/object/apply:os.system [ls]", "constructor"),
    "two documents": ("a: 1\n---\nb: 2", "document"),
    "a loop": ("a: &a [*a]", "without end"),
    "too large": ("a: 1 # " + "x" * 2**20, "no YAML of over"),
}


@pytest.mark.parametrize("read", [read_yaml, read_study])
@pytest.mark.parametrize("case", WRONG)
def test_what_no_config_is_takes_one_line_and_no_time(case: str, read: Any, tmp_path: Path) -> None:
    text, message = WRONG[case]
    path = tmp_path / "c.yaml"
    path.write_text(text)
    begin = time.process_time()
    with pytest.raises(ValueError, match=message) as found:
        read(str(path))
    assert time.process_time() - begin < 5
    assert str(found.value).startswith(str(path)) and "\n" not in str(found.value)


@pytest.mark.parametrize(
    "command_",
    [["fit"], ["evaluate"], ["sweep"], ["sweep", "x", "--config"], ["plan", "--world=1"]],
)
@pytest.mark.parametrize("kind", ["device", "pipe", "directory", "kernel"])
def test_a_file_without_end_is_not_read(
    command_: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    place = {
        "device": "/dev/zero",
        "pipe": str(pipe),
        "directory": str(tmp_path),
        "kernel": "/proc/kcore",
    }[kind]
    if command_ == ["sweep"] and kind == "directory":
        pytest.skip("a sweep's directory")
    if kind == "kernel" and not os.access(place, os.R_OK):
        pytest.skip("not readable here")
    if command_[0] != "sweep":
        command_ = [*command_, "--config"]
    assert main([*command_, place]) == 2
    assert len([line for line in capsys.readouterr().err.splitlines() if "error: " in line]) == 1


@pytest.mark.parametrize("key", ["model", "model.target", "data", "config", "trainer.callbacks"])
def test_no_key_of_a_config_makes_the_parser_read_a_pipe(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    config = tmp_path / "c.yaml"
    config.write_text(f'"{key}": {pipe}\n')
    assert main(["fit", "--config", str(config)]) == 2
    assert "pipe or device" in capsys.readouterr().err


def test_aliases_and_references_of_a_real_config_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "a: &a {x: 1.0e-3, y: [1, 2]}\nb: *a\nc: {<<: *a, z: '${a.x}'}\nd: '${a.x}-${b.x}'\n"
    )
    found = read_yaml(str(path))
    assert found["c"] == {"x": 1e-3, "y": [1, 2], "z": "${a.x}"} and found["b"] == found["a"]
    assert load_yaml("[" * (DEEPEST - 1) + "]" * (DEEPEST - 1), "x")


def test_a_part_of_a_config_is_measured_too(tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text(LAUGHS)
    (tmp_path / "c.yaml").write_text("model: {drafter: part.yaml}")
    with pytest.raises(ValueError, match=r"part\.yaml: .*aliases"):
        compose(["--config", str(tmp_path / "c.yaml")])
    with pytest.raises(ValueError, match=r"part\.yaml: .*aliases"):
        compose(["--model.drafter", str(tmp_path / "part.yaml")])


@pytest.mark.parametrize("name", ["part.txt", "part", "part.yaml"])
@pytest.mark.parametrize("place", ["word", "config"])
def test_a_part_of_any_name_is_measured(
    name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """jsonargparse would read all of it."""
    part = tmp_path / name
    part.touch()
    os.truncate(part, 2**40)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": {"target": str(part)}}))
    given = (
        ["--model.target", str(part)] if place == "word" else ["--config", str(tmp_path / "c.yaml")]
    )
    assert main(["doctor", *given, "--data", "TextData"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert str(part) in last and "and no YAML of over" in last


@pytest.mark.parametrize(
    "text",
    [
        "one line\n",
        "the first line\nthe second line\n",
        "- a list\n- of lines\n",
        '{"text": "a row"}\n',
        "a: [b",
        "",
    ],
)
def test_a_file_of_training_texts_stays_a_path(text: str, tmp_path: Path) -> None:
    """Also where a part's file may stand in its place."""
    paths = []

    def command(*, train: str | list[str] | MixSource) -> None:
        paths.append(train)

    (tmp_path / "notes.txt").write_text(text)
    call(command, "command", ["--train", str(tmp_path / "notes.txt")])
    assert paths == [str(tmp_path / "notes.txt")]


def test_what_is_off_reaches_nothing() -> None:
    check_reach(
        {
            "target": {"trust_remote_code": False},
            "vllm": None,
            "vllm_args": [],
            "host": "127.0.0.1",
        },
        "x",
    )
    check_reach(
        {"data": {"train": "hub:me/data:train", "engine": "vllm"}, "logger": ["CSVLogger"]}, "x"
    )


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"vllm": "./evil.sh"}, "vllm"),
        ({"host": "0.0.0.0"}, "host"),
        ({"repo": "evil/repository"}, "repo"),
        ({"push": "evil/repository"}, "push"),
        ({"a": [{"b.vllm_args": ["--plugin"]}]}, "vllm_args"),
        ({"trust_remote_code": "no"}, "trust_remote_code"),
        ({"trust_remote_code": 1}, "trust_remote_code"),
        ({"dirpath": "simplecache::ftp://h/x"}, "dirpath"),
        ({"logger": [{"class_path": "lightning.pytorch.loggers.wandb.WandbLogger"}]}, "logger"),
        (
            {"logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": "/home/me"}}]},
            "save_dir",
        ),
        (
            {
                "callbacks": [
                    {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "runs/../../x"}}
                ]
            },
            "dirpath",
        ),
    ],
)
def test_a_refusal_names_the_flag_that_helps(given: Any, key: str) -> None:
    with pytest.raises(ValueError, match=rf"^c\.yaml: .*--allow_keys {key}$"):
        check_reach(given, "c.yaml")
    assert {needs for _, needs, _ in reaching_keys(given)} == {key}
    assert flags_of_keys([key]) == ["--allow_keys", key]
    with imports.allowing((), keys=[key]):
        check_reach(given, "c.yaml")
        assert imports.flags() == ["--allow_keys", key]
    with pytest.raises(ValueError, match="command line alone"):
        check_reach(given, "c.yaml")


def resolved(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text), resolve=True)


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:PLAIN_NAME}", "${oc.env:${b}}", "${oc.env:PLAIN_${c}}", "${oc.decode:'${oc.env:PLAIN_NAME}'}",
        "${oc.create:'${oc.env:PLAIN_NAME}'}", "${oc.select:d}", "${oc.env:PLAIN_NAME,default}",
    ],
)  # fmt: skip
def test_a_variable_is_read_only_if_it_is_allowed(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN_NAME", "its-value")
    text = yaml.safe_dump({"a": value, "b": "PLAIN_NAME", "c": "NAME", "d": "${oc.env:PLAIN_NAME}"})
    imports.guard_parsers()
    with pytest.raises(ValueError, match=r"--allow_env PLAIN_NAME|nobody has checked"):
        resolved(text)
    with imports.allowing((), env=["PLAIN_NAME"]):
        if "oc.decode" not in value and "oc.create" not in value:
            assert resolved(text)["a"] == "its-value"
    with pytest.raises(ValueError, match="--allow_env"):
        resolved(yaml.safe_dump({"a": "${oc.env:PLAIN_NAME}"}))


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWD", "PGPASSWORD"])
def test_a_secret_of_the_environment_is_never_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "its-value")
    with imports.allowing((), env=[name]), pytest.raises(ValueError, match="would write a secret"):
        resolved(f"a: '${{oc.env:{name}}}'")


def test_a_variable_may_be_missing_or_have_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIN_NAME", raising=False)
    with imports.allowing((), env=["PLAIN_NAME"]):
        assert resolved("a: ${oc.env:PLAIN_NAME,there}") == {"a": "there"}
        assert resolved("a: ${oc.env:PLAIN_NAME,null}") == {"a": None}
        with pytest.raises(ValueError, match="has no PLAIN_NAME"):
            resolved("a: ${oc.env:PLAIN_NAME}")


def test_a_tokenizer_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZER_DIR", "/there")
    with imports.allowing((), env=["TOKENIZER_DIR"]):
        assert resolved("a: ${oc.env:TOKENIZER_DIR}") == {"a": "/there"}
    kept = {"eos_token": "</s>", "mask_token": "<m>"}
    assert redacted({**kept, "hf_token": "hide", "my.token": "hide"}) == {
        **kept,
        "hf_token": "***",
        "my.token": "***",
    }


def test_the_command_line_allows_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_ALLOW_ENV", "DATA")
    given, rest = imports.take_permissions(
        ["--allow_env", "ROOT,DATA", "--allow_keys=vllm", "--x", "1"]
    )
    assert given == ((), ("DATA", "ROOT"), ("vllm",)) and rest == ["--x", "1"]
    assert given.flags() == ["--allow_env", "DATA,ROOT", "--allow_keys", "vllm"]
    with pytest.raises(ValueError, match="--allow_keys needs a key"):
        imports.take_permissions(["--allow_keys"])


def test_no_secret_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "specdec", "fit", "--trainer.logger.api_key", "hide-1", "--hf-token=hide-2", "--url", "http://me:hide-3@host/x",
        '--trainer.logger={class_path: CometLogger, init_args: {api_key: hide-4, workspace: mine}}', "--max_new_tokens",
        "5", "--model.loss.beta=0.3", "[{password: hide-5}]",
    ]  # fmt: skip
    monkeypatch.setattr(machine, "command_line", words)
    kept = provenance()["command"]
    assert (
        "hide" not in kept and "mine" in kept and "--max_new_tokens 5" in kept and "host/x" in kept
    )
    assert redacted_words(words[:2] + words[8:10]) == words[:2] + words[8:10]
    tree = {
        "logger": [{"api_key": "hide", "tracking_uri": "https://u:hide@h"}],
        "mask_tokens": "5",
        "token": None,
    }
    assert redacted(tree) == {
        "logger": [{"api_key": "***", "tracking_uri": "https://***@h"}], "mask_tokens": "5", "token": None
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "access_key", "secret_key", "private-key", "auth", "bearer", "pwd", "passphrase", "Authorization",
    "aws_access_key_id",
    "accessKey", "accessToken", "authToken", "clientSecret", "cookie", "session_key", "account_key",
])  # fmt: skip
def test_every_usual_name_of_a_secret_is_known(name: str) -> None:
    assert redacted({"logger": {name: "hide"}}) == {"logger": {name: "***"}}
    for words in (
        [f"--logger.{name}", "hide"],
        [f"--logger.{name}=hide"],
        [f"--logger={{{name}: hide}}"],
    ):
        assert "hide" not in str(redacted_words(words))
    address = f"https://host/path?a=1&{name}=hide&b=2#{name}=hide"
    assert redacted({"uri": address}) == {"uri": address.replace("hide", "***")}


@pytest.mark.parametrize(
    "name", ["author", "keyboard", "query_key", "token_id", "max_tokens", "key", "prefix"]
)
def test_other_names_are_no_secrets(name: str) -> None:
    assert redacted({name: "seen"}) == {name: "seen"}
    words = [f"--model.{name}", "true"]
    assert redacted_words(words) == words


def test_a_secret_in_an_address_or_a_header_is_hidden() -> None:
    texts = {
        "s3://bucket/key?X-Amz-Signature=hide": "s3://bucket/key?X-Amz-Signature=***",
        "https://host/?key=hide&page=2": "https://host/?key=***&page=2",
        "Authorization: Bearer hide": "Authorization: Bearer ***",
        "https://host/?page=2": "https://host/?page=2",
        "https://me:hi@de@host/x": "https://***@host/x",
        "https://host/a@b": "https://host/a@b",
    }
    for text, wanted in texts.items():
        assert redacted([text]) == [wanted]


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ValueError, match=r"c\.yaml: not UTF-8 text"):
        read_yaml_text(tmp_path / "c.yaml")
