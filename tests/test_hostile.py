"""A stranger's config, study, card and target: no process starts, no code of theirs runs, no socket is opened."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.utils.vllm import VARIABLE

# provenance, platform and torch ask after the machine, export asks the Python that the user named for its vLLM
OURS = (
    "('git', ['git',",
    "('uname', ['uname',",
    f"('{sys.executable}', ['{sys.executable}', '-c', 'import sys, json;",
    *(f"('{python}', " for name, python in os.environ.items() if name == VARIABLE),
)
CODE = "from pathlib import Path\nPath({!r}).touch()\n"
WATCHED = """
import json, sys
seen = []
def look(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect",
                 "socket.bind", "socket.getaddrinfo", "pickle.find_class", "webbrowser.open"):
        seen.append([event, repr(args[:2])[:200]])
    elif event == "import" and str(args[0]).split(".")[0] in ("evil", "planted", "wandb", "mlflow"):
        seen.append([event, args[0]])
sys.addaudithook(look)
from specdec.cli import main
for name, argv in json.load(open(sys.argv[1])):
    seen.clear()
    try:
        status = main(argv)
    except BaseException as error:
        status = repr(error)
    print("ENDED", json.dumps([name, status, seen]), flush=True)
"""


class Pickled:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.mark),)


@pytest.fixture
def folder(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> Path:
    """A target whose directory brings code, a pickle, and a script, all of which leave ``ran`` if they run."""
    folder = tmp_path / "stranger"
    shutil.copytree(target_directory, folder / "target")
    shutil.copytree(drafter_directory, folder / "drafter")
    config = json.loads((folder / "target" / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": "evil.T",
    }
    (folder / "target" / "config.json").write_text(json.dumps(config))
    names = "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as T\n"
    (folder / "target" / "evil.py").write_text(CODE.format(str(folder / "ran")) + names)
    (folder / "planted.py").write_text(CODE.format(str(folder / "ran")))
    (folder / "evil.ckpt").write_bytes(pickle.dumps({"state_dict": Pickled(folder / "ran")}))
    (folder / "evil.sh").write_text(f"#!/bin/sh\ntouch {folder / 'ran'}\n")
    (folder / "evil.sh").chmod(0o755)
    (folder / "prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    return folder


def hostile_fits(folder: Path) -> dict[str, tuple[Any, str]]:
    """Configs of ``specdec fit`` that would run or reach something, with what the refusal says."""
    target, code = str(folder / "target"), {"trust_remote_code": True}
    (folder / "part.yaml").write_text(yaml.safe_dump({"source": target, **code}))
    loads = {"checkpoint_path": str(folder / "evil.ckpt"), "weights_only": False}
    function = "lightning.pytorch.core.saving._load_from_checkpoint"
    loaded = {
        "class_path": function,
        "init_args": {"cls": "lightning.pytorch.LightningModule", **loads},
    }
    callback = {
        "class_path": "lightning.pytorch.callbacks.LambdaCallback",
        "init_args": {"on_fit_start": loaded},
    }
    skeleton = {
        "class_path": "specdec.target.loading.skeleton",
        "init_args": {"source": target, "revision": None},
    }
    logger = {"class_path": "lightning.pytorch.loggers.MLFlowLogger"}
    keeps = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": "ftp://127.0.0.1/x"},
    }
    module = {
        "class_path": "specdec.training.module.DrafterModule.load_from_checkpoint",
        "init_args": loads,
    }
    return {
        "mapping": ({"model": {"target": {"source": target, **code}}}, "--allow_keys trust_remote_code"),
        "dotted": ({"model.target.trust_remote_code": True}, "--allow_keys trust_remote_code"),
        "plus": ({"model": {"target": {"trust_remote_code+": True}}}, "--allow_keys trust_remote_code"),
        "reference": ({"trainer": {"fast_dev_run": True}, "model": {"target": {"trust_remote_code":
                      "${trainer.fast_dev_run}"}}}, "--allow_keys trust_remote_code"),
        "text": ({"model": {"target": f"{{source: {target}, trust_remote_code: true}}"}}, "from the command line"),
        "file": ({"model": {"target": "part.yaml"}}, "taken from the command line"),
        "made": ({"model": {"target": f"${{oc.create:'{{source: {target}, trust_remote_code: true}}'}}"}}, "oc.create"),
        "pickle": ({"trainer": {"callbacks": [callback]}}, "is a function"),
        "module": ({"model": {"optimizer": module}}, "is a function"),
        "skeleton": ({"model": {"optimizer": skeleton}}, "is a function"),
        "class": ({"model": {"loss": {"class_path": "planted.Loss"}}}, "--allow_imports planted"),
        "reports": ({"trainer": {"logger": logger}}, "--allow_keys logger"),
        "short": ({"trainer": {"logger": ["WandbLogger"]}}, "--allow_keys logger"),
        "address": ({"trainer": {"callbacks": keeps}}, "--allow_keys dirpath"),
        "variable": ({"model": {"target": {"source": "${oc.env:DB_PASSWD}"}}}, "environment"),
        "plain variable": ({"model": {"target": {"source": "${oc.env:PRIVATE_NAME}"}}}, "--allow_env PRIVATE_NAME"),
        "nested": ({"seed_everything": 1, "model": {"target": {"revision": "PRIVATE", "source":
                   "${oc.env:${model.target.revision}_NAME}"}}}, "--allow_env PRIVATE_NAME"),
    }  # fmt: skip


def watched(
    folder: Path, commands: list[tuple[str, list[str]]]
) -> tuple[dict[str, tuple[Any, list[Any]]], str]:
    """Run commands one after another in one process; by name the exit status and what was seen, and all output."""
    (folder / "commands.json").write_text(json.dumps(commands))
    (folder / "watch.py").write_text(WATCHED)
    environment = {
        "PRIVATE_NAME": "a-private-value",
        "DB_PASSWD": "a-private-value",
        "VLLM_API_KEY": "a-private-value",
    }
    done = subprocess.run(
        [sys.executable, "watch.py", "commands.json"], cwd=folder, capture_output=True, text=True, timeout=600,
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[1])}, check=False,
    )  # fmt: skip
    lines: list[tuple[str, Any, list[Any]]]
    lines = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    assert len(lines) == len(commands), done.stderr
    theirs = {
        name: [each for each in seen if not each[1].startswith(OURS)] for name, _, seen in lines
    }
    return {name: (status, theirs[name]) for name, status, _ in lines}, done.stdout + done.stderr


@pytest.mark.slow
def test_configs_studies_cards_and_checkpoints_run_nothing(folder: Path) -> None:
    target = str(folder / "target")
    trust, url = {"target": {"source": target, "trust_remote_code": True}}, "http://127.0.0.1:9"
    commands: list[tuple[str, list[str]]] = []
    expected: dict[str, str] = {}

    def hostile(name: str, says: str, config: Any, *argv: str) -> None:
        path = folder / f"{len(commands)}.yaml"
        path.write_text(yaml.safe_dump(config))
        commands.append((name, [word.replace("FILE", str(path)) for word in argv]))
        expected[name] = says

    for name, (config, says) in hostile_fits(folder).items():
        hostile(
            f"fit {name}",
            says,
            {"data": "EmbeddedData"} | config,
            "fit",
            "--config",
            "FILE",
            "--out",
            "run",
        )
    given = ("--drafter", str(folder / "drafter"), "--prompts", str(folder / "prompts.jsonl"))
    hostile(
        "evaluate", "trust_remote_code", trust, "evaluate", "--config", "FILE", *given, "--out", "e"
    )
    hostile(
        "export", "trust_remote_code", trust, "export", "--config", "FILE", *given[:2], "--out", "x"
    )
    vllm = str(folder / "evil.sh")
    hostile("serve", "--allow_keys vllm", {"vllm": vllm}, "serve", "--config", "FILE", *given[:2])
    hostile(
        "serve args",
        "--allow_keys vllm_args",
        {"vllm_args": ["--trust-remote-code"]},
        "serve",
        "--config",
        "FILE",
        *given[:2],
    )
    asks = {
        "url": url,
        "engine": "openai",
        "data": [str(folder / "prompts.jsonl")],
        "out": "o.jsonl",
    }
    hostile("regenerate", "--allow_keys url", asks, "regenerate", "--config", "FILE")
    rows = ("--data", str(folder / "prompts.jsonl"), "--out", "o.jsonl")
    hostile(
        "regenerate target", "trust_remote_code", trust, "regenerate", "--config", "FILE", *rows
    )
    engine = {"engine": {"class_path": "Ray", "init_args": {"address": "127.0.0.1:6379"}}}
    (folder / "s.yaml").write_text(yaml.safe_dump({"name": "s"}))
    hostile("sweep config", "--allow_keys address", engine, "sweep", "s.yaml", "--config", "FILE")
    axes = {"K": {"model.ttt_steps": [1, 2]}}
    for name, study in {
        "set": {"set": {"model.target.source": target, "model.target.trust_remote_code": True}},
        "mapping": {"set": {"model.target": {"source": target, "trust_remote_code": True}}},
        "file": {"fit": "part_of_model.yaml"},
        "level": {"axes": {"a": {"x": {}, "y": {"model.target.trust_remote_code": True}}}},
        "measure": {"evaluate": {"target.trust_remote_code": True}},
    }.items():
        whole = {
            "name": "s",
            "axes": axes,
            "set": {"data": "EmbeddedData", "trainer.max_steps": 1},
        } | study
        hostile(f"sweep {name}", "trust_remote_code", whole, "sweep", "FILE", "--plan_only")
    (folder / "part_of_model.yaml").write_text(yaml.safe_dump({"model": trust}))
    entry = {
        "fit": {
            "config": {"model": trust},
            "provenance": {},
            "losses": "eNoDAAAAAAE=",
            "weights_sha256": "0",
        }
    }
    card = {"version": 4, "manifest": {"runs": {"a": {"0": entry}}}}
    hostile("reproduce", "trust_remote_code", card, "sweep", str(folder / "card.json"), "--reproduce", "a", "--out",
            "r")  # fmt: skip
    (folder / "card.json").write_text(json.dumps(card))
    found, text = watched(folder, commands)
    assert {name: status for name, (status, _) in found.items() if status != 2} == {}
    assert {name: seen for name, (_, seen) in found.items() if seen} == {}, text
    assert not list(folder.rglob("ran")) and "a-private-value" not in text
    errors = [line for line in text.splitlines() if ": error: " in line]
    assert len(errors) == len(commands)
    answers = zip(expected.items(), errors, strict=True)
    assert {name: error for (name, says), error in answers if says not in error} == {}
    assert not [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name in ("config.yaml", "DONE.json")
    ]


@pytest.mark.slow
def test_a_targets_own_code_stays_asleep_until_it_is_allowed(folder: Path, text_file: Path) -> None:
    target, drafter, prompts = (
        str(folder / name) for name in ("target", "drafter", "prompts.jsonl")
    )
    given = ["--target", target, "--drafter", drafter]
    fit = [
        "--model.target.source",
        target,
        "--data",
        "TextData",
        "--data.train",
        str(text_file),
        "--data.val",
        str(text_file),
    ]
    evaluate = [
        "evaluate",
        *given,
        "--prompts",
        prompts,
        "--max_new_tokens",
        "2",
        "--compile",
        "false",
        "--other_target",
        "true",
    ]
    commands = [
        ("evaluate", [*evaluate, "--out", "e"]),
        ("export", ["export", *given, "--out", "x"]),
        ("fit", ["fit", *fit, "--data.seq_len", "32", "--trainer.max_steps", "1", "--trainer.logger", "false",
                 "--model.drafter.draft_vocab_size", "64", "--out", "f"]),
        ("regenerate", ["regenerate", "--target", target, "--data", prompts, "--out", "o.jsonl"]),
        ("serve", ["serve", *given, "--vllm", "/nowhere"]),
        ("allowed", [*evaluate, "--target.trust_remote_code", "true", "--out", "t"]),
    ]  # fmt: skip
    found, text = watched(folder, commands[:-1])
    assert {name: seen for name, (_, seen) in found.items() if seen} == {}, text
    assert not list(folder.rglob("ran"))
    assert [found[name][0] for name in ("evaluate", "export", "fit")] == [0, 0, 0], text
    watched(folder, commands[-1:])  # which shows that the trap works
    assert (folder / "ran").exists()
