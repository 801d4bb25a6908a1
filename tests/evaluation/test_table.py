"""Tables of evaluations that are made by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.evaluation.table import write_table
from specdec.utils.files import write_sums
from specdec.utils.reading import check_sums

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes what a table reads of an evaluation on ``gsm8k``, with changes of its settings."""

    def make(
        name: str,
        drafter: str,
        length: float = 2.0,
        speedup: float | None = None,
        target: str = "t",
        **changes: Any,
    ) -> Path:
        about = {"directory": drafter, "label": Path(drafter).name, "weights_sha256": drafter}
        settings = {
            "dtype": "float32",
            "prompts": ["gsm8k.jsonl"],
            "prompts_sha256": "1",
            "max_new_tokens": 64,
            "sampling": {"temperature": 0.0},
        }
        result = {"shape": "chain of 2", "prompts": 3, "looping_share": 0.0, "speedup": speedup}
        metrics = {
            "target": {"fingerprint": target, "source": f"models/{target}"}, "drafter": about,
            "settings": settings | changes, "baselines": [],
            "results": [result | {"acceptance_length": {"mean": length}}],
            "provenance": {"gpus": [], "cpu": "a processor", "versions": {"torch": "2"}},
        }  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text(json.dumps(metrics))
        return tmp_path / name

    return make


def test_a_run_s_best_drafter_has_the_run_s_name(make: Make, tmp_path: Path) -> None:
    write_table(
        tmp_path,
        [make("a", "runs/x/drafter"), make("b", "runs/x/drafter_best", 2.5), make("c", "other")],
    )
    rows = [
        line.split("|")[2].strip()
        for line in (tmp_path / "table.md").read_text().splitlines()
        if "chain" in line
    ]
    assert rows == ["x, chain of 2", "x (best), chain of 2", "other, chain of 2"]


def test_one_drafter_has_a_row_for_every_verifier(make: Make, tmp_path: Path) -> None:
    runs = [
        make("a", "runs/x/drafter"),
        make("b", "runs/x/drafter", target="tuned", dtype="bfloat16"),
    ]
    write_table(tmp_path, runs)
    rows = [
        line.split("|")[2].strip()
        for line in (tmp_path / "table.md").read_text().splitlines()
        if "chain" in line
    ]
    assert rows == ["x for t in float32, chain of 2", "x for tuned in bfloat16, chain of 2"]
    with pytest.raises(ValueError, match="several targets and several drafters"):
        write_table(tmp_path, [*runs, make("c", "runs/y/drafter")])


def test_speed_up_is_spoken_of_where_it_was_timed(make: Make, tmp_path: Path) -> None:
    write_table(tmp_path, [make("a", "one")])
    assert (
        "Measured on a processor" in (text := (tmp_path / "table.md").read_text())
        and "Speed-up over" not in text
    )
    write_table(tmp_path, [make("b", "one", speedup=1.5)])
    assert (
        "Speed-up over plain decoding in the same process, on a processor"
        in (tmp_path / "table.md").read_text()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 65}, "c and .*a differ in max_new_tokens"),
        ({"thinking": True}, "c and .*a differ in thinking"),
        ({"dtype": "bfloat16"}, "c and .*a differ in dtype"),
        ({"batch_size": 8}, "c and .*b: both are of two, chain of 2 on gsm8k"),
    ],
)
def test_what_no_column_can_hold_is_refused(
    make: Make, changes: dict[str, Any], message: str
) -> None:
    places = [make("a", "one"), make("b", "two"), make("c", "two", **changes)]
    with pytest.raises(ValueError, match=message):
        write_table(None, places)


def test_a_table_in_an_evaluation_leaves_its_checksums(make: Make, tmp_path: Path) -> None:
    """Of the other files; one bit that changes in them is still found."""
    place = make("a", "runs/x/drafter")
    (place / "answers.jsonl").write_text('{"tokens": 4}\n')
    write_sums(place)
    for _ in range(2):  # the second table replaces the first
        write_table(place, [place])
    assert check_sums(place, partial=True).keys() >= {"metrics.json", "answers.jsonl", "table.tex"}
    for name in ("metrics.json", "answers.jsonl", "table.tex"):
        whole = (place / name).read_bytes()
        (place / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(ValueError, match=name):
            check_sums(place, partial=True)
        (place / name).write_bytes(whole)
    check_sums(place, partial=True)
