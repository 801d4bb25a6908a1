"""The doctor's last check: one sample is learned, and decoding accepts its drafts.

Legend: T tokens, K unroll steps.
"""

import math
import operator
import time
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric

from specdec.data import Batch
from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.diagnostics.doctor_setup import (
    SAMPLE,
    Findings,
    SetUp,
    documents,
    judged,
    unchecked,
)
from specdec.drafting.slots import reachable, shift
from specdec.nn.optimizers import AdamW
from specdec.training.step import TrainStep, target_outputs
from specdec.utils.text import how_many

PROMPT = 32  # tokens
ANSWER = 64  # tokens
PROMPTS = 4  # the one is taken whose answer tells most
EVERY = 5  # steps between decodings
LEARNED = 0.98  # share of the drafts that are right in training; then decoding must show it
TRIES = 4  # decodings of a sample that training has right, before the two are told apart
PATIENCE = 200  # steps without progress: in drafts, or by a hundredth of the loss


class _Sample(NamedTuple):
    """One text that is learned."""

    # how many of the answer's tokens the draft vocabulary has, repetitions aside: these are right by chance
    telling: int
    prompt: list[int]
    answer: list[int]
    known: list[bool]  # which of the answer's tokens the draft vocabulary has


class _Learned(NamedTuple):
    """The state of a sample at the end of training on it."""

    accepted: int  # drafts, by decoding
    refused: int  # drafts whose tokens the drafter knows
    parted: int  # tokens of the answer that decoding repeats
    right: float  # share of the drafts, in training
    losses: list[float]
    idle: int  # last steps without progress

    @property
    def counts(self) -> str:
        """The state in words."""
        steps = how_many(len(self.losses), "step")
        return (
            f"{self.accepted} accepted, {self.refused} refused; right in training {self.right:.1%}; "
            f"loss from {self.losses[0]:.3g} to {self.losses[-1]:.3g} in {steps}"
        )


def overfit(setup: SetUp) -> Findings:
    """Decoding accepts every draft of one sample that is trained on; the last check, since it trains the drafter.

    The text is a real prompt with the target's own greedy answer, so that the drafts that would be accepted are known.
    The step, loss and precision are the set-up's, without noise or clipping; AdamW's rate is one for a single sample.
    """
    sample = _sample(setup)
    K = setup.objective.steps
    size = f"{len(sample.prompt)} + {ANSWER} tokens, a chain of {K}"
    what = f"share accepted of one sample's drafts ({size})"
    if sample.telling < ANSWER / 8:
        why = "the target's answers are one token over and over, or of tokens that the draft vocabulary lacks"
        why += ": such drafts are accepted, or refused, whatever is wrong"
        yield unchecked(what, why, sample.telling)
        return
    learned = _learn(setup, sample)
    share = learned.accepted / max(learned.accepted + learned.refused, 1)
    if learned.parted < ANSWER / 4:
        why = (
            f"rounding: decoded in a chain, the answer is another from its token {learned.parted} on; choose a wider "
            "dtype"
        )
        yield unchecked(what, why, share)
        return
    fault = ""
    if (learned.right >= LEARNED and share < LEARNED) or share < learned.right / 2 > 0.25:
        fault = "what training has right, decoding has not: see parity"
    elif learned.idle >= PATIENCE:
        fault = "learning stopped by itself before the sample was learned: a part is missing, or cut off from learning"
    counts = learned.counts
    if learned.refused and not fault:
        why = f"the time was over ({setup.seconds:g} s): {counts}; give --seconds more"
        yield unchecked(what, why, share)
    else:
        yield judged(what, share, ">=", 1, f"{counts}. {fault}", counts)


