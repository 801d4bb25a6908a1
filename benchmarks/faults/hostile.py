"""Hostile directories and files, one for each thing that specdec reads, and what every command does with them.

An audit hook of the interpreter watches the command: a process that starts, an address that is contacted, code of the
hostile folder that is compiled or run, a module imported from anywhere but this environment, a file written outside
``--out``. The hostile files also leave a mark of their own when they run. The exit status does not matter.
"""

import importlib.util
import json
import os
import pickle
import random
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks import harness
from benchmarks.faults import world
from benchmarks.faults.command import PATIENCE, Command
from benchmarks.faults.world import World

STARTS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "pty.spawn",
    "os.startfile", "ctypes.dlopen",
)  # fmt: skip
CONTACTS = (
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
    "socket.bind",
    "urllib.Request",
)
# how many paths are changed; most events end with the open folders that these are relative to
CHANGES = {
    "os.rename": 2, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 1, "os.truncate": 1,
    "os.chmod": 1, "shutil.rmtree": 1, "shutil.move": 2,
}  # fmt: skip
PLACELESS = ("os.truncate", "shutil.rmtree", "shutil.move")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SECRET = "canary-5f1e9c"  # in the environment of every command; no file and no request may have it
# to find type stubs
OF_JSONARGPARSE = [sys.executable, "-c", "import sys, json; print(json.dumps(sys.path))"]
OWN_SCRIPTS = ("sandbox.py", "parquet_process.py")
# what provenance and libraries ask
KNOWN = ("git", "lscpu", "nvidia-smi", "uname", "ldconfig", "gcc", "cc")
CSV = "lightning.pytorch.loggers.CSVLogger"
PLACES = 40  # configs that name a place to write
SECRETS = 20  # commands that are given a secret
SECRET_WORDS = (
    "api_key", "apikey", "access_key", "secret_key", "secret", "auth", "bearer", "pwd", "password", "token",
    "access_token", "passphrase", "signature", "private_key", "client_secret", "credential",
)  # fmt: skip
MODULES_OF = {"logger": "loggers", "callbacks": "callbacks", "profiler": "profilers"}
WRITERS = (
    ("logger", "CSVLogger", ("save_dir", "name", "version")),
    ("logger", "TensorBoardLogger", ("save_dir", "name", "version", "sub_dir")),
    ("callbacks", "ModelCheckpoint", ("dirpath", "filename")),
    ("callbacks", "OnExceptionCheckpoint", ("dirpath", "filename")),
    ("profiler", "SimpleProfiler", ("dirpath", "filename")),
    ("profiler", "AdvancedProfiler", ("dirpath", "filename")),
)  # parts of Lightning, and their arguments that say where they write
MARK = "ran.txt"  # in the hostile folder
# whose processes are started on purpose, so that the mark alone says what ran
OF_WORKERS = "working folder, of Ray"
EVIL = f"""
import pathlib
(pathlib.Path(__file__).parent / {MARK!r}).write_text("a hostile module ran")
class Evil:
    def __init__(self, *args, **kwargs): pass
    @classmethod
    def from_pretrained(cls, *args, **kwargs): return cls()
"""
MODULES = (
    "modeling_evil", "configuration_evil", "tokenization_evil", "evil", "torch", "yaml", "peft", "kernels",
    "accelerate", "flash_attn", "bitsandbytes", "sitecustomize", "usercustomize", "conftest", "tiktoken",
    "sentencepiece", "vllm", "json",
)  # fmt: skip


@dataclass
class Count:
    """What was seen of one command and one hostile thing."""

    command: str
    what: str
    status: int | None = None
    started: int = 0
    contacted: int = 0
    imported: int = 0
    written: int = 0
    ran: bool = False
    told: bool = False  # the secret came out
    findings: list[str] = field(default_factory=list)


