"""What the campaign does things to: a tiny target, and of every kind of artefact one that was made from it."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from benchmarks import harness
from benchmarks.faults.command import Command, finish
from specdec.utils.files import write_text
from specdec.utils.reading import sha256

STEPS, EVERY = 24, 4  # of a run; steps between checkpoints
# what is learnt
TEXTS = [harness.ROOT / "specdec" / "nn" / name for name in ("view.py", "cache.py")]
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
CHATS, PROMPTS, TOKENS = 12, 3, 8
SHAPE = ("--shape", "chain:depth=3", "--compile", "false")

Made = Mapping[str, str]  # what a command made, each part by name as a hash or a short text


@dataclass(frozen=True)
class World:
    """A folder of artefacts, which nothing changes once they are made: what is done is done to copies."""

    folder: Path

    def __getattr__(self, name: str) -> Path:
        """``target``, ``run``, ``half`` (a killed run), ``features``, ``export``, ``one`` and ``two`` (evaluations),
        ``answers`` (what regenerate wrote), ``tokens`` (the cache of the run) and ``study``, by attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self.folder / name

    @property
    def drafter(self) -> Path:
        """Of the finished run."""
        return self.run / "drafter"

    @property
    def chats(self) -> Path:
        """Conversations."""
        return self.folder / "chats.jsonl"

    @property
    def prompts(self) -> Path:
        """Plain prompts."""
        return self.folder / "prompts.jsonl"

    def model_and_data(self, target: Path | None = None) -> list[str]:
        """The options that ``fit``, ``cache``, ``doctor`` and ``plan`` share."""
        return [
            "--model.target.source", str(target or self.target), "--model.ttt_steps", "3",
            "--model.optimizer.lr", "0.01", "--data", "TextData",
            "--data.train", json.dumps([str(path) for path in TEXTS]), "--data.seq_len", "64",
            "--data.batch_size", "2",
        ]  # fmt: skip

    def fit(self, out: Path, *more: str) -> list[str]:
        """Begins a run or goes on with it, every loss written at its step."""
        return [
            "fit", *self.model_and_data(), "--trainer.accelerator", "cpu", "--trainer.logger", "false",
            "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false",
            "--trainer.num_sanity_val_steps", "0", "--trainer.limit_val_batches", "0",
            "--trainer.log_every_n_steps", "1", "--trainer.max_steps", str(STEPS),
            "--checkpoint.every_n_train_steps", str(EVERY), *more, "--out", str(out), "--ckpt_path", "auto",
        ]  # fmt: skip

    def cached(self, features: Path | None = None) -> tuple[str, ...]:
        """Further options of a run on stored features."""
        return (
            "--model.features",
            "Cached",
            "--model.features.directory",
            str(features or self.features),
        )

    def pair(self, target: Path | None = None, drafter: Path | None = None) -> list[str]:
        """The options that name a target and a drafter."""
        return ["--target", str(target or self.target), "--drafter", str(drafter or self.drafter)]

    def imported(
        self, out: Path, checkpoint: Path | None = None, target: Path | None = None
    ) -> list[str]:
        """Reads an export back."""
        source = ["--checkpoint", str(checkpoint or self.export)]
        return ["import", *source, "--target", str(target or self.target), "--out", str(out)]

    def reading(self, folder: Path, out: Path) -> dict[str, list[str]]:
        """The command that reads a folder, by what the folder is."""
        return {
            "drafter": ["export", *self.pair(drafter=folder), "--out", str(out)],
            "target": self.evaluate(out, target=folder),
            "export": self.imported(out, folder),
            "evaluation": ["compare", str(folder), str(self.two)],
            "features": self.fit(out, *self.cached(folder)),
        }

    def evaluate(
        self, out: Path, target: Path | None = None, prompts: Path | None = None
    ) -> list[str]:
        """Decodes the prompts in a chain."""
        words = [
            "--prompts",
            str(prompts or self.prompts),
            "--max_new_tokens",
            str(TOKENS),
            *SHAPE,
            "--out",
            str(out),
        ]
        return ["evaluate", *self.pair(target), *words]

    def regenerate(
        self, out: Path, *more: str, target: Path | None = None, chats: Path | None = None
    ) -> list[str]:
        """Answers the conversations."""
        words = [
            "--data",
            str(chats or self.chats),
            "--max_new_tokens",
            "16",
            "--truncated",
            "keep",
        ]
        return [
            "regenerate",
            "--target",
            str(target or self.target),
            *words,
            *more,
            "--out",
            str(out),
        ]

    def sweep(self, out: Path, *more: str) -> list[str]:
        """Two arms of one seed."""
        return [
            "sweep",
            str(self.folder / "study.yaml"),
            "--allow_few_seeds",
            *more,
            "--out",
            str(out),
        ]

    def make(self, study: bool) -> None:
        """Make everything; ValueError if a command fails.

        Args:
            study: its sweep too, which takes a minute.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Command(
            ["--version"], cwd=self.folder, inside=lambda: lambda: make_target(self.target)
        ).wait()
        if made.status or not (self.target / "config.json").exists():
            raise ValueError(f"the target could not be made: {made.err[-2000:]}")
        rows = [{"id": f"chat-{n}", "messages": _said(n)} for n in range(CHATS)]
        write_text(self.chats, "".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"prompt_id": str(n), "prompt": f"def view_{n}(self, x):"} for n in range(PROMPTS)]
        write_text(self.prompts, "".join(json.dumps(row) + "\n" for row in rows))
        settings = self.fit(Path("out"))
        given = dict(zip(settings[1::2], settings[2::2], strict=True))
        common = {name.removeprefix("--"): yaml.safe_load(value) for name, value in given.items()}
        for name in ("out", "ckpt_path", "model.ttt_steps"):
            del common[name]
        write_text(self.folder / "study.yaml", yaml.safe_dump({
            "name": "tiny", "set": common, "axes": {"K": {"model.ttt_steps": [1, 2]}}, "seeds": [0],
            "features": "on_the_fly",
            "evaluate": {"prompts": [str(self.prompts)], "max_new_tokens": TOKENS, "shape": ["chain:depth=2"],
                         "compile": False},
        }, sort_keys=False))  # fmt: skip
        with own_cache(self.tokens):
            finish(self.fit(self.run), self.folder)
        half = Command(self.fit(self.half), cwd=self.folder)
        half.until(lambda: len(losses(self.half)) > STEPS // 2)
        half.kill(signal.SIGKILL)
        if half.wait().status != -signal.SIGKILL:
            raise ValueError(f"no run could be killed half-way: {half.wait().err[-2000:]}")
        finish(["cache", *self.model_and_data(), "--out", self.features], self.folder)
        finish(["export", *self.pair(), "--out", self.export], self.folder)
        for out in (self.one, self.two):
            finish(self.evaluate(out), self.folder)
        self.answers.mkdir()
        finish(self.regenerate(self.answers / "own.jsonl"), self.folder)
        if study:
            finish(self.sweep(self.study), self.folder)


@contextlib.contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Inside, commands keep tokens and rows in this folder."""
    os.environ["SPECDEC_CACHE"] = str(folder)
    try:
        yield
    finally:
        del os.environ["SPECDEC_CACHE"]


