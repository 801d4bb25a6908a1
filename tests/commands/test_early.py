"""Wrong values are refused before torch is imported, with what to do next; what may be right never is."""

import os
import re
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from specdec.cli import COMMANDS, check_command_line, main
from specdec.commands.early import check_values, default_target_note, type_fault
from specdec.commands.known import index, known_options, required_names
from specdec.decoding import AdaptiveChain, Chain, DynamicTree
from specdec.utils.shape_text import PARAMETERS

EVALUATE = "evaluate --drafter made --prompts rows.jsonl"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a directory that holds a file, and a file of rows."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").touch()
    (tmp_path / "rows.jsonl").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("evaluate", "needs --drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub"),
        ("compare made", "needs b: another of the same prompts"),
        ("cp", "needs name: the kind and name"),
        ("sweep --plan_only", "needs study: the study's file"),
        ("cache --config conf/quickstart.yaml", "needs --out: the cache's directory"),
        ("evaluate --drafter nowhere", "--drafter: nowhere: no such drafter directory"),
        ("evaluate --drafter made/x", "--drafter: made/x: no such drafter directory"),
        ("compare made mad", "b: mad: no such file or directory; did you mean made?"),
        ("table --runs made nowhere", "--runs: nowhere: no such file or directory"),
        (f"{EVALUATE} row.jsonl", "--prompts: row.jsonl: no such file or directory; did you mean rows"),
        (f"{EVALUATE} --target ./nowhere", "./nowhere: no such directory; a relative path begins in"),
        ("fit --data ChatData --data.train row.jsonl", "--data.train: row.jsonl: no such file"),
        (f"{EVALUATE} --out made", "--out: made exists already and is never overwritten: choose"),
        ("fit --out made", "or resume it with --ckpt_path auto"),
        ("fit --trainer.precision fp16", "16-mixed, 16-true, 32-true"),
        ("fit --model.attention eager", "must be auto, blocked, dense or flex, not 'eager'"),
        (f"{EVALUATE} --shape chain tree:4", "--shape: shape 'tree:4': '4' is not one of depth=NUMBER"),
        (f"{EVALUATE} --shape chain:4", "write chain:depth=4"),
        ("fit --acceptance.shape star", "shape 'star': expected one of chain, adaptive, tree, static"),
        ("fit --trainer.max_steps=abc", "--trainer.max_steps must be a whole number, not 'abc'"),
        ("fit --model.optimizer.lr abc", "--model.optimizer.lr must be a number, not 'abc'"),
        ("fit --model.ttt_steps 65", "--model.ttt_steps must be at most 64, not 65"),
        ("fit --model.step_keep 0", "--model.step_keep must be above 0, not 0"),
        (f"{EVALUATE} --temperatures 0 hot", "--temperatures must be a number, not 'hot'"),
        (f"{EVALUATE} --plain perhaps", "--plain must be true or false, not 'perhaps'"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_says_what_to_do(line: str, message: str) -> None:
    name, *args = line.split()
    with pytest.raises(ValueError, match=re.escape(message)):
        check_command_line(name, args)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("trainer: {max_steps: abc}", "trainer.max_steps in c.yaml must be a whole number"),
        ("model: {optimizer: {class_path: AdamW, init_args: {lr: abc}}}", "lr in c.yaml must be a number"),
        ("data: {class_path: ChatData, init_args: {train: [row.jsonl]}}", "row.jsonl: no such file"),
        ("acceptance: {shape: 'chain:4'}", "write chain:depth=4"),
        ("out: made", "out in c.yaml: made exists already"),
        ("model: {target: {source: ./nowhere}}", "./nowhere: no such directory"),
    ],
)  # fmt: skip
def test_a_wrong_config_says_where(config: str, message: str, folder: Path) -> None:
    (folder / "c.yaml").write_text(config)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_command_line("fit", ["--config", "c.yaml"])


@pytest.mark.parametrize(
    "line",
    [
        "evaluate --drafter user/name@v1 --prompts hub:openai/gsm8k:main:test --shape chain:depth=3 tree static",
        "evaluate --config c.yaml",  # which names the drafter
        "evaluate --print_config",
        f"{EVALUATE} --target some/model --shape my_parts.Mine:depth=3 --max_new_tokens 8 --compile --out new",
        f"{EVALUATE} --temperatures [0,1] --system answer_in.json-like_words --limit null",
        "compare made made",
        "table --runs [made,made]",
        "sweep conf/study/fusion.yaml --out made",
        "fit --out made --ckpt_path auto",
        "fit --data ChatData --data.train *.jsonl --model.optimizer.lr 1e-3 --trainer.max_steps -1",
        "fit --model.optimizer torch.optim.AdamW --model.optimizer.lr 1",
        "fit --model.ttt_steps ${trainer.max_steps} --trainer.precision 16 --trainer.devices auto",
        "fit --model.target.source ${oc.env:TARGET} --data.train ${paths.chat}/rows.jsonl",
        "fit --trainer.limit_train_batches 0.5 --trainer.max_epochs null --seed_everything false",
        "fit --model.drafter eagle3 --model.drafter.draft_vocab_size all --model.drafter.aux_layers [1,2]",
        "plan --device h100 --out made",
        "serve --drafter made -- --port nonsense --out made",
    ],
)
def test_what_may_be_right_is_left_to_the_command(line: str, folder: Path) -> None:
    (folder / "c.yaml").write_text("drafter: made\nprompts: [rows.jsonl]\n")
    name, *args = line.split()
    check_command_line(name, args)