def is_own(words: list[Any]) -> bool:
    """Whether a process is one that specdec or jsonargparse starts by itself: the first checks templates and decodes
    tables within limits."""
    scripts = [
        [sys.executable, "-I", str(harness.ROOT / "specdec" / "data" / name)]
        for name in OWN_SCRIPTS
    ]
    return words == OF_JSONARGPARSE or words[:3] in scripts


class Watch:
    """The audit hook; ``roots`` are where code may come from, ``free`` where may be written."""

    def __init__(self, hostile: Path, free: Sequence[Path]) -> None:
        own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        self.roots = (
            *own,
            sys.base_prefix,
            str(harness.ROOT / "specdec"),
            str(harness.ROOT / "benchmarks"),
        )
        self.hostile, self.free = str(hostile), tuple(os.path.realpath(path) for path in free)
        self.seen: list[tuple[str, str]] = []
        self.known, self.on = set(sys.modules), True

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what is of interest; it must never raise."""
        if not self.on:
            return
        self.on = False  # what is done here is nobody's doing
        try:
            self._note(event, arguments)
        except (OSError, TypeError, ValueError, IndexError) as error:
            self.seen.append(("written", f"{event} {arguments}: not understood: {error!r}"))
        finally:
            self.on = True

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(STARTS):
            words = arguments[1] if event == "subprocess.Popen" else arguments
            name = os.path.basename(
                str(words[0] if isinstance(words, list | tuple) and words else arguments[0])
            )
            if event == "ctypes.dlopen":
                if arguments[0] and self._at(arguments[0]).startswith(self.hostile):
                    self.seen.append(("imported", f"library {arguments[0]}"))
            # what a fork's child starts, another event says
            elif event != "os.fork" and name not in KNOWN and not is_own(list(words)):
                self.seen.append(("started", f"{event} {str(words)[:160]}"))
        elif event in CONTACTS:
            if not (event == "socket.bind" or str(arguments[-1]).startswith("/")):
                self.seen.append(("contacted", f"{event} {str(arguments[1:])[:120]}"))
        elif event == "exec":
            file = getattr(arguments[0], "co_filename", "")
            if file.startswith(self.hostile):
                self.seen.append(("imported", file))
        elif event == "open":
            path, mode, flags = arguments
            writes = set(mode) & set("wax+") if isinstance(mode, str) else (flags or 0) & WRITING
            if writes and isinstance(path, str | bytes | os.PathLike):
                self._wrote(event, path)
        elif event in CHANGES:
            names, places = arguments[: (count := CHANGES[event])], arguments[-count:]
            for path, place in zip(names, places, strict=True):
                if isinstance(path, str | bytes | os.PathLike):
                    self._wrote(
                        event,
                        path,
                        place if isinstance(place, int) and event not in PLACELESS else -1,
                    )

    def _at(self, path: Any, place: int = -1) -> str:
        path = os.fsdecode(path)
        return os.path.realpath(
            os.path.join(os.readlink(f"/proc/self/fd/{place}"), path) if place >= 0 else path
        )

    def _wrote(self, event: str, path: Any, place: int = -1) -> None:
        at = self._at(path, place)
        if not at.startswith((*self.free, "/dev/", "/proc/")) and "__pycache__" not in at:
            self.seen.append(("written", f"{event} {at}"))

    def found(self) -> list[tuple[str, str]]:
        """All that was seen, and modules from elsewhere."""
        self.on = False
        for name in set(sys.modules) - self.known:
            file = getattr(sys.modules[name], "__file__", None)
            if file and not os.path.realpath(file).startswith(
                tuple(map(os.path.realpath, self.roots))
            ):
                self.seen.append(("imported", f"{name} of {file}"))
        return list(dict.fromkeys(self.seen))


def hugging_face_cache() -> Path:
    """Where transformers keeps what it fetches, modules of remote code too; these count as imported."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME)


# --- hostile things --------------------------------------------------------------------------------------------------


class Pickled:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo a pickle ran > {self.mark}",)


