"""A real target from end to end: its own answers, a drafter trained on them, and held-out prompts decoded with it."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from benchmarks.gpu_parts.shapes import Row, synchronize
from specdec.data import Batch
from specdec.decoding import Chain, Generation, PlainDecoder, Request, SpeculativeDecoder
from specdec.drafter import Drafter, DrafterSpec
from specdec.embedded import SEED, held_out_prompts
from specdec.nn.kernels import unroll_kernel
from specdec.target import Target, TargetSource
from specdec.training.building import new_drafter
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs

PROMPT_TOKENS = 32
DRAFT_VOCAB = 8192


class Amount(NamedTuple):
    """How much is done."""

    prompts: int  # that are answered and trained on
    held_out: int
    tokens: int  # of an answer
    steps: int
    rows: int  # of a training step


AMOUNTS = {"cuda": Amount(440, 8, 96, 300, 16), "cpu": Amount(16, 2, 24, 6, 4)}


def end_to_end(source: str | None, device: str) -> Iterator[Row]:
    """Prompts are beginnings of functions in Python's standard library, which lies on every machine."""
    amount = AMOUNTS[device]
    dtype = "bfloat16" if device == "cuda" else "float32"
    origin = TargetSource(source, dtype=dtype) if source else TargetSource(dtype=dtype)
    target = origin.load(device)
    begin = time.perf_counter()
    target.prove()
    yield "the target's proof", f"{time.perf_counter() - begin:.1f}", "sound", ""
    count = amount.prompts + amount.held_out
    texts = held_out_prompts(count, PROMPT_TOKENS, SEED, target.tokenizer)
    prompts = [target.tokenizer.encode(text["prompt"]) for text in texts]
    requests = [Request(prompt, amount.tokens, 0) for prompt in prompts[amount.held_out :]]
    decoder = PlainDecoder(target, batch=64)
    made, took = _timed(decoder, requests, device)
    tokens = sum(len(answer.ids) for answer in made)
    what = f"{len(made)} answers, {decoder.batch} at a time"
    yield what, f"{took:.1f}", f"{tokens / took:,.0f} tokens/s", ""
    drafter = _drafter(target, made)
    begin = time.perf_counter()
    losses = _train(target, drafter, requests, made, amount)
    took = time.perf_counter() - begin
    yield (
        f"{amount.steps} training steps",
        f"{took:.1f}",
        f"loss {losses[0]:.2f} to {losses[-1]:.2f}",
        "",
    )
    drafter.to(getattr(torch, dtype)).eval().requires_grad_(False)
    yield from _decoded(target, drafter, prompts[: amount.held_out], amount.tokens, device)


def _timed(
    decoder: PlainDecoder, requests: Sequence[Request], device: str
) -> tuple[list[Generation], float]:
    """Return the answers in order, and the seconds that all took."""
    begin = time.perf_counter()
    made = dict(decoder.generate_all(requests))
    synchronize(device)
    return [made[number] for number in range(len(requests))], time.perf_counter() - begin


def _drafter(target: Target, made: Sequence[Generation]) -> Drafter:
    """Make EAGLE-3.1's drafter, its draft vocabulary the most frequent tokens of the answers."""
    said = torch.tensor([token for answer in made for token in answer.ids])
    counts_V = torch.bincount(said, minlength=target.vocab_size)
    size = min(DRAFT_VOCAB, target.vocab_size)
    drafter = new_drafter(target, DrafterSpec(draft_vocab_size=size), counts_V)
    return drafter.to(device=target.device, dtype=torch.float32)


def _train(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    made: Sequence[Generation],
    amount: Amount,
) -> list[float]:
    """Return the first loss and the mean of the last quarter."""
    device = target.device.type
    rows = [[*request.prompt, *answer.ids] for request, answer in zip(requests, made, strict=True)]
    longest = max(map(len, rows))
    ids_NT = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    lengths_N1 = torch.tensor([[len(row)] for row in rows], device=device)
    prompts_N1 = torch.tensor([[len(request.prompt)] for request in requests], device=device)
    place_T = torch.arange(longest, device=device)
    real_NT = place_T < lengths_N1
    everything = Batch(ids_NT, real_NT & (place_T >= prompts_N1), real_NT.long() - 1)
    objective = ObjectiveConfig(steps=4, kernel=unroll_kernel("auto", target.device)[1])
    step = TrainStep(drafter, objective)
    drafter.embed_tokens.requires_grad_(False)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, amount.steps)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(amount.steps):
        chosen = torch.randint(0, len(rows), (amount.rows,), generator=generator).to(device)
        batch = Batch(*(column[chosen] for column in everything))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = step(batch, target_outputs(target, drafter, batch, objective, False)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(1, len(losses) // 4) :]).mean()
    return [float(losses[0]), float(last)]


def _decoded(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], tokens: int, device: str
) -> Iterator[Row]:
    """Plain and with chains of 4, eager and compiled; texts that differ from eager plain decoding are counted."""
    requests = [Request(prompt, tokens, 0) for prompt in prompts]
    wanted: list[list[int]] = []
    for compiled in (False, True):
        for what, decoder in {
            "plain": PlainDecoder(target, compiled=compiled),
            "chain of 4": SpeculativeDecoder(target, drafter, Chain(4), compiled=compiled),
        }.items():
            _timed(decoder, requests[:1], device)  # compiles
            made, took = _timed(decoder, requests, device)
            said = [answer.ids for answer in made]
            wanted = wanted or said
            count = sum(map(len, said))
            passes = sum(len(answer.accepted) for answer in made)
            accepted = sum(sum(answer.accepted) for answer in made)
            length = f", acceptance length {1 + accepted / passes:.2f}" if what != "plain" else ""
            equal = sum(ours == plain for ours, plain in zip(said, wanted, strict=True))
            how = "compiled" if compiled else "eager"
            rate = f"{count / took:,.0f} tokens/s{length}"
            yield f"{what}, {how}", f"{took:.1f}", rate, f"{equal} of {len(said)}"
