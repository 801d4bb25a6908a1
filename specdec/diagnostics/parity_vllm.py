"""The fourth way: a real vLLM's greedy answers, each pass beside what the drafter would have had accepted there.

A pass that begins with n tokens of the answer known drafts the next K. What a drafter says there depends on the text
alone, not on the passes before; so one pass that rounding decides leaves the others comparable.

Legend: A passes, K drafts, T tokens, V vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.diagnostics.parity_compare import decoded
from specdec.drafter import Drafter
from specdec.engines.client import Endpoint, SpecDecodeCounters, streaming
from specdec.engines.server import DrafterCheckpoint, VllmLaunch, find_vllm, flag_of
from specdec.target import Target, TargetSource
from specdec.utils.progress import progress
from specdec.utils.signals import stop_on_signals

TRIES = 5
PATH = "/v1/completions"


def vllm_to_ask(
    target: TargetSource, engine: str | None, url: str | None, draft_tokens: int | None, vllm_args: Sequence[str]
) -> VllmLaunch | str | None:
    """What is started, the URL of what runs, or None; ValueError if options do not go together or vLLM is missing."""
    options = {"--url": url, "--draft_tokens": draft_tokens, "flags after --": vllm_args}
    given = [name for name, value in options.items() if value]
    if engine is None and given:
        raise ValueError(f"{', '.join(given)} would go to vLLM, which is not asked without --engine vllm")
    if url and len(given) > 1:
        raise ValueError(f"{', '.join(given[1:])} would start vLLM, which is not started with --url")
    if "--dtype" in map(flag_of, vllm_args):
        raise ValueError("--dtype after -- is not passed on: vLLM runs in the target's, give --target.dtype")
    if url or engine is None:
        return url and Endpoint(url).url
    drafts = VllmLaunch.draft_tokens if draft_tokens is None else draft_tokens
    return VllmLaunch(find_vllm(), target, port=0, draft_tokens=drafts, extra=tuple(vllm_args))


class VllmAnswer(NamedTuple):
    """What a server did with one prompt, end tokens ignored."""

    prompt: list[int]
    ids: list[int]
    drafts: int  # of a pass
    known: list[int]  # tokens of the answer that were known when each pass began; the first is 1, the prompt's own
    accepted: list[int]  # drafts that each pass accepted; of the last one those within the answer


def ask_all(
    where: VllmLaunch | str, drafter: DrafterCheckpoint, dtype: str, prompts: Sequence[list[int]], tokens: int,
    log: Path,
) -> list[VllmAnswer]:  # fmt: skip
    """Put every prompt to the vLLM at a URL, or to one that is started for it in this dtype and ended.

    ``log`` is a new file for what a started one says. StopRequested if a signal came; ValueError as of
    :func:`ask`, or if vLLM does not come up.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(where, VllmLaunch):
            stack.enter_context(stop_on_signals())
            launch = dataclasses.replace(where, extra=("--dtype", dtype, *where.extra))
            where = stack.enter_context(launch.server(drafter, log)).url
        endpoint = Endpoint(where)
        model, answers = endpoint.model(), []
        done = stack.enter_context(progress("vLLM answers", "prompts", len(prompts)))
        for prompt in prompts:
            answers.append(ask(endpoint, model, prompt, tokens))
            done(1)
    return answers


def ask(endpoint: Endpoint, model: str, prompt: list[int], tokens: int) -> VllmAnswer:
    """Put a prompt to a server that nobody else uses; ValueError if it does not draft, or sends passes together."""
    # without a penalty of its own the target's generation_config.json has a say
    body = {"prompt": prompt, "repetition_penalty": 1.0, "return_token_ids": True}
    for _ in range(TRIES):
        before = SpecDecodeCounters.read(endpoint)
        events = endpoint.events(PATH, streaming(model, tokens) | body)
        choices = [event["choices"][0] for event in events if event.get("choices")]
        if not all("token_ids" in choice for choice in choices):
            raise ValueError(f"{endpoint.url}{PATH} sends no token_ids, which vLLM does from 0.10.2 on")
        pieces = [choice["token_ids"] for choice in choices if choice["token_ids"]]
        ids = [token for piece in pieces for token in piece]
        counted = before.increase(endpoint, len(ids))
        if not counted.passes:
            raise ValueError(f"{endpoint.url} drafts nothing: is it served with the drafter?")
        if (counted.generated, counted.passes) == (len(ids), len(pieces) - 1):
            known = [sum(map(len, pieces[:number])) for number in range(1, len(pieces))]
            return VllmAnswer(prompt, ids, counted.draft_tokens, known, [len(piece) - 1 for piece in pieces[1:]])
    raise ValueError(
        f"{endpoint.url} sent {len(ids)} tokens in {len(pieces)} pieces and counted {counted.generated} in "
        f"{counted.passes} passes and the prompt's, {TRIES} times: does somebody else use it, has it another "
        f"--stream-interval than 1, or a --max-model-len below {len(prompt) + tokens + counted.draft_tokens + 1}?"
    )