def planted(folder: Path, modules: Iterable[str] = MODULES) -> Path:
    """A folder with modules that leave a mark when they run, and a script that would."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in modules:
        (folder / f"{name}.py").write_text(EVIL)
    script = folder / "evil.sh"
    script.write_text(f"#!/bin/sh\necho a script ran > {folder / MARK}\n")
    script.chmod(0o755)
    return folder


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def targets(a: World, place: Path) -> dict[str, Path]:
    """Targets by what is hostile of them."""
    found = {}
    for name in ("auto_map", "auto_map of a repository", "pickle", "template", "kernels", "flash attention", "index",
                 "quantization", "adapter", "adapter alone", "unknown class"):  # fmt: skip
        folder = found[name] = planted(world.copied(a.target, place / name.replace(" ", "-")))
        config = folder / "config.json"
        if name.startswith("auto_map"):
            of = "evil/repository--" if "repository" in name else ""
            kinds = ("AutoModelForCausalLM", "AutoModel")
            _edit(config, model_type="evil", architectures=["Evil"], auto_map={
                "AutoConfig": f"{of}configuration_evil.Evil", **dict.fromkeys(kinds, f"{of}modeling_evil.Evil")
            })  # fmt: skip
            tokenizer = {
                "AutoTokenizer": [f"{of}tokenization_evil.Evil", f"{of}tokenization_evil.Evil"]
            }
            _edit(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=tokenizer)
        elif name == "pickle":
            (folder / "model.safetensors").unlink()
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled(folder / MARK)))
        elif name == "template":
            (folder / "chat_template.jinja").write_text(
                "{{ cycler.__init__.__globals__.os.system('echo a template ran > "
                + str(folder / MARK)
                + "') }}"
            )
        elif name == "kernels":
            _edit(config, _attn_implementation="evil/kernels", attn_implementation="evil/kernels")
        elif name == "flash attention":
            _edit(config, _attn_implementation="flash_attention_2")
        elif name == "index":
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors.index.json").write_text(json.dumps({
                "metadata": {}, "weight_map": {"model.embed_tokens.weight": "../../../../etc/passwd"},
            }))  # fmt: skip
        elif name == "quantization":
            _edit(
                config, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
            )
        elif name.startswith("adapter"):
            if "alone" in name:
                config.unlink()
            (folder / "adapter_config.json").write_text(
                json.dumps({"base_model_name_or_path": "evil/repository", "peft_type": "LORA", "auto_mapping": {
                    "base_model_class": "Evil", "parent_library": "evil"}})
            )  # fmt: skip
        else:
            _edit(config, architectures=["subprocess.Popen"], model_type="evil")
    return found


def drafters(a: World, place: Path) -> dict[str, Path]:
    """Drafters, which name their parts by import path."""
    found = {}
    for part in ("evil.Evil", "os.system", "subprocess.Popen"):
        for axis in ("fusion", "recurrence"):
            folder = found[f"{axis} {part}"] = planted(
                world.copied(a.drafter, place / f"{axis}-{part}")
            )
            about = json.loads((folder / "config.json").read_text())
            about["drafter"][axis] = (
                {"class_path": part, "init_args": {}} if axis == "fusion" else part
            )
            (folder / "config.json").write_text(json.dumps(about))
            (folder / "SHA256SUMS").unlink()
    link = found["a link out of it"] = planted(world.copied(a.drafter, place / "link"))
    (link / "model.safetensors").unlink()
    (link / "model.safetensors").symlink_to("/etc/passwd")
    return found


def checkpoints(a: World, place: Path) -> dict[str, Path]:
    """A published checkpoint as a pickle, a training checkpoint that runs code, one with modules beside it."""
    weights = planted(world.copied(a.export, place / "bin"))
    (weights / "model.safetensors").unlink()
    (weights / "SHA256SUMS").unlink()
    (weights / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled(weights / MARK)))
    mapped = planted(world.copied(a.export, place / "mapped"))
    (mapped / "SHA256SUMS").unlink()
    _edit(
        mapped / "config.json",
        auto_map={"AutoModel": "modeling_evil.Evil"},
        architectures=["evil.Evil"],
    )
    run = planted(world.copied(a.half, place / "run"))
    for file in run.glob("checkpoints/*.ckpt"):
        for path in [file] if file.is_file() else [one for one in file.rglob("*") if one.is_file()]:
            path.write_bytes(pickle.dumps(Pickled(run / MARK)))
    return {"import of a pickle": weights, "import with auto_map": mapped, "fit of a pickle": run}


def places(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Settings of a trainer by what is hostile of them: parts that write, and paths that lead out of the run."""
    draw = random.Random(f"{seed} places")
    ways = (str(folder / "elsewhere"), "../../elsewhere", "a/../../../elsewhere", "~/elsewhere", "$HOME/elsewhere",
            "${model.target.source}", "{step}/../../../elsewhere")  # fmt: skip
    settings = {}
    for number in range(count):
        group, name, keys = draw.choice(WRITERS)
        arguments = {"save_dir": "."} if group == "logger" else {}
        arguments |= {key: draw.choice(ways) for key in draw.sample(keys, draw.randint(1, 2))}
        part = {
            "class_path": f"lightning.pytorch.{MODULES_OF[group]}.{name}",
            "init_args": arguments,
        }
        settings[f"place {number} of {name}"] = {group: [part] if group == "callbacks" else part}
    return settings


