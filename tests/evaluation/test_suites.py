"""Suites by name: which rows they are, how they are run, and the table of them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.data.rows import HUB_NAME
from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.suites import GROUPS, PUBLISHED, SUITES, Published, find_suites, rows_sha256

DATA = next(
    (
        place / "shared" / "data"
        for place in Path(__file__).parents
        if (place / "shared" / "data").is_dir()
    ),
    None,
)
USER = {"role": "user", "content": "a"}
QUESTIONS = [{"question_id": n, "turns": [f"def add_{n}("], "category": "code"} for n in range(2)]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_row_on_the_hub_is_pinned() -> None:
    for suite in SUITES.values():
        assert bool(suite.hub) != bool(suite.where)
        name = HUB_NAME.fullmatch(suite.hub or "")
        assert suite.hub is None or (name and re.fullmatch(r"[0-9a-f]{40}", name[2]))
    assert all(len(names) == 9 and set(names) <= SUITES.keys() for names in GROUPS.values())


@pytest.mark.parametrize("name", ["mt_bench", "humaneval", "gsm8k", "alpaca"])
def test_published_files_are_known(name: str) -> None:
    if DATA is None:
        pytest.skip("the files are not here")
    (found,) = find_suites([name], DATA / "prompts")
    assert found.published == PUBLISHED[found.rows_sha256].what and found.max_new_tokens == 1024
    if name == "gsm8k":
        (whole,) = find_suites([f"gsm8k={DATA / 'gsm8k' / 'test.jsonl'}"], None)
        assert (
            "1,319" in str(whole.published)
            and whole.layouts == ["gsm8k_boxed"]
            and whole.max_new_tokens == 2048
        )


def test_rows_are_known_by_what_they_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "one" / "humaneval.jsonl", QUESTIONS)
    digest = rows_sha256(load_prompts([file]))
    (unknown,) = find_suites(["humaneval"], tmp_path / "one")
    assert (unknown.published, unknown.rows_sha256, unknown.max_new_tokens) == (None, digest, 2048)
    assert "not known as published" in unknown.notes()[0]
    monkeypatch.setitem(PUBLISHED, digest, Published("humaneval", "ours", 7))
    renamed = [{"turns": row["turns"], "id": f"x{n}"} for n, row in enumerate(QUESTIONS)]
    other = write(tmp_path / "two" / "q.jsonl", renamed)
    (known,) = find_suites([f"humaneval={other}"], None)
    assert (known.published, known.max_new_tokens) == ("ours", 7)
    with pytest.raises(
        ValueError, match=r"suite gsm8k: .*q.jsonl holds ours, which is suite humaneval"
    ):
        find_suites([f"gsm8k={other}"], None)
    write(other, renamed[::-1])
    assert (
        find_suites([f"humaneval={other}"], None)[0].published is None
    )  # another order is another set where some are cut


@pytest.mark.parametrize(
    ("file", "name", "rows", "asked"),
    [
        ("gsm8k/question.jsonl", "gsm8k", QUESTIONS, "def add_0("),
        ("mt-bench.jsonl", "mt_bench", QUESTIONS, "def add_0("),
        ("gsm8k.jsonl", "gsm8k", [{"question": "1 + 1?", "answer": "2"}], "1 + 1?\nPlease reason step by step"),
        ("alpaca.jsonl", "alpaca", [{"instruction": "Add.", "input": "1", "output": "2"}], "Add.\n\nInput:\n1"),
        ("qualitative.jsonl", "speed_bench",
         [{"messages": [USER, USER], "category": "qa", "source": "s", "multiturn": True}], "a"),
    ],
)  # fmt: skip
def test_a_folder_may_have_its_files_as_others_name_them(
    tmp_path: Path, file: str, name: str, rows: list[dict[str, object]], asked: str
) -> None:
    write(tmp_path / file, rows)
    (found,) = find_suites([name], tmp_path)
    turns = load_prompts([found.source], layouts=found.layouts)[0].turns
    assert turns and turns[0].startswith(asked)


def test_rows_in_the_hub_s_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory stands for a repository."""
    write(tmp_path / "math" / "test.jsonl", [{"problem": "1 + 1?", "answer": "2", "subject": None}])
    source = f"hub:{tmp_path / 'math'}:default:test[:1]"
    monkeypatch.setitem(SUITES, "math500", SUITES["math500"]._replace(hub=source))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (found,) = find_suites(["math500"], None)
    assert (found.source, found.published) == (source, source)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["gsm9k"], "suite 'gsm9k': choose of gsm8k, math500, .*nine$"),
        (["nine", "gsm8k"], "suite gsm8k is asked for twice"),
        (["nine=a.jsonl"], "write NAME=FILE, with the name of one set"),
        (["spec_bench"], "there is no spec_bench.jsonl in .*; give spec_bench=FILE$"),
        (
            ["mbpp"],
            "there is no mbpp.jsonl in .*; give mbpp=FILE, or leave --suite_dir out for the Hub's rows",
        ),
        (["gsm8k=none.jsonl"], "none.jsonl"),
        (["gsm8k=none.txt"], "must be .jsonl, .ndjson, .jsonlines, .json, .parquet or hub:"),
    ],
)
def test_what_is_not_to_be_had_is_refused(tmp_path: Path, asked: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_suites(asked, tmp_path)


def test_what_the_hub_does_not_have_is_told_from_where_to_get() -> None:
    with pytest.raises(
        ValueError, match=r"speed_bench=FILE \(nemo_skills/dataset/speed-bench/prepare.py"
    ):
        find_suites(["speed_bench"], None)


@pytest.fixture
def arguments(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    chats = tmp_path / "chats"
    shutil.copytree(target_directory, chats)
    (chats / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    write(tmp_path / "sets" / "humaneval.jsonl", QUESTIONS)
    write(tmp_path / "sets" / "mt_bench.jsonl", QUESTIONS[:1])
    return [
        "evaluate", "--target", str(chats), "--drafter", str(drafter_directory),
        "--suite", "humaneval", "mt_bench", "--suite_dir", str(tmp_path / "sets"), "--shape", "chain:depth=2",
        "--max_new_tokens", "6", "--compile", "off", "--other_target", "true",  # its template is another
    ]  # fmt: skip


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations have an empty picture."""
    monkeypatch.setattr(
        "specdec.evaluation.results_figure.plot", lambda metrics, path: path.touch()
    )


@pytest.mark.usefixtures("undrawn")
def test_every_suite_and_temperature_has_a_folder_and_all_of_them_a_table(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "out"
    assert main([*arguments, "--out", str(out)]) == 0
    parts = [
        f"{name}-t{temperature}" for name in ("humaneval", "mt_bench") for temperature in (0, 1)
    ]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*parts, "SHA256SUMS", "table.md", "table.tex"]
    )
    found = [json.loads((out / part / "metrics.json").read_text()) for part in parts]
    assert [one["settings"]["sampling"]["temperature"] for one in found] == [0, 1, 0, 1]
    assert [one["results"][0]["prompts"] for one in found] == [2, 2, 1, 1]
    assert (
        found[0]["settings"]["suite"]["published"] is None
        and "not known as published" in caplog.text
    )
    text = (out / "table.md").read_text()
    cells = [cell.strip() for cell in text.splitlines()[5].strip("|").split("|")]
    of = {part: one["results"][0] for part, one in zip(parts, found, strict=True)}
    lengths = [of[f"{name}-t1"]["acceptance_length"]["mean"] for name in ("humaneval", "mt_bench")]
    speeds = [of[f"{name}-t1"]["speedup"] for name in ("humaneval", "mt_bench")]
    assert [cell.rstrip("x*") for cell in cells] == [
        "1", f"{tmp_path.name}, chain of 2", f"{speeds[0]:.2f}", f"{lengths[0]:.2f}", f"{speeds[1]:.2f}",
        f"{lengths[1]:.2f}", f"{sum(speeds) / 2:.2f}", f"{sum(lengths) / 2:.2f}",
    ]  # fmt: skip
    tex = (out / "table.tex").read_text()
    assert (
        "\\multicolumn{2}{c}{HumanEval} & \\multicolumn{2}{c}{MT-bench} & \\multicolumn{2}{c}{Mean}"
        in tex
    )
    assert tex.count("\\midrule") == 2 and "chain of 2" in tex

    # what is there is kept, and what is not of these settings is refused
    (out / parts[3] / "metrics.json").unlink()
    (out / parts[3]).rename(tmp_path / "gone")
    before = (out / parts[0] / "metrics.json").stat().st_mtime_ns
    assert main([*arguments, "--out", str(out)]) == 0
    assert (out / parts[0] / "metrics.json").stat().st_mtime_ns == before and (
        out / parts[3]
    ).is_dir()
    assert "is there, and kept" in caplog.text
    capsys.readouterr()
    assert main([*arguments, "--limit", "1", "--out", str(out)]) == 2
    assert (
        "humaneval-t0: there is one already, of another limit, prompts_sha256; give"
        in capsys.readouterr().err
    )

    # the table of several, and their comparison
    assert main(["table", "--runs", str(out), "--out", str(tmp_path / "both")]) == 0
    assert (tmp_path / "both" / "table.tex").read_text() == (out / "table.tex").read_text()
    assert main(["compare", str(out), str(out)]) == 2  # one prompt alone, of mt_bench
    assert "comparison takes at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompts", __file__], "give either prompts or suite"),
        (["--sampling.temperature", "1"], "give temperatures in its place"),
        (["--temperatures", "0", "0"], "one is given twice"),
        (["--layouts", "prompt"], "a suite has its own"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *more]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
