"""Memory and time of a training step and of decoding a prompt, by length, each length in a process of its own.

The target is tiny (random weights, two layers of width 64), so that what grows with the length is nearly all there is;
the drafter is EAGLE-3.1's. Linux, CPU.

``python benchmarks/long_context.py --out benchmarks/results/long_context_<hardware>_<yyyymm>.md``

Legend: T tokens.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks import harness
from specdec.data import Batch
from specdec.decoding import Chain, SpeculativeDecoder
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec
from specdec.nn.optimizers import AdamW
from specdec.nn.unroll import unroll_kernel
from specdec.target import Target
from specdec.training.memory import memory_need
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs

VOCAB, DRAFT_VOCAB, STEPS, ANSWER = 8192, 4096, 3, 16
SHORT = 512  # tokens of what is run first, so that libraries are loaded
LAYOUTS = ("one document", "packed", "decoding")


class Job(NamedTuple):
    """What is measured."""

    layout: str
    tokens: int
    threads: int


def make_target() -> Target:
    """Two layers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2**17,
    )
    return Target(LlamaForCausalLM(config))


def make_drafter(target: Target) -> Drafter:
    """EAGLE-3.1 with the boundaries that two layers have."""
    spec = DrafterSpec(draft_vocab_size=DRAFT_VOCAB, aux_layers=[0, 1, 2])
    sizes = {"vocab_size": VOCAB, "num_target_layers": 2, "identity": {"source": "benchmark"}}
    drafter = Drafter(DrafterConfig.for_target(spec, target.config, **sizes), torch.arange(DRAFT_VOCAB))
    drafter.embed_tokens.requires_grad_(False)
    return drafter


def documents(layout: str, T: int) -> list[int]:
    """Document numbers of a row: one text, or texts of T / 2, T / 4 and so on down to 128 tokens, then of 128."""
    if layout == "one document":
        return [0] * T
    lengths: list[int] = []
    while sum(lengths) < T:
        lengths.append(max(128, (T - sum(lengths)) // 2))
    return [number for number, length in enumerate(lengths) for _ in range(length)][:T]


def training(target: Target, drafter: Drafter, layout: str) -> tuple[Callable[[int], None], ObjectiveConfig]:
    """A whole step of T tokens, all of them supervised, with recomputation."""
    recipe = ObjectiveConfig(steps=STEPS, kernel=unroll_kernel("auto", torch.device("cpu"))[1], recompute=True)
    trained = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    optimizer = AdamW(trained)

    def step(T: int) -> None:
        ids = torch.randint(0, VOCAB, (1, T), generator=torch.Generator().manual_seed(T))
        batch = Batch(ids, torch.ones(1, T, dtype=torch.bool), torch.tensor([documents(layout, T)]))
        TrainStep(drafter, recipe)(batch, target_outputs(target, drafter, batch, recipe, False), False).loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in trained], 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step, recipe


def decoding(target: Target, drafter: Drafter) -> Callable[[int], None]:
    """A prompt of T tokens less the answer's, and the answer."""

    def decode(T: int) -> None:
        prompt = torch.randint(0, VOCAB, (T - ANSWER,), generator=torch.Generator().manual_seed(T)).tolist()
        found = SpeculativeDecoder(target, drafter, Chain(3)).generate(prompt, ANSWER)
        assert len(found.ids) == ANSWER

    return decode


def peak_bytes() -> int:
    """The most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(job: Job) -> dict[str, float]:
    """Seconds, those of all cores, and in MB peak memory, its growth over a short run and training's estimate."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    target = make_target()
    drafter, more = make_drafter(target), {}
    if job.layout == "decoding":
        run = decoding(target, drafter)
    else:
        run, recipe = training(target, drafter, job.layout)
        target_bytes = sum(x.numel() * x.element_size() for x in (*target.model.parameters(), *target.model.buffers()))
        expected = memory_need(drafter.config, recipe, 1, job.tokens, target_bytes=target_bytes)
        more = {"estimated_mb": sum(expected.values()) / 1e6}
    run(SHORT)
    before, begin, busy = peak_bytes(), time.perf_counter(), time.process_time()
    run(job.tokens)
    taken = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - busy}
    return {**taken, "peak_mb": peak_bytes() / 1e6, "growth_mb": (peak_bytes() - before) / 1e6, **more}


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Measure at once, and answer nothing more."""
    return measure(Job(**job)), lambda asked: None


def main() -> int:
    """Every layout at every length; the exit status."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    p.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    about, found, rows = harness.machine(a.threads), [], []
    columns = ["work", "tokens", "seconds", "CPU seconds", "peak MB", "growth MB", "bytes a token", "estimated MB"]
    note = (
        "A training step is whole: target, unroll of 3 steps with recomputation, loss of all tokens, backward pass, "
        "optimizer. *Packed* rows hold texts of half the row, a quarter and so on down to 128 tokens. *Decoding* is a "
        "prompt and 16 tokens after it. Growth is over the peak after a short run in the same process."
    )
    with tempfile.TemporaryDirectory(prefix="long_context-") as logs:
        for layout in a.layouts:
            for tokens in sorted(a.tokens):
                harness.tell(f"{layout}, {tokens} tokens")
                job = Job(layout, tokens, a.threads)._asdict()
                with harness.Worker(sys.executable, layout, Path(__file__).resolve(), job, Path(logs) / "log") as one:
                    found.append(job | one.about)
                x = found[-1]
                rows.append([
                    layout, f"{tokens:,}", f"{x['seconds']:.1f}", f"{x['cpu_seconds']:.1f}", f"{x['peak_mb']:,.0f}",
                    f"{x['growth_mb']:,.0f}", f"{1e6 * x['growth_mb'] / tokens:,.0f}",
                    f"{x['estimated_mb']:,.0f}" if "estimated_mb" in x else "-",
                ])  # fmt: skip
    head = [f"# Memory and time by length, {about['date'][:10]}", "", note, ""]
    lines = [*head, *harness.table(columns, rows), "", *harness.conditions(about, about["versions"])]
    harness.keep(a.out, lines, {"run": about, "measured": found})
    return 0


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
