"""What a GPU makes of specdec: one command of about ten minutes, from this checkout and nothing else. Linux only.

The tests that need CUDA; the proof of random targets in 16 bits, on the device; training steps of EAGLE-3.1 at the
widths of a 1B and an 8B target, from random features; decoding with random weights, eager and compiled, where passes
count and acceptance says nothing; with ``--peers`` and ``--vllm`` both beside others. What fails is told and the rest
goes on. ``--device cpu --shapes tiny``: a dry run.

``python benchmarks/gpu.py --out FILE.md``
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from benchmarks.training.recipe import WORKLOADS
from specdec.commands.plan_costs import drafter_flops, target_flops
from specdec.data import Batch
from specdec.decoding import Chain, DynamicTree, PlainDecoder, SpeculativeDecoder
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, save_drafter
from specdec.features import FeatureSource, OnTheFly
from specdec.nn.backend import compile_pointwise
from specdec.nn.kernels import unroll_kernel
from specdec.target import Target, TargetOutput
from specdec.training.step import CUDA_PIECE, ObjectiveConfig, TrainStep, target_outputs

BEGAN = time.monotonic()
# seconds, after which nothing new begins, and what runs in a process of its own is ended
LIMIT, END = 540.0, 590.0
CUDA_TESTS = "test_flex_is_the_dense_oracle or test_a_gpu_runs_cuda_graphs"


class Shape(NamedTuple):
    """A target's, and of a training step."""

    hidden: int
    intermediate: int
    heads: int
    groups: int
    layers: int
    vocab: int
    draft_vocab: int
    rows: int
    tokens: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 1, 4, 512, 256, 2, 64),
    "S": Shape(512, 1408, 8, 4, 8, 32_000, 8192, 2, 512),
    "M": Shape(1024, 2816, 16, 8, 8, 32_000, 16_000, 2, 1024),
    "1B": Shape(2048, 8192, 32, 8, 16, 128_256, 32_000, 8, 2048),
    "8B": Shape(4096, 14_336, 32, 8, 32, 128_256, 32_000, 8, 4096),
}