def _said(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is view {number}?"},
        {"role": "assistant", "content": "A view."},
    ]


def make_target(folder: Path) -> None:
    """A random seven-layer Llama of width 32 whose tokens are bytes, with spread logits and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)


# --- what commands have made -----------------------------------------------------------------------------------------


def losses(run: Path) -> list[str]:
    """The whole lines of a run's losses, none yet where there is no file."""
    path = run / "losses.txt"
    return path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []


def of_fit(run: Path) -> Made:
    """Every step's loss, and the weights."""
    return {
        "losses.txt": "\n".join(losses(run)),
        "weights": sha256(run / "drafter" / "model.safetensors"),
    }


def of_record(run: Path) -> Made:
    """The same, and which files say what the run was."""
    names = sorted(path.name for path in run.iterdir() if path.suffix in (".yaml", ".json"))
    # those of a run that was resumed have a number
    return {**of_fit(run), "record": " ".join(name for name in names if name.count(".") == 1)}


def of_files(*names: str) -> Callable[[Path], Made]:
    """The bytes of a folder's files of these patterns."""
    return lambda folder: {
        str(path.relative_to(folder)): sha256(path)
        for name in names
        for path in sorted(folder.glob(name))
    }


def of_evaluation(folder: Path) -> Made:
    """What was accepted; times differ from run to run."""
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    kept = [
        {name: row.get(name) for name in ("shape", "prompt_id", "tokens", "accepted", "drafted")}
        for row in rows
    ]
    return {"answers.jsonl": _hash(kept)}


def of_study(folder: Path) -> Made:
    """All its runs and evaluations."""
    found: dict[str, str] = {}
    for made, which in ((of_fit, "fits/*"), (of_evaluation, "measures/*")):
        for path in sorted(folder.glob(which)):
            found |= {
                f"{path.relative_to(folder)}/{name}": value for name, value in made(path).items()
            }
    return found


def of_card(folder: Path) -> Made:
    """What a study's card says, without when and where that was found out."""
    card = json.loads((folder / "card" / "card.json").read_text())
    return {"card.json": _hash(_timeless(card))}


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        left = ("provenance", "date", "seconds", "plan_provenance", "attempts")
        return {name: _timeless(one) for name, one in value.items() if name not in left}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def left_over(folder: Path) -> list[str]:
    """Temporary files and folders that nobody removed."""
    return [str(path.relative_to(folder)) for path in folder.rglob(".tmp-*")]


def without(argv: list[str], *names: str) -> list[str]:
    """A command without the options of these names and what lies below them: what it says wins over config files."""
    gone = tuple(f"--{name}" for name in names)
    kept, words = argv[:1], iter(argv[1:])
    for word in words:
        if word in gone or word.startswith(tuple(f"{name}." for name in gone)):
            next(words)
        else:
            kept.append(word)
    return kept


def cut_journal(folder: Path) -> None:
    """Leave of a copy of :attr:`World.answers` what a kill would: two thirds of the journal, and no data set."""
    for name in ("own.jsonl", "own.json"):
        (folder / name).unlink()
    journal = folder / "own.jsonl.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: 2 * len(lines) // 3]))


def copied(source: Path, place: Path) -> Path:
    """A copy of a folder or file, which may be changed."""
    shutil.rmtree(place, ignore_errors=True)
    if source.is_dir():
        return Path(shutil.copytree(source, place, symlinks=True))
    place.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(source, place))


# --- a server --------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server whose answer to a conversation is always the same; it waits a little."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, delay: float = 0.02) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.delay, self.url = delay, f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is none of its business."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._say({"data": [{"id": "stand-in"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        threading.Event().wait(self.server.delay)
        text = hashlib.sha256(json.dumps(json.loads(body)["messages"]).encode()).hexdigest()[:24]
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        self._say({"choices": [choice], "usage": {"completion_tokens": len(text)}})

    def _say(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing is said of requests."""