def config_files(
    a: World, place: Path, target: Path, seed: int, share: float
) -> dict[str, tuple[str, Path]]:
    """YAML files by what is hostile of them: for which command, and where."""
    folder, given = planted(place), target
    evil = str(folder / "evil.sh")
    settings: dict[str, tuple[str, Any]] = {
        "trusts remote code": ("fit", {"model": {"target": {"source": str(given), "trust_remote_code": True}}}),
        "trusts it, to evaluate": ("evaluate", {"target": {"source": str(given), "trust_remote_code": True}}),
        "trusts it, to regenerate": ("regenerate", {"target": {"source": str(given), "trust_remote_code": True}}),
        "trusts it, to cache": ("cache", {"model": {"target": {"source": str(given), "trust_remote_code": True}}}),
        "trusts it, to check": ("doctor", {"model": {"target": {"source": str(given), "trust_remote_code": True}}}),
        "an executable, to serve": ("serve", {"vllm": evil}),
        "a host": ("serve", {"host": "0.0.0.0"}),
        "a repository": ("export", {"push": "evil/repository"}),
        "an executable, to check": ("parity", {"engine": "vllm", "vllm": evil, "vllm_args": [f"--x={evil}"]}),
        "a callback": ("fit", {"trainer": {"callbacks": [{"class_path": "evil.Evil"}]}}),
        "a process as callback": ("fit", {"trainer": {"callbacks": [
            {"class_path": "subprocess.Popen", "init_args": {"args": [evil]}}]}}),
        "a logger": ("fit", {"trainer": {"logger": {"class_path": "evil.Evil"}}}),
        "a loss": ("fit", {"model": {"loss": "evil.Evil"}}),
        "an optimizer": ("fit", {"model": {"optimizer": {"class_path": "os.system", "init_args": {"command": evil}}}}),
        "a plugin": ("fit", {"trainer": {"plugins": ["evil.Evil"]}}),
        "a profiler": ("fit", {"trainer": {"profiler": "evil.Evil"}}),
        "imports": ("fit", {"allow_imports": "evil"}),
        "data": ("fit", {"data": {"class_path": "evil.Evil"}}),
        "a URL and a key": ("regenerate", {"engine": "openai", "url": "http://127.0.0.1:9/", "key_variable": "CANARY"}),
        "a URL": ("regenerate", {"engine": "openai", "url": "http://127.0.0.1:9/"}),
        "a variable": ("fit", {"data": {"class_path": "TextData", "init_args": {
            "train": ["${oc.env:CANARY}"], "seq_len": 64}}}),
        "a variable in a name": ("fit", {"trainer": {"logger": {"class_path": CSV, "init_args": {
            "save_dir": ".", "name": "${oc.env:CANARY}"}}}}),
        "a place to write": ("fit", {"trainer": {"default_root_dir": str(folder / "elsewhere"), "logger": {
            "class_path": CSV, "init_args": {"save_dir": str(folder / "elsewhere")}}}}),
    }  # fmt: skip
    settings |= {
        name: ("fit", {"trainer": value})
        for name, value in places(folder, seed, round(PLACES * share)).items()
    }
    found = {}
    for name, (command, value) in settings.items():
        path = folder / f"{name.replace(' ', '-').replace(',', '')}.yaml"
        path.write_text(yaml.safe_dump(value))
        found[name] = (command, path)
    for name, text in (
        ("a tag", f"a: !!python/object/apply:os.system ['{evil}']\n"),
        ("a new object", "a: !!python/object/new:evil.Evil {}\n"),
        ("a module", "a: !!python/module:evil\n"),
    ):
        path = folder / f"{name.replace(' ', '-')}.yaml"
        path.write_text(text)
        found[name] = ("fit", path)
    return found


