"""``specdec serve`` from the command line."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.serving.server import free_port
from tests.serving.conftest import alive


@pytest.fixture
def argv(fake: str, target_directory: Path, drafter_directory: Path) -> list[str]:
    port = str(free_port())
    return [
        *("serve", "--target", str(target_directory), "--drafter", str(drafter_directory)),
        *("--vllm", fake, "--port", port, "--timeout", "20"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_it_is_asked_to_end(
    argv: list[str],
    number: int,
    end: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out: list[str] = []

    def up() -> bool:
        out.append(capsys.readouterr().out)
        return "http" in "".join(out)

    end(up, number)
    assert main([*argv, "--draft_tokens", "4", "--log", str(tmp_path / "log"), "--", "--dtype", "float32"]) == 0
    port = argv[argv.index("--port") + 1]
    assert "".join(out) == f"http://127.0.0.1:{port}\n"
    said = json.loads((tmp_path / "said").read_text())
    target = argv[argv.index("--target") + 1]
    words = said["argv"]
    speculative = json.loads(words[3])
    assert words[:3] == ["serve", target, "--speculative-config"]
    assert words[4:] == ["--host", "127.0.0.1", "--port", port, "--dtype", "float32"]
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle3", 4)
    assert said["drafter"] == ["README.md", "SHA256SUMS", "config.json", "model.safetensors", "specdec.json"]
    assert not Path(speculative["model"]).exists()  # it was made for this server
    assert not any(map(alive, said["pids"]))
    assert (tmp_path / "log").read_text().startswith("fake vLLM starts")


def test_stopped_before_it_served(
    argv: list[str], end: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "never")
    end((tmp_path / "said").exists, signal.SIGINT)
    assert main(argv) == 130
    assert not any(map(alive, json.loads((tmp_path / "said").read_text())["pids"]))


def test_a_failed_start_shows_the_log(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "crash")
    assert main(argv) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-3:-1] == ["  fake vLLM starts", "  RuntimeError: the engine did not start"]
    assert err[-1].startswith("specdec serve: error: ") and "status 3" in err[-1]


def test_a_fall_has_a_status_of_its_own(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "fall")
    assert main(argv) == 1
    found = capsys.readouterr()
    assert found.out.startswith("http") and "error: vLLM ended by itself with status 4" in found.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--", "--speculative-config", "{}"], "--speculative-config after -- is not passed on"),
        (["--", "--port=1"], "--port=1 after --"),
        (["--", "--speculative_config.method", "eagle"], "--speculative_config.method after --"),
        (["--draft_tokens", "0"], "draft_tokens must be at least 1"),
        (["--timeout", "0"], "timeout must be above 0"),
        (["--drafter", "nowhere"], "no such drafter directory"),
        (["--vllm", "nowhere"], "no such executable"),
        (["--colour", "red"], "colour"),
    ],
)
def test_mistakes_are_one_line(
    more: list[str], message: str, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, *more]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]
    assert not (tmp_path / "said").exists()