def llama(shape: Shape, layers: int, dtype: torch.dtype, device: str) -> Target:
    """A random target, made on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=layers, num_attention_heads=shape.heads, num_key_value_heads=shape.groups,
        max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Target(LlamaForCausalLM(config).to(dtype))


def drafter_of(target: Target, shape: Shape, dtype: torch.dtype) -> Drafter:
    """EAGLE-3.1's, random, with as many boundaries of the target as it is deep enough for."""
    layers = target.num_layers
    spec = DrafterSpec(
        draft_vocab_size=shape.draft_vocab, aux_layers=sorted({1, layers // 2, layers})
    )
    config = DrafterConfig.for_target(
        spec, target.config, vocab_size=target.vocab_size, num_target_layers=layers, identity={}
    )
    return Drafter(config, torch.arange(shape.draft_vocab)).to(device=target.device, dtype=dtype)


class Random(FeatureSource):
    """Features that no target made, drawn once."""

    def __init__(self) -> None:
        self.made: TargetOutput | None = None

    def __call__(
        self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool
    ) -> TargetOutput:
        """Of the batch's shape."""
        if self.made is None:
            weight, shape = (
                target.embedding_weight(),
                (*batch.ids_BT.shape, len(layers), target.hidden_size),
            )
            self.made = TargetOutput(
                torch.randn(*shape).to(weight), torch.randn(*shape[:2], shape[3]).to(weight)
            )
        return self.made


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def proofs(shape: Shape, device: str) -> Iterator[tuple[str, ...]]:
    """A line for each dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        begin = time.perf_counter()
        llama(shape, min(shape.layers, 16), dtype, device).prove()
        yield str(dtype).removeprefix("torch."), "sound", f"{time.perf_counter() - begin:.1f}"


def training(name: str, shape: Shape, device: str, steps: int) -> Iterator[tuple[str, ...]]:
    """Steps from stored features, K = 7, bf16-mixed, AdamW; and forwards of the target, of which four layers are made.

    Operations are those that ``specdec plan`` reckons with: what it is told by ``--efficiency`` is their rate here.
    """
    target = llama(shape, 4, torch.bfloat16, device)
    drafter = drafter_of(target, shape, torch.float32)
    drafter.embed_tokens.requires_grad_(False)
    kernel_name, kernel = unroll_kernel("auto", torch.device(device))
    pieces = {"piece_bytes": CUDA_PIECE} if device == "cuda" else {}
    objective = ObjectiveConfig(steps=7, kernel=kernel, **pieces)
    step, source = TrainStep(drafter, objective), Random()
    ids_BT = torch.randint(0, shape.vocab, (shape.rows, shape.tokens), device=device)
    batch = Batch(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), torch.zeros_like(ids_BT))
    optimizer = torch.optim.AdamW(
        [p for p in drafter.parameters() if p.requires_grad], fused=device == "cuda"
    )

    def one() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = step(
                batch,
                target_outputs(target, drafter, batch, objective, False, source),
                measure=False,
            ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    tokens = shape.rows * shape.tokens

    def line(what: str, act: Callable[[], object], flops_per_token: float) -> tuple[str, ...]:
        act()  # compiles
        synchronize(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(steps):
            act()
        synchronize(device)
        rate = tokens * steps / (time.perf_counter() - begin)
        peak = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device == "cuda" else "-"
        done = rate * flops_per_token / 1e12
        return name, what, f"{tokens / rate:.3f}", f"{rate:,.0f}", f"{done:,.3g}", peak

    compile_pointwise(True)
    try:
        flops = sum(drafter_flops(drafter.config, objective, True, shape.tokens).values())
        yield line(f"drafter's step, {kernel_name}", one, flops)
    finally:
        compile_pointwise(False)
    layers = drafter.config.aux_layers
    with torch.no_grad():
        forward = partial(OnTheFly(), target, batch, layers, False)
        yield line(
            "target's forward, four layers", forward, target_flops(target.model, shape.tokens)
        )


def decoding(name: str, shape: Shape, device: str, tokens: int) -> Iterator[tuple[str, ...]]:
    """One text at a time, greedily; milliseconds for a pass, eager and compiled."""
    target = llama(shape, shape.layers, torch.bfloat16, device)
    drafter = drafter_of(target, shape, torch.bfloat16).eval().requires_grad_(False)
    prompt = list(range(3, 35))
    for compiled in (False, True):
        plain = PlainDecoder(target, compiled=compiled)
        for what, decoder in {
            "plain": plain,
            "chain of 4": SpeculativeDecoder(target, drafter, Chain(4), compiled=compiled),
            "draft tree of 16": SpeculativeDecoder(
                target, drafter, DynamicTree(depth=4, top_k=4, nodes=16), compiled=compiled
            ),
        }.items():
            decoder.generate(prompt, tokens, ())  # compiles
            synchronize(device)
            begin = time.perf_counter()
            made = decoder.generate(prompt, tokens, ())
            synchronize(device)
            each = 1000 * (time.perf_counter() - begin) / max(1, len(made.accepted) or tokens)
            yield name, what, "compiled" if compiled else "eager", f"{each:.2f}", f"{len(made.ids)}"


def left() -> float:
    """Seconds that a process may still take."""
    return max(1.0, BEGAN + END - time.monotonic())


def beside(script: str, *arguments: str) -> Iterator[tuple[str, ...]]:
    """The tables of another benchmark's report, line by line; ValueError if it failed."""
    command = [sys.executable, str(harness.ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left())
    if done.returncode:
        raise ValueError(
            (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        )
    for line in done.stdout.splitlines():
        if line.startswith(("|", "##")):
            yield (f"#{line}\n" if line.startswith("#") else line,)


def beside_vllm(shape: Shape, device: str, vllm: str, tokens: int) -> Iterator[tuple[str, ...]]:
    """:mod:`benchmarks.decode` of a random target and drafter, written for both."""
    with tempfile.TemporaryDirectory() as folder:
        target = llama(shape, shape.layers, torch.bfloat16, device)
        target.model.save_pretrained(f"{folder}/target")
        save_drafter(drafter_of(target, shape, torch.bfloat16), f"{folder}/drafter")
        places = f"--target={folder}/target", f"--drafter={folder}/drafter", f"--vllm={vllm}"
        del target
        few = f"--tokens={tokens}", "--dtypes=bfloat16", "--count=4", f"--device={device}"
        compiled = "--systems", "specdec", "specdec-chain3", "vllm", "vllm-eagle3"
        yield from beside("decode.py", *places, *few, *compiled)


def cuda_tests() -> Iterator[tuple[str, ...]]:
    """Their last line; ValueError if one failed."""
    tests = ["tests/nn/test_unroll.py", "tests/decoding/test_session.py"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-k",
        CUDA_TESTS,
        *tests,
    ]
    done = subprocess.run(
        command, cwd=harness.ROOT, capture_output=True, text=True, check=False, timeout=left()
    )
    said = done.stdout.strip().splitlines()[-1:]
    if done.returncode:
        raise ValueError(f"{said}")
    yield tuple(said)


def main(argv: list[str]) -> int:
    """Run all, print, and keep; the exit status is 1 if something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1B", "8B"])
    parser.add_argument("--steps", type=int, default=10, help="training steps that are timed")
    parser.add_argument("--tokens", type=int, default=128, help="that are decoded")
    parser.add_argument(
        "--peers", metavar="PYTHON", help="of speculators and specforge, to train beside them"
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="of vLLM, to decode beside it")
    parser.add_argument(
        "--out", type=Path, help="a report, .md; raw figures go to the .json beside it"
    )
    parser.add_argument("--force", action="store_true", help="write over one that is there")
    options = parser.parse_args(argv)
    harness.check_out(options.out, options.force)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: give --device cpu --shapes tiny for a dry run")
    about = harness.machine(torch.get_num_threads())
    named = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU, a dry run"
    lines = [
        "# specdec on a GPU",
        "",
        f"Device: {named}.",
        "",
        *harness.conditions(about, {"torch": torch.__version__}),
    ]
    raw: dict[str, Any] = {"about": about, "device": named, "failed": []}

    def part(
        title: str,
        words: int,
        columns: Sequence[str],
        runs: dict[str, Callable[[], Iterator[tuple[str, ...]]]],
    ) -> None:
        found = []
        for what, run in runs.items():
            if time.monotonic() - BEGAN > LIMIT:
                raw["failed"].append(f"{title}, {what}: not begun, the time was over")
                continue
            harness.tell(f"{title}: {what}")
            try:
                found += list(run())
            except Exception as error:  # noqa: BLE001  the rest is worth having
                reason = " ".join(str(error).split())[:300]
                raw["failed"].append(f"{title}, {what}: {type(error).__name__}: {reason}")
            with contextlib.suppress(AttributeError):
                torch.cuda.empty_cache()
        raw[title] = found
        table = harness.table(columns, found, words) if columns else [line for (line,) in found]
        lines.extend(["", f"## {title}", "", *table])

    shapes = {name: SHAPES[name] for name in options.shapes}
    first = next(iter(shapes.values()))
    if options.device == "cuda":
        part("Tests that need CUDA", 1, ("ended with",), {"pytest": cuda_tests})
    part(
        "Proofs of the target",
        2,
        ("dtype", "verdict", "s"),
        {"16 bits": lambda: proofs(first, options.device)},
    )
    part(
        "Training step", 2, ("target", "what", "s", "tokens/s", "TFLOP/s by plan", "peak GB"),
        {name: lambda name=name, one=one: training(name, one, options.device, options.steps)
         for name, one in shapes.items()},
    )  # fmt: skip
    part(
        "Decoding", 3, ("target", "shape", "how", "ms a pass", "tokens"),
        {name: lambda name=name, one=one: decoding(name, one, options.device, options.tokens)
         for name, one in list(shapes.items())[:1]},
    )  # fmt: skip
    if options.peers:
        widths = [name for name in shapes if name in WORKLOADS] or ["T"]
        given = (
            f"--device={options.device}",
            f"--peers={options.peers}",
            "--dtypes=bfloat16",
            "--masks=all",
        )
        part(
            "Training step beside peers", 0, (),
            {name: lambda name=name: beside("train_step.py", *given, "--workloads", name) for name in widths},
        )  # fmt: skip
    if options.vllm:
        part(
            "Decoding beside vLLM", 0, (),
            {"vLLM": lambda: beside_vllm(first, options.device, options.vllm, options.tokens)},
        )  # fmt: skip
    lines += ["", *(f"**Failed**: {one}" for one in raw["failed"])]
    lines.append(f"\nTook {time.monotonic() - BEGAN:.0f} s.")
    harness.keep(options.out, lines, raw)
    return 1 if raw["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