def studies(a: World, place: Path, target: Path) -> dict[str, list[str]]:
    """Study files and cards by what is hostile of them, as commands of sweep."""
    folder, out = planted(place), place.parent / "room" / "out"
    study = yaml.safe_load((a.folder / "study.yaml").read_text())
    trusts = {"model.target.source": str(target), "model.target.trust_remote_code": True}
    given = {
        "study that trusts code": study | {"set": study["set"] | trusts},
        "study with a callback": study
        | {"set": study["set"] | {"trainer.callbacks": [{"class_path": "evil.Evil"}]}},
        "study with a part": study | {"set": study["set"] | {"model.loss": "evil.Evil"}},
        "study with a variable": study
        | {"set": study["set"] | {"trainer.default_root_dir": "${oc.env:CANARY}"}},
        "study with a hostile target": study
        | {"set": study["set"] | {"model.target.source": str(target)}},
    }
    found = {}
    for name, value in given.items():
        path = folder / f"{name.replace(' ', '-')}.yaml"
        path.write_text(yaml.safe_dump(value))
        found[name] = ["sweep", str(path), "--allow_few_seeds", "--plan_only", "--out", str(out)]
    tagged = folder / "tagged.yaml"
    tagged.write_text(f"name: !!python/object/apply:os.system ['{folder / 'evil.sh'}']\n")
    found["study with a tag"] = ["sweep", str(tagged), "--plan_only", "--out", str(out)]
    if a.study.exists():
        card = json.loads((a.study / "card" / "card.json").read_text())
        arm, seeds = next(iter(card["manifest"]["runs"].items()))
        for one in seeds.values():
            one["fit"]["config"]["model"]["target"] |= {
                "source": str(target),
                "trust_remote_code": True,
            }
            if one["evaluate"]:
                one["evaluate"]["config"]["target"] = {
                    "source": str(target),
                    "trust_remote_code": True,
                }
        path = folder / "card.json"
        path.write_text(json.dumps(card))
        found["card that trusts code"] = ["sweep", str(path), "--reproduce", arm, "--out", str(out)]
        swept = planted(world.copied(a.study, place / "swept"))
        for name in ("plan.json", "study.yaml"):
            (swept / name).write_text(
                (swept / name).read_text().replace(str(a.target), str(target))
            )
        found["sweep's directory"] = ["sweep", str(swept), "--card_only"]
    return found