class DraftPosition(NamedTuple):
    """All passes at one draft position."""

    position: int  # from 1
    passes: int
    accepted: int  # passes at which the engine accepted as many drafts
    expected: int  # the same of this drafter, at the same places of the same answers
    rounding: int  # passes that first differ here, where its two candidates are within rounding of each other
    different: int  # passes that first differ here, where they are not

    @property
    def verdict(self) -> str:
        """``equal``, or what differs."""
        if self.different:
            return f"DIFFERENT in {self.different}"
        return f"equal but for rounding in {self.rounding}" if self.rounding else "equal"


class EnginePasses(NamedTuple):
    """A real engine's answers beside ours."""

    positions: list[DraftPosition]
    tokens: int  # of all answers
    rounding: int  # of them, those that are not the target's best token, but within rounding of it
    different: int  # those that are neither: the engine runs another target

    @property
    def fault(self) -> str | None:
        """What differs beyond rounding; None if nothing does."""
        if self.different:
            return f"{self.different} of {self.tokens} tokens are not this target's"
        return "vLLM accepts other drafts than these, see above" if any(x.different for x in self.positions) else None

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        positions = [{**one._asdict(), "verdict": one.verdict} for one in self.positions]
        return {**self._asdict(), "positions": positions, "holds": self.fault is None}


@torch.no_grad()
def compare_passes(target: Target, drafter: Drafter, answers: Sequence[VllmAnswer], share: float) -> EnginePasses:
    """Compare every pass of every answer whose drafts all lie within it.

    Args:
        drafter: in the target's dtype, on its device.
        share: of a distribution's range, that rounding may make of one log-probability.

    Raises:
        ValueError: no answer is longer than a pass.
    """
    allowed, depth = 2 * share, answers[0].drafts  # each of two candidates has an error of its own
    accepted, expected, rounding, different = ([0] * depth for _ in range(4))
    passes = close_tokens = wrong_tokens = 0
    for answer in answers:
        P, ids = len(answer.prompt), torch.tensor([*answer.prompt, *answer.ids], device=target.device)
        logits_TV = target.model(input_ids=ids[None], use_cache=False).logits[0, P - 1 : -1]
        short_T, _ = _short_and_lead(logits_TV, ids[P:])
        close_tokens += int(((short_T > 0) & (short_T <= allowed)).sum())
        wrong_tokens += int((short_T > allowed).sum())
        whole = [(n, count) for n, count in zip(answer.known, answer.accepted, strict=True) if n + depth < len(ids) - P]
        if not whole:
            continue
        places = [P + n for n, _ in whole]  # of each pass's first draft
        log_probs_AKV = decoded(target, drafter, ids.tolist(), [at - 2 for at in places], depth - 1).log_probs_AKV
        due_AK = torch.stack([ids[at : at + depth] for at in places])
        short_AK, lead_AK = _short_and_lead(log_probs_AKV, due_AK)
        right_AK = short_AK == 0
        doubt_AK = torch.where(right_AK, lead_AK, short_AK)  # how far a draft is from falling otherwise
        passes += len(whole)
        for ours, (_, theirs), doubt_K in zip(right_AK.cumprod(1).sum(1).tolist(), whole, doubt_AK, strict=True):
            for k in range(depth):
                expected[k] += ours > k
                accepted[k] += theirs > k
            if ours != theirs:
                close = bool(doubt_K[k := min(ours, theirs)] <= allowed)
                (rounding if close else different)[k] += 1
    if not passes:
        raise ValueError(
            f"no answer holds a pass of {depth} drafts: give more --max_new_tokens or fewer --draft_tokens"
        )
    columns = zip(accepted, expected, rounding, different, strict=True)
    positions = [DraftPosition(k, passes, *counts) for k, counts in enumerate(columns, 1)]
    return EnginePasses(positions, sum(len(one.ids) for one in answers), close_tokens, wrong_tokens)


def _short_and_lead(scores: Tensor, due: Tensor) -> tuple[Tensor, Tensor]:
    """What a token lacks of the best one's score, and what the second best does, as shares of the scores' range."""
    best, second = scores.topk(2).values.unbind(-1)
    least = scores.where(scores.isfinite(), best[..., None]).amin(-1)
    span = (best - least).clamp_min(1e-30)
    return (best - scores.gather(-1, due[..., None])[..., 0]) / span, (best - second) / span
