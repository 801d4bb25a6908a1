"""``specdec push``: what arrives at the Hub is what lies here, or nothing does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from specdec.cli import main
from specdec.drafter import DrafterSpec, load_drafter, save_drafter
from specdec.drafter.io import located
from specdec.export import export_drafter
from specdec.export.card import MARK
from specdec.target import Target
from specdec.training.building import FromDrafter
from tests.export.hub import TOKEN, Hub, running_hub
from tests.export.made import made_drafter, names, same_state

REPO = "me/small-eagle3.1"
FILES = ["README.md", "SHA256SUMS", "config.json", "model.safetensors"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def exported(drafter_directory: Path, target_directory: Path, tmp_path: Path) -> Path:
    target = Target.load(target_directory)
    return export_drafter(
        load_drafter(drafter_directory, dtype=None), target, tmp_path / "served"
    ).directory


def push(directory: Path, *more: str, repo: str = REPO) -> int:
    return main(["push", "--drafter", str(directory), "--repo", repo, *more])


def uploaded(hub: Hub, repo: str = REPO, branch: str = "main") -> dict[str, bytes]:
    return {
        name: content
        for name, content in hub.repos[repo][branch].items()
        if name != ".gitattributes"
    }


def whole(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize("kind", ["drafter_directory", "exported"])
def test_every_byte_arrives_in_one_commit(
    kind: str, hub: Hub, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    directory: Path = request.getfixturevalue(kind)
    before = whole(directory)
    assert push(directory, "--private", "--license", "mit") == 0
    assert capsys.readouterr().out == f"{hub.url}/{REPO}\n"
    there = uploaded(hub)
    assert sorted(there) == sorted([*FILES, *(["specdec.json"] if kind == "exported" else [])])
    assert {name: content for name, content in there.items() if name != "README.md"} == {
        name: content for name, content in before.items() if name != "README.md"
    }
    assert (
        len(hub.commits) == 1 and hub.commits[0]["parentCommit"] == "0" * 40 and hub.private[REPO]
    )
    assert (
        f"me/{Path(REPO).name}" in there["README.md"].decode()
        and "mit" in there["README.md"].decode()
    )
    assert str(directory) not in ModelCard(there["README.md"].decode()).text
    assert whole(directory) == before


def test_what_does_not_belong_stays_here(drafter_directory: Path, hub: Hub) -> None:
    (drafter_directory / "checkpoints").mkdir()
    (drafter_directory / "checkpoints" / "last.ckpt").write_text("x")
    (drafter_directory / ".env").write_text("HF_TOKEN=x")
    (drafter_directory / "LICENSE").write_text("Apache")
    assert push(drafter_directory) == 0
    assert sorted(uploaded(hub)) == sorted(["LICENSE", *FILES])
    (drafter_directory / "token").write_text("x")
    assert push(drafter_directory, repo="me/other") == 2 and "me/other" not in hub.repos


def test_it_is_loaded_from_the_hub_and_checked(
    drafter_directory: Path,
    target_directory: Path,
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert push(drafter_directory) == 0 and push(drafter_directory, "--revision", "v1") == 0
    hub.repos[REPO]["main"]["README.md"] += b"edited on the Hub"
    assert same_state(load_drafter(REPO), load_drafter(drafter_directory)) and same_state(
        load_drafter(f"{REPO}@v1"), load_drafter(REPO)
    )
    FromDrafter(REPO).check()
    with pytest.raises(
        ValueError, match=r"model\.start: me/nowhere: no such directory, nor to be had"
    ):
        FromDrafter("me/nowhere").check()
    (code,) = re.findall(r"```python\n(.*?)```", uploaded(hub)["README.md"].decode(), re.DOTALL)
    exec(code, card := {})  # what the card says of its use
    assert card["made"].acceptance_length >= 1 and same_state(
        card["decoder"].drafter, load_drafter(REPO)
    )
    prompts = tmp_path / "p.txt"
    prompts.write_text("def add_3(a, b):\n")
    argv = [
        "evaluate",
        "--target",
        str(target_directory),
        "--drafter",
        REPO,
        "--prompts",
        str(prompts),
    ]
    argv += [
        "--shape",
        "chain:depth=2",
        "--max_new_tokens",
        "4",
        "--compile",
        "off",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(argv) == 0
    of = json.loads((tmp_path / "out" / "metrics.json").read_text())["drafter"]
    assert (of["directory"], of["label"]) == (REPO, Path(REPO).name)
    assert (
        of["weights_sha256"]
        == json.loads((drafter_directory / "config.json").read_text())["weights_sha256"]
    )
    config = located(REPO) / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ValueError, match=r"config\.json: its SHA-256 is not that in SHA256SUMS"):
        load_drafter(REPO)
    capsys.readouterr()
    for name, message in (
        (
            "me/nowhere",
            "me/nowhere: no such directory, nor to be had from the Hugging Face Hub: there is no such repository",
        ),
        (f"{REPO}@v2", "there is no such repository or revision"),
        ("nowhere", "no such drafter directory"),
    ):
        assert main([*argv[:4], name, *argv[5:-1], str(tmp_path / "new")]) == 2
        assert message in capsys.readouterr().err


def test_nothing_there_is_replaced_unasked(
    drafter_directory: Path,
    exported: Path,
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert push(exported) == 0
    assert push(exported) == 0  # the same once more
    before = uploaded(hub)
    target = Target.load(
        json.loads((drafter_directory / "config.json").read_text())["drafter"]["target"]["source"]
    )
    other = save_drafter(
        made_drafter(DrafterSpec(draft_vocab_size=200), target, seed=5), tmp_path / "other"
    )
    assert push(other) == 2
    error = capsys.readouterr().err
    assert (
        "holds other files than these, README.md, SHA256SUMS, config.json, model.safetensors, specdec.json"
        in error
    )
    assert uploaded(hub) == before
    assert push(other, "--overwrite", "true") == 0
    assert sorted(uploaded(hub)) == FILES  # no record of the export is left
    assert uploaded(hub)["model.safetensors"] == (other / "model.safetensors").read_bytes()
    hub.repos["me/quantised"] = {"main": {"model.gguf": b"x"}}
    hub.private["me/quantised"] = False
    assert push(other, repo="me/quantised") == 2 and "model.gguf" in capsys.readouterr().err
    assert push(other, "--private", "--overwrite", repo="me/quantised") == 2
    assert "there already and public" in capsys.readouterr().err
    assert push(other, "--overwrite", repo="me/quantised") == 0 and "model.gguf" in uploaded(
        hub, "me/quantised"
    )


def test_a_branch_of_its_own(
    drafter_directory: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(drafter_directory, "--revision", "v1") == 0
    assert capsys.readouterr().out == f"{hub.url}/{REPO}/tree/v1\n"
    assert sorted(uploaded(hub, branch="v1")) == FILES and uploaded(hub) == {}


def test_a_dry_run_prints_the_card_and_asks_nobody(
    drafter_directory: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere")
    assert push(drafter_directory, "--dry_run") == 0
    printed = capsys.readouterr().out
    assert ModelCard(printed).data.library_name == "specdec" and hub.asked == []
    assert all(name in caplog.text for name in FILES) and "--license NAME" in caplog.text
    (drafter_directory / "README.md").write_text(
        printed.replace(MARK, "").replace("## Limits", "## My limits")
    )
    assert push(drafter_directory, "--dry_run") == 0
    # one's own is kept
    assert capsys.readouterr().out == (drafter_directory / "README.md").read_text()
    assert push(drafter_directory, "--dry_run", "--license", "mit") == 2
    assert "your own card" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        (
            "GET",
            "/api/models/",
            401,
            "log in again with hf auth login, or set HF_TOKEN (status 401)",
        ),
        ("POST", "/api/repos/create", 403, "this token may not do that"),
        (
            "POST",
            "/preupload/",
            404,
            "there is no such repository or revision, or this token may not see it",
        ),
        ("POST", "/validate-yaml", 400, "Invalid metadata in README.md"),
        ("PUT", "/upload/", 403, "this token may not do that"),
        ("POST", "/commit/", 412, "it was changed meanwhile: try again"),
        ("POST", "/commit/", 0, "cannot be reached, or broke off"),
        ("GET", "/api/models/", 0, "cannot be reached, or broke off"),
    ],
)
def test_a_refusal_is_one_line_and_nothing_is_lost(
    method: str, path: str, status: int, message: str, drafter_directory: Path, hub: Hub,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    before = whole(drafter_directory)
    hub.fail = lambda asked, where: status if asked == method and path in where else None
    assert push(drafter_directory) == 2
    out, error = capfd.readouterr()
    assert message in error.splitlines()[-1] and error.splitlines()[-1].startswith(
        "specdec push: error: "
    )
    assert out == "" and "Traceback" not in error and TOKEN not in error + caplog.text
    assert whole(drafter_directory) == before and hub.commits == []
    assert REPO not in hub.repos or uploaded(hub) == {}
    hub.fail = lambda asked, where: None
    assert push(drafter_directory) == 0 and sorted(uploaded(hub)) == FILES  # as if nothing had been


def test_mistakes_are_told_before_the_hub_is_asked(
    drafter_directory: Path, exported: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refused(message: str, directory: Path = drafter_directory, repo: str = REPO) -> None:
        assert push(directory, repo=repo) == 2
        assert message in capsys.readouterr().err

    refused("no such drafter directory", tmp_path / "nowhere")
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    refused("config.json: no such file", tmp_path / "run")
    refused("me--you", repo="me/me--you")
    refused("as USER/small", repo="small")
    record = json.loads((exported / "specdec.json").read_text())
    (exported / "SHA256SUMS").unlink()
    (exported / "specdec.json").write_text(
        json.dumps({k: v for k, v in record.items() if k != "evaluations"})
    )
    refused("export it again", exported)
    for directory in (drafter_directory, exported):
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
        refused("SHA-256", directory)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "nowhere"))
    refused("hf auth login, or set HF_TOKEN")
    assert hub.asked == []


def test_a_runs_directory_pushes_its_drafter(
    drafter_directory: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    drafter_directory.rename(run / "drafter")
    assert push(run, "--dry_run", "true") == 0
    of_run = capsys.readouterr().out
    assert push(run / "drafter", "--dry_run", "true") == 0
    assert of_run == capsys.readouterr().out and "pipeline_tag" in of_run


def test_export_pushes_what_it_wrote(
    drafter_directory: Path,
    target_directory: Path,
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["export", "--drafter", str(drafter_directory), "--target", str(target_directory)]
    assert (
        main([*argv, "--out", str(tmp_path / "out"), "--push", "me"]) == 2
        and not (tmp_path / "out").exists()
    )
    assert main([*argv, "--out", str(tmp_path / "out"), "--push", REPO]) == 0
    line, url = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "out") in line and url == f"{hub.url}/{REPO}"
    there = uploaded(hub)
    assert there["specdec.json"] == (tmp_path / "out" / "specdec.json").read_bytes()
    assert line.replace(str(tmp_path / "out"), REPO) in there["README.md"].decode()
    back = [
        "import",
        "--checkpoint",
        REPO,
        "--target",
        str(target_directory),
        "--out",
        str(tmp_path / "back"),
    ]
    assert main(back) == 0 and same_state(
        load_drafter(tmp_path / "back"), load_drafter(drafter_directory)
    )
    hub.fail = lambda method, path: 403 if "create" in path else None
    assert main([*argv, "--out", str(tmp_path / "kept"), "--push", "them/x"]) == 2
    assert names(tmp_path / "kept") == names(tmp_path / "out")  # the export stays


@pytest.mark.slow
def test_the_real_command_asks_where_hf_endpoint_says(
    drafter_directory: Path, hub: Hub, tmp_path: Path
) -> None:
    environment: dict[str, Any] = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    argv = [
        sys.executable,
        "-m",
        "specdec",
        "push",
        "--drafter",
        str(drafter_directory),
        "--repo",
        REPO,
    ]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{hub.url}/{REPO}\n"), done.stderr
    assert (
        uploaded(hub)["model.safetensors"] == (drafter_directory / "model.safetensors").read_bytes()
    )
    assert TOKEN not in done.stderr
    hub.server.shutdown()
    hub.server.server_close()
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 2
        and "cannot be reached" in done.stderr
        and "Traceback" not in done.stderr
    )