def secrets(a: World, out: Path, seed: int, count: int) -> dict[str, list[str]]:
    """Commands that are given a secret in an address: it must not come out."""
    draw = random.Random(f"{seed} secrets")
    found = {}
    for number in range(count):
        name = draw.choice(SECRET_WORDS)
        if draw.random() < 0.5:
            name = draw.choice(["my_", "AWS-", "x_"]) + name
        address = draw.choice([
            f"https://host/path?{name}={SECRET}", f"https://host/?a=1&{name}={SECRET}&b=2",
            f"https://me:{SECRET}@host/x",
            f"https://host/#{name}={SECRET}", f"s3://bucket/key?b=2;{name}={SECRET}",
        ])  # fmt: skip
        command, option = draw.choice([
            (a.evaluate(out), "target.revision"), (a.fit(out, "--trainer.max_steps", "1"), "model.target.revision"),
            (a.regenerate(out / "own.jsonl"), "target.revision"),
            (["cache", *a.model_and_data(), "--out", str(out)], "model.target.revision"),
        ])  # fmt: skip
        found[f"secret {number}, {name} of {command[0]}"] = [*command, f"--{option}={address}"]
    return found


def attempts(
    a: World, place: Path, seed: int = 0, share: float = 1
) -> list[tuple[str, list[str], Path]]:
    """All of them: what is hostile, a command that reads it, and the folder in which it stands."""
    out = place / "room" / "out"
    found: list[tuple[str, list[str], Path]] = []
    whole = targets(a, place / "targets")
    for name, folder in whole.items():
        for command in (
            a.evaluate(out, target=folder), a.regenerate(out / "own.jsonl", target=folder),
            ["doctor", *a.model_and_data(folder), "--only", "masks"],
            ["export", *a.pair(folder), "--out", str(out)],
            a.imported(out, target=folder),
            [str(folder) if word == str(a.target) else word for word in a.fit(out, "--trainer.max_steps", "1")],
        ):  # fmt: skip
            found.append((f"target, {name}", command, folder))
    for name, folder in drafters(a, place / "drafters").items():
        found += [
            (f"drafter, {name}", ["export", *a.pair(drafter=folder), "--out", str(out)], folder),
            (f"drafter, {name}", [*a.evaluate(out), "--drafter", str(folder)], folder),
            (
                f"drafter, {name}",
                ["push", "--drafter", str(folder), "--repo", "a/b", "--dry_run"],
                folder,
            ),
        ]
    for name, folder in checkpoints(a, place / "checkpoints").items():
        command = a.fit(folder) if name.startswith("fit") else a.imported(out, folder)
        found.append((f"checkpoint, {name}", command, folder))
    for name, (command, path) in config_files(
        a, place / "configs", whole["auto_map"], seed, max(1, share)
    ).items():
        base = {
            "fit": a.fit(out, "--trainer.max_steps", "1"), "evaluate": a.evaluate(out),
            "regenerate": a.regenerate(out / "own.jsonl"), "serve": ["serve", *a.pair()],
            "export": ["export", *a.pair(), "--out", str(out)],
            "cache": ["cache", *a.model_and_data(), "--out", str(out)],
            "doctor": ["doctor", *a.model_and_data(), "--only", "masks"], "parity": ["parity", *a.pair()],
        }[command]  # fmt: skip
        try:
            given = yaml.safe_load(path.read_text())
        except yaml.YAMLError:  # a tag
            given = {}
        keys = [
            f"{one}.{two}" if one in ("model", "trainer") else one
            for one in given
            for two in given[one]
        ]
        base = world.without(base, *keys)
        found.append((f"config, {name}", [*base, "--config", str(path)], path.parent))
    for name, words in secrets(a, out, seed, round(SECRETS * max(1, share))).items():
        found.append((name, words, planted(place / "secrets")))
    for name, words in studies(a, place / "studies", whole["auto_map"]).items():
        found.append((name, words, place / "studies"))
    if importlib.util.find_spec("ray"):
        # a file for every module that any command has loaded
        loaded = {name.partition(".")[0] for name in sys.modules} | {"cloudpickle", "colorama"}
        folder = planted(place / "workers", loaded)
        features = ("--model.features", "Streamed", "--trainer.max_steps", "1")
        found.append((OF_WORKERS, a.fit(out, *features), folder))
        found.append((OF_WORKERS, a.sweep(out, "--engine", "Ray"), folder))
    return found