def _learn(setup: SetUp, sample: _Sample) -> _Learned:
    """Train on a sample until decoding accepts every draft, nothing improves any more, or the time is over."""
    begin = time.monotonic()
    drafter = setup.drafter.train()
    batch, learnable = _batch(setup, sample)
    outputs = target_outputs(setup.target, drafter, batch, setup.objective)
    trainable = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    optimizer: Any = AdamW(trainable, lr=min(1e-2, max(2e-4, 0.5 / drafter.config.hidden_size)))
    fabric = Fabric(
        accelerator=setup.trainer.accelerator, devices=1, precision=setup.trainer.precision
    )
    train_step, optimizer = fabric.setup(TrainStep(drafter, setup.objective), optimizer)
    losses = list[float]()
    most_right = 0.0
    idle = 0
    tries = 0
    while True:
        # fabric's own forward would convert the target's states too, which the training step does not.
        with fabric.autocast():
            out = train_step.module(batch, outputs, True)
        right = float(out.counts.hits_K.sum()) / learnable
        loss = float(out.loss.detach())
        improved = right > most_right or loss < 0.99 * min(losses, default=math.inf)
        idle = 0 if improved else idle + 1
        most_right = max(most_right, right)
        late = time.monotonic() - begin >= setup.seconds
        losses.append(loss)
        ended = late or idle >= PATIENCE
        if ended or (right >= LEARNED and len(losses) % EVERY == 0):
            learned = _Learned(*_decode(setup, sample), right, losses, idle)
            tries += right >= LEARNED
            if ended or not learned.refused or tries == TRIES:
                return learned
        optimizer.zero_grad()
        fabric.backward(out.loss)
        optimizer.step()


def _batch(setup: SetUp, sample: _Sample) -> tuple[Batch, int]:
    """Return the sample as a batch, and how many of its drafts can be learned."""
    device = setup.target.device
    start = len(sample.prompt)
    ids_1T = torch.tensor([[*sample.prompt, *sample.answer]], device=device)
    mask_1T = torch.arange(ids_1T.shape[1], device=device)[None] >= start
    batch = Batch(ids_1T, mask_1T, 0 * ids_1T)
    known_1T = torch.tensor([[False] * start + sample.known], device=device)
    learnable = 0
    for k in range(setup.objective.steps):
        reached_1T = reachable(batch.loss_mask_BT, batch.documents_BT, k) & shift(known_1T, 2 + k)
        learnable += int(reached_1T.sum())
    return batch, max(learnable, 1)


def _sample(setup: SetUp) -> _Sample:
    """Choose, of a few real prompts up to where supervision begins, the one whose answer tells most."""
    target = setup.target
    vocab = setup.drafter.vocab
    length = ANSWER + setup.objective.steps + 2
    room = min(2 * SAMPLE, target.config.max_position_embeddings - length)
    samples = []
    for document in islice(documents(setup.batch), PROMPTS):
        begin = int(document.loss_mask_T.long().argmax()) or PROMPT
        prompt = document.ids_T[:begin][-room:].tolist()
        answer = PlainDecoder(target).generate(prompt, length, ()).ids
        known = (vocab.to_draft(torch.tensor(answer, device=target.device)) >= 0).tolist()
        changed = (token != following for token, following in pairwise(answer[:ANSWER]))
        telling = sum(there and new for there, new in zip(known[1:], changed, strict=False))
        samples.append(_Sample(telling, prompt, answer, known))
    return max(samples, key=operator.attrgetter("telling"))


@torch.no_grad()
def _decode(setup: SetUp, sample: _Sample) -> tuple[int, int, int]:
    """Decode with a chain as deep as the unroll, and count drafts.

    They are counted as far as the text is the answer that was trained on. In 16 bits a pass of several tokens may
    round otherwise than one of one, and what follows is another text.

    Returns:
        Drafts accepted, drafts refused though the drafter knows the token, and tokens that are the answer's.
    """
    K = setup.objective.steps
    decoder = SpeculativeDecoder(setup.target, setup.decoding(), Chain(K))
    decoded = decoder.generate(sample.prompt, ANSWER, ())
    differ = map(operator.ne, decoded.ids, sample.answer)
    parted = next((n for n, other in enumerate(differ) if other), ANSWER)
    accepted = 0
    refused = 0
    position = 0
    for count in decoded.accepted:
        position += count + 1  # the target's own token of this pass
        if position >= parted and parted < ANSWER:
            break
        accepted += count
        if count < K and position < len(sample.known) and sample.known[position]:
            refused += 1
    return accepted, refused, parted
