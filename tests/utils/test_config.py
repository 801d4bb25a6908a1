"""Config files, overrides and references."""

from pathlib import Path

import pytest

from specdec.utils.config import compose, shipped


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_references_are_resolved_after_the_overrides(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml", "model: {ttt_steps: 5, deep: {again: '${model.ttt_steps}'}}\nn: '${model.ttt_steps}'"
    )
    config, rest = compose(["--config", file, "--model.ttt_steps", "3"])
    assert config["n"] == 3
    assert config["model"]["deep"]["again"] == 3
    assert rest == ["--model.ttt_steps=3"]


def test_a_reference_may_lead_into_another_file(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", "a: '${b.c}'")
    two = write(tmp_path / "two.yaml", "b: {c: [1, 2]}")
    assert compose(["--config", one, f"--config={two}"])[0] == {"a": [1, 2], "b": {"c": [1, 2]}}


def test_a_reference_may_lead_to_an_override_that_no_file_has(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "a: '${x.y}'")
    assert compose(["--config", file, "--x.y=2.5"])[0] == {"a": 2.5}


def test_a_later_file_wins(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.yaml", "a: {b: 1, c: 1}"), write(tmp_path / "two.yaml", "a: {b: 2}")
    assert compose(["--config", one, "--config", two])[0] == {"a": {"b": 2, "c": 1}}


def test_a_part_chosen_by_name_can_take_arguments(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "data: TextData\nn: '${data.init_args.seq_len}'")
    assert compose(["--config", file, "--data.init_args.seq_len", "64"])[0]["n"] == 64


def test_a_glob_is_text() -> None:
    assert compose(["--data.train", "*.txt"])[1] == ["--data.train=*.txt"]


def test_flags_pass_through(tmp_path: Path) -> None:
    assert compose(["--print_config", "--model.compile", "true"])[1] == ["--print_config", "--model.compile=true"]


def test_a_part_file_beside_the_config_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = write(tmp_path / "part.yaml", "a: 1")
    file = write(tmp_path / "main.yaml", "model: {drafter: part.yaml, other: conf/drafter/eagle3.yaml}")
    monkeypatch.chdir("/")
    config = compose(["--config", file])[0]
    assert config["model"]["drafter"] == part
    assert Path(config["model"]["other"]).is_file()


def test_shipped_configs_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(shipped("conf/drafter/eagle3_1.yaml")).is_file()
    assert shipped("conf/nothing.yaml") == "conf/nothing.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", "line 2"),
        ("a: '${nope}'", "nope"),
        ("a: '${b}'\nb: '${a}'", "a.yaml"),
        ("- 1\n- 2", "must be a mapping"),
        ("a: '${oc.env:HF_TOKEN}'", "secret"),
        ("a: ???", "a.yaml"),
    ],
)
def test_wrong_files_say_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(["--config", write(tmp_path / "a.yaml", text)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml: no such file"):
        compose(["--config", str(tmp_path / "nowhere.yaml")])


def test_an_override_needs_a_value() -> None:
    with pytest.raises(ValueError, match=r"\?\?\?"):
        compose(["--model.ttt_steps=???"])


def test_a_bare_part_file_is_given_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = write(tmp_path / "part.yaml", "a: 1")
    monkeypatch.chdir(tmp_path)
    assert compose(["--model.drafter", "part.yaml"])[1] == [f"--model.drafter={part}"]
    assert compose(["--model.drafter", "none.yaml"])[1] == ["--model.drafter=none.yaml"]