def campaign(a: World, place: Path, share: float, seed: int = 0) -> list[Count]:
    """Every hostile thing before every command that reads it; ``share`` of them, evenly taken."""
    place.mkdir(parents=True, exist_ok=True)
    all_of_them = attempts(a, place, seed, share)
    step = max(1, round(1 / share))
    counts = []
    for number, (what, argv, folder) in enumerate(all_of_them[::step]):
        counts.append(_watched(a, what, argv, folder, place))
        if number % 20 == 19:
            bad = sum(bool(one.findings) for one in counts)
            harness.tell(f"hostile: {number + 1} of {len(all_of_them[::step])}, {bad} findings")
    return counts


def _watched(a: World, what: str, argv: list[str], folder: Path, place: Path) -> Count:
    # --out, with what is staged beside it
    room, cache, mark = place / "room", place / "cache", folder / MARK
    # a run that is gone on with is its own --out
    own = [folder] if what.startswith("checkpoint, fit") else []
    if "--card_only" in argv:
        own = [Path(argv[1])]
    for path in (room, cache):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    mark.unlink(missing_ok=True)

    def inside() -> Callable[[], Any]:
        from transformers import modeling_utils

        os.environ.update(CANARY=SECRET, TMPDIR=str(cache), XDG_CACHE_HOME=str(cache))
        tempfile.tempdir = str(cache)
        watch = Watch(folder, [room, cache, hugging_face_cache(), *own])
        # as where that package is installed, by which transformers fetches code of the Hub
        kernels = {
            "is_kernels_available": lambda: True,
            "lazy_import_flash_attention": lambda name, **_: watch.seen.append(
                ("contacted", f"kernel {name}")
            ),
        }
        vars(modeling_utils).update(kernels)
        sys.addaudithook(watch)
        return watch.found

    limit = PATIENCE if what == OF_WORKERS else PATIENCE / 3
    ended = Command(argv, cwd=folder, inside=inside).wait(limit)
    count = Count(argv[0], what, ended.status)
    for kind, text in [] if what == OF_WORKERS else ended.told or []:
        setattr(count, kind, getattr(count, kind) + 1)
        count.findings.append(f"{kind}: {text}")
    count.ran = mark.exists()
    if count.ran:
        count.findings.append(f"ran: {mark.read_text().strip()}")
    texts = [path for path in room.rglob("*") if path.is_file()]
    where = [
        str(path) for path in texts if SECRET in str(path) or SECRET.encode() in path.read_bytes()
    ]
    where += ["standard streams"] if SECRET in ended.err + ended.out else []
    count.told = bool(where)
    if where:
        count.findings.append(f"told: a variable's value is in {', '.join(where[:4])}")
    if ended.told is None:
        count.findings.append(f"not watched to its end: status {ended.status}: {ended.last}")
    if what == OF_WORKERS and ended.status != 0:
        count.findings.append(f"not tried: status {ended.status}: {ended.last}")
    return count


def table(counts: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: by what is hostile."""
    names = ("started", "contacted", "imported", "written", "ran", "told")
    columns = ["hostile", "commands", "processes started", "addresses contacted", "modules imported",
               "written elsewhere", "code run", "secrets told"]  # fmt: skip
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in counts:
        groups.setdefault(one["what"].split(",")[0].split(" ")[0].removesuffix("'s"), []).append(
            one
        )
    groups["all"] = list(counts)
    rows = [
        [group, str(len(ones)), *(str(sum(one[name] for one in ones)) for name in names)]
        for group, ones in groups.items()
    ]
    return harness.table(columns, rows)