@pytest.mark.parametrize(
    "line",
    [
        "--config c.yaml --model.target.source some/model --data.train rows.jsonl --out new",
        "--config c.yaml --model.target some/model --data TextData --out new",
        "--config c.yaml --config d.yaml",
        "--config c.yaml --out made --config d.yaml --out new",
    ],
)
def test_a_value_that_another_takes_the_place_of_is_not_checked(line: str, folder: Path) -> None:
    start = "model: {target: {source: ./nowhere}}\ndata: {class_path: ChatData, init_args: {train: no.jsonl}}\n"
    (folder / "c.yaml").write_text(f"{start}out: made\ntrainer: {{max_steps: 3}}\n")
    (folder / "d.yaml").write_text(
        "model: {target: {source: some/model}}\ndata: {init_args: {train: [rows.jsonl]}}\nout: new\n"
    )
    check_command_line("fit", line.split())


def test_what_a_config_that_cannot_be_read_would_give_is_not_missed(folder: Path) -> None:
    (folder / "c.yaml").write_text("drafter: made\nprompts: &a [*a]\n")
    check_command_line("evaluate", ["--config", "c.yaml"])
    with pytest.raises(ValueError, match="needs --drafter"):
        check_command_line("evaluate", ["--prompts", "rows.jsonl"])


def test_only_the_first_process_finds_its_directory_new() -> None:
    """The first one has made it by the time the others start."""
    check_values(["fit"], ["--out", "made"], is_first=False)
    with pytest.raises(ValueError, match="made exists already"):
        check_values(["fit"], ["--out", "made"], is_first=True)


def test_a_directory_that_a_run_has_claimed_and_left_is_new(folder: Path) -> None:
    (folder / "made" / "file").rename(folder / "made" / ".claimed")
    check_command_line("fit", ["--out", "made"])


@pytest.mark.parametrize(
    ("type_text", "value", "fault"),
    [
        ("Annotated[int, >= 1, <= 64]", "3", None),
        ("Annotated[int, >= 1, <= 64]", 0, "must be at least 1"),
        ("Optional[Annotated[float, > 0]]", "0", "must be above 0"),
        ("Union[Annotated[int, >= 1], Literal['all']]", "al", "must be a whole number or all"),
        ("Union[Annotated[int, >= 1], Literal['all']]", "all", None),
        ("Union[float, Tensor]", "1e-3", None),
        ("Union[float, Tensor]", "x", "must be a number"),
        ("str | null", "x", None),
        ("Union[list[int], str, int]", "x", None),
        ("<class 'Loss'>", "x", None),
        ("", "x", None),
    ],
)
def test_types_as_help_texts_print_them(type_text: str, value: object, fault: str | None) -> None:
    assert type_fault(type_text, value) == fault


def test_every_required_name_is_described() -> None:
    for name in COMMANDS:
        options = known_options(index()["commands"][name])
        for needed in required_names(name):
            assert options[needed.removeprefix("--")].about, (name, needed)


def test_the_shapes_of_the_grammar_are_those_of_decoding() -> None:
    for kind, shape in (("chain", Chain), ("adaptive", AdaptiveChain), ("tree", DynamicTree)):
        hints = get_type_hints(shape)
        assert PARAMETERS[kind] == {field.name: hints[field.name] for field in fields(shape)}


def test_the_bundled_target_is_named_where_it_is_the_default(folder: Path) -> None:
    """But where the message is about something else, or the user chose a target."""
    message = "the target's tokenizer has no chat template"
    note = default_target_note(["fit"], ["--data", "ChatData"], message)
    assert note == (
        ' (the target is "embedded", specdec\'s bundled model, because no --model.target.source was given)'
    )
    (folder / "c.yaml").write_text("model: {target: {source: made}}\n")
    for command, args, text in (
        ("fit", ["--config", "c.yaml"], message),
        ("fit", ["--model.target.source", "made"], message),
        ("evaluate", ["--target", "made"], message),
        ("compare", ["made", "made"], message),
        ("fit", [], "the disk is full"),
    ):
        assert not default_target_note([command], args, text), (command, args, text)


def test_an_error_of_a_command_names_the_bundled_target(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    (folder / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    assert main(["regenerate", "--data", "chat.jsonl", "--out", "answers.jsonl"]) == 2
    error = capsys.readouterr().err
    assert (
        'has no chat template: give an instruction-tuned target (the target is "embedded"' in error
    )


def test_a_wrong_value_takes_under_a_second_of_processor_time(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "specdec", "fit", "--trainer.max_steps", "abc"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert "loading torch" not in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_a_preset_behind_options_that_it_takes_the_place_of_is_refused_and_a_files_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behind = ["--model.drafter.num_layers", "2", "--model.drafter", "eagle3"]
    with pytest.raises(
        ValueError,
        match=r"takes the place of --model.drafter.num_layers before it: give the preset first",
    ):
        check_values(["fit"], behind, True)
    check_values(["fit"], [*behind[2:], *behind[:2]], True)
    assert "takes the place" not in caplog.text
    config = tmp_path / "run.yaml"
    config.write_text("model: {drafter: {draft_vocab_size: 256}}\n")
    check_values(["fit"], ["--config", str(config), "--model.drafter", "eagle3"], True)
    assert "what the config files say: model.drafter.draft_vocab_size" in caplog.text


def test_an_evaluation_of_suites_goes_on_in_the_directory_that_it_began(tmp_path: Path) -> None:
    (tmp_path / "gsm8k-t0").mkdir()
    words = ["--drafter", str(tmp_path), "--out", str(tmp_path)]
    check_values(["evaluate"], [*words, "--suite", "gsm8k"], True)
    with pytest.raises(ValueError, match="exists already"):
        check_values(["evaluate"], [*words, "--prompts", __file__], True)


def test_a_preset_behind_its_options_is_one_line_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fit", "--model.drafter.num_layers", "2", "--model.drafter", "eagle3"]) == 2
    assert "give the preset first" in capsys.readouterr().err
