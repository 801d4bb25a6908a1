"""Config files and overrides."""

from pathlib import Path

import pytest

from specdec.utils.config import compose, packaged_path


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_later_file_wins(tmp_path: Path) -> None:
    one, two = (
        write(tmp_path / "one.yaml", "a: {b: 1, c: 1}"),
        write(tmp_path / "two.yaml", "a: {b: 2}"),
    )
    assert compose(["--config", one, "--config", two])[0] == {"a": {"b": 2, "c": 1}}


def test_a_glob_is_text() -> None:
    assert compose(["--data.train", "*.txt"])[1] == ["--data.train", "*.txt"]


def test_flags_pass_through(tmp_path: Path) -> None:
    assert compose(["--print_config", "--model.compile", "true"])[1] == [
        "--print_config",
        "--model.compile",
        "true",
    ]


def test_a_part_file_beside_the_config_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write(tmp_path / "part.yaml", "a: 1")
    file = write(
        tmp_path / "main.yaml", "model: {drafter: part.yaml, other: conf/drafter/eagle3.yaml}"
    )
    monkeypatch.chdir("/")
    config = compose(["--config", file])[0]
    assert config["model"]["drafter"] == part
    assert Path(config["model"]["other"]).is_file()


def test_shipped_configs_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(packaged_path("conf/drafter/eagle3_1.yaml")).is_file()
    assert packaged_path("conf/nothing.yaml") == "conf/nothing.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", "line 2"),
        ("- 1\n- 2", "must be a mapping"),
    ],
)
def test_wrong_files_say_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(["--config", write(tmp_path / "a.yaml", text)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml: no such file"):
        compose(["--config", str(tmp_path / "nowhere.yaml")])


def test_a_bare_part_file_is_given_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write(tmp_path / "part.yaml", "a: 1")
    monkeypatch.chdir(tmp_path)
    assert compose(["--model.drafter", "part.yaml"])[1] == ["--model.drafter", part]
    assert compose(["--model.drafter=part.yaml"])[1] == [f"--model.drafter={part}"]
    assert compose(["--model.drafter", "none.yaml"])[1] == ["--model.drafter", "none.yaml"]


FORMS = {
    "list": "trainer: {other: [1], logger: [{class_path: A}]}",
    "mapping": "trainer: {logger: {class_path: A}}",
    "reference": "parts: {class_path: A}\ntrainer: {other: '${nowhere}', logger: '${parts}'}",
}


@pytest.mark.parametrize("order", [("mapping", "list"), ("list", "mapping"), ("reference", "list")])
def test_a_list_and_a_mapping_do_not_merge(tmp_path: Path, order: tuple[str, str]) -> None:
    first, last = (write(tmp_path / f"{name}.yaml", FORMS[name]) for name in order)
    with pytest.raises(ValueError, match=r"trainer\.logger is a list") as raised:
        compose(["--config", first, "--config", last])
    assert first in str(raised.value) and last in str(raised.value)
    null = write(tmp_path / "null.yaml", "trainer: {logger: null}")
    config = compose(["--config", first, "--config", null, "--config", last])[0]
    assert config["trainer"]["logger"] in ({"class_path": "A"}, [{"class_path": "A"}])
