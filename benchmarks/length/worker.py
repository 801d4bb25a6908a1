"""One measurement in a process of its own: ``python -m benchmarks.length.worker JOB`` prints what it took.

The target has random weights, two layers of width 64 with one head and room for 131072 tokens; the drafter is
EAGLE-3.1's.

Legend: T tokens.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.data import Batch
from specdec.decoding import Chain, SpeculativeDecoder
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec
from specdec.nn.kernels import unroll_kernel
from specdec.optimizers import AdamW
from specdec.target import Target
from specdec.training.estimate import estimate, module_bytes
from specdec.training.objective import Recipe, objective, teach

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


def training(target: Target, drafter: Drafter, layout: str) -> tuple[Callable[[int], None], Recipe]:
    """A whole step of T tokens, all of them supervised, with recomputation."""
    recipe = Recipe(steps=STEPS, kernel=unroll_kernel("auto", torch.device("cpu"))[1], recompute=True)
    trained = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    optimizer = AdamW(trained)

    def step(T: int) -> None:
        ids = torch.randint(0, VOCAB, (1, T), generator=torch.Generator().manual_seed(T))
        batch = Batch(ids, torch.ones(1, T, dtype=torch.bool), torch.tensor([documents(layout, T)]))
        objective(drafter, batch, teach(target, drafter, batch, recipe, False), recipe, False).loss.backward()
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
        parameters = sum(p.numel() for p in drafter.parameters())
        trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        expected = estimate(
            drafter.config, parameters, trained, 1, job.tokens, STEPS,
            target_bytes=module_bytes(target.model), checkpointing=True, piece_bytes=recipe.piece_bytes,
        )  # fmt: skip
        more = {"estimated_mb": expected.total / 1e6}
    run(SHORT)
    before, begin, busy = peak_bytes(), time.perf_counter(), time.process_time()
    run(job.tokens)
    taken = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - busy}
    return {**taken, "peak_mb": peak_bytes() / 1e6, "growth_mb": (peak_bytes() - before) / 1e6, **more}


if __name__ == "__main__":
    print(json.dumps(measure(Job(**json.loads(sys.argv[1])))))
