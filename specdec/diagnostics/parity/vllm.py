"""The fourth way: a real vLLM's greedy answers, each pass beside what the drafter would have had accepted there.

A pass that begins with n tokens of the answer known drafts the next K. What a drafter says there depends on the text
alone, not on the passes before; so one pass that rounding decides leaves the others comparable.

Legend: A passes, K drafts, T tokens.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.decoding import PlainDecoder
from specdec.diagnostics.parity.compare import decoded
from specdec.drafter import Drafter
from specdec.engines.client import Endpoint, SpecDecodeCounters, streaming
from specdec.engines.serve import DrafterCheckpoint, VllmLaunch, find_vllm, flag_of
from specdec.target import Target, TargetSource
from specdec.utils.progress import progress
from specdec.utils.signals import asked_to_end

TRIES = 5
PATH = "/v1/completions"
BY_CHANCE = 1e-4


def vllm_to_ask(
    target: TargetSource, engine: str | None, url: str | None, vllm_args: Sequence[str], **given: Any
) -> VllmLaunch | str | None:
    """What is started, or the URL of what runs, or None where no engine is asked.

    Args:
        vllm_args: flags for ``vllm serve``.
        given: ``vllm``, ``draft_tokens``, ``timeout`` of what is started; None where the default holds.

    Raises:
        ValueError: options that do not go together, or there is no vLLM.
    """
    options = {name: value for name, value in given.items() if value is not None}
    told = [f"--{name}" for name in options] + ["flags after --"] * bool(vllm_args)
    if engine is None and (url or told):
        told = ["--url"] * bool(url) + told
        raise ValueError(f"{', '.join(told)} would go to vLLM, which is not asked without --engine vllm")
    if url and told:
        raise ValueError(f"{', '.join(told)} would start vLLM, which is not started with --url")
    if "--dtype" in map(flag_of, vllm_args):
        raise ValueError("--dtype after -- is not passed on: vLLM runs in the target's, give --target.dtype")
    if url or engine is None:
        return url and Endpoint(url).url
    return VllmLaunch(find_vllm(options.pop("vllm", None)), target, port=0, extra=tuple(vllm_args), **options)


class VllmAnswer(NamedTuple):
    """What a server did with one prompt, end tokens ignored."""

    prompt: list[int]
    ids: list[int]
    known: list[int]
    """Tokens of the answer that were known when each pass began; the first is 1, the prompt's own."""
    accepted: list[int]
    """Drafts that each pass accepted, in the last one those behind the answer's end, too."""
    accepted_at: tuple[int, ...]
    """The server's own counters: passes that accepted at least one draft, at least two, and so on."""


def ask_all(
    where: VllmLaunch | str,
    drafter: DrafterCheckpoint,
    dtype: str,
    prompts: Sequence[list[int]],
    tokens: int,
    log: Path,
) -> list[VllmAnswer]:
    """Put every prompt to the vLLM at a URL, or to one that is started for it in this dtype and ended.

    Args:
        log: a new file for what a started one says.

    Raises:
        Asked: somebody asked this process to end.
        ValueError: as :func:`ask`; or vLLM does not come up.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(where, VllmLaunch):
            stack.enter_context(asked_to_end())
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
    """Put a prompt to a server that nobody else uses.

    Raises:
        ValueError: it does not answer, drafts nothing, serves somebody else, or does not send every pass by itself.
    """
    url = endpoint.url
    for _ in range(TRIES):
        before = SpecDecodeCounters.read(endpoint)
        pieces = _pieces(endpoint, model, prompt, tokens)
        ids, passes = [token for piece in pieces for token in piece], len(pieces) - 1
        counted = before.settled(endpoint, len(ids)).since(before)
        if counted.generated != len(ids):
            raise ValueError(f"{url} counted {counted.generated} tokens of {len(ids)}: somebody else uses it")
        if not counted.passes:
            raise ValueError(f"{url} drafts nothing: is it served with the drafter?")
        if counted.passes < passes:
            least = len(prompt) + tokens + len(counted.per_position) + 1
            told = f"give it a --max-model-len of {least} or more"
            raise ValueError(f"{url} drafts in {counted.passes} of {passes} passes: {told}")
        if counted.passes == passes:
            break
    else:
        told = f"sent {counted.passes} passes in {passes} pieces, and again {TRIES} times"
        raise ValueError(f"{url} {told}: is it busy, or has it another --stream-interval than 1?")
    accepted = [len(piece) - 1 for piece in pieces[1:]]
    accepted[-1] = counted.accepted - sum(accepted[:-1])  # the piece itself is cut at the end of the answer
    if counted.per_position != tuple(sum(a > k for a in accepted) for k in range(len(counted.per_position))):
        raise ValueError(f"{url} counts {counted.per_position} accepted drafts, its answer holds {accepted}")
    known = [sum(map(len, pieces[:number])) for number in range(1, len(pieces))]
    return VllmAnswer(prompt, ids, known, accepted, counted.per_position)


def _pieces(endpoint: Endpoint, model: str, prompt: list[int], tokens: int) -> list[list[int]]:
    """The answer's tokens, as they were streamed: a piece for each pass."""
    # without a penalty of its own the target's generation_config.json has a say
    body = {**streaming(model, tokens), "prompt": prompt, "repetition_penalty": 1.0, "return_token_ids": True}
    choices = [event["choices"][0] for event in endpoint.events(PATH, body) if event.get("choices")]
    try:
        return [list(choice["token_ids"]) for choice in choices if choice["token_ids"]]
    except KeyError as error:
        raise ValueError(f"{endpoint.url}{PATH} sends no token_ids, which vLLM does from 0.10.2 on") from error


class DraftPosition(NamedTuple):
    """All passes at one draft position."""

    position: int  # from 1
    passes: int
    accepted: int  # by the engine's counter
    expected: int  # passes at which this drafter, at the same places of the same answers, has as many drafts accepted
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
    fewer: int  # passes that rounding decides and in which the engine accepts fewer drafts

    @property
    def chance(self) -> float:
        """The p-value of so many, as chance takes close drafts either way: a sign test over these passes."""
        n = sum(one.rounding for one in self.positions)
        most = max(self.fewer, n - self.fewer)
        return min(1.0, 2 * sum(math.comb(n, k) for k in range(most, n + 1)) / 2**n)

    @property
    def holds(self) -> bool:
        """Whether the engine accepts what it should, everywhere."""
        return self.different == 0 and all(one.different == 0 for one in self.positions) and self.chance >= BY_CHANCE

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        positions = [{**one._asdict(), "verdict": one.verdict} for one in self.positions]
        return {**self._asdict(), "positions": positions, "chance": self.chance, "holds": self.holds}


@torch.no_grad()
def compare_passes(target: Target, drafter: Drafter, answers: Sequence[VllmAnswer], share: float) -> EnginePasses:
    """Compare every pass of every answer.

    Args:
        drafter: in the target's dtype, on its device.
        share: of a distribution's range, that rounding may make of one log-probability.

    Raises:
        ValueError: an answer leaves no room for the drafts behind it.
    """
    allowed, depth = 2 * share, len(answers[0].accepted_at)  # each of two candidates has an error of its own
    expected, rounding, different = ([0] * depth for _ in range(3))
    fewer = close_tokens = wrong_tokens = 0
    with progress("vLLM's passes", "answers", len(answers)) as done:
        for answer in answers:
            short_T, ours_A, doubt_AK = _expected(target, drafter, answer, depth)
            close_tokens += int(((short_T > 0) & (short_T <= allowed)).sum())
            wrong_tokens += int((short_T > allowed).sum())
            for ours, theirs, doubt_K in zip(ours_A, answer.accepted, doubt_AK.tolist(), strict=True):
                for k in range(ours):
                    expected[k] += 1
                if ours != theirs:
                    close = doubt_K[k := min(ours, theirs)] <= allowed
                    (rounding if close else different)[k] += 1
                    fewer += close and theirs < ours
            done(1)
    accepted = [sum(counts) for counts in zip(*(answer.accepted_at for answer in answers), strict=True)]
    passes, tokens = sum(len(answer.known) for answer in answers), sum(len(answer.ids) for answer in answers)
    columns = zip(accepted, expected, rounding, different, strict=True)
    positions = [DraftPosition(k, passes, *counts) for k, counts in enumerate(columns, 1)]
    return EnginePasses(positions, tokens, close_tokens, wrong_tokens, fewer)


def _expected(target: Target, drafter: Drafter, answer: VllmAnswer, depth: int) -> tuple[Tensor, list[int], Tensor]:
    """What ours say of an answer.

    Returns:
        (T,) what each token lacks of the target's best one; how many drafts each pass accepts; (A, K) how far each of
        them is from falling otherwise.
    """
    known = [*answer.prompt, *answer.ids]
    ids, P = [*known, *PlainDecoder(target).generate(known, depth).ids], len(answer.prompt)
    short_T, lead_T = _of_target(target, ids, P)
    lead_T[: len(answer.ids)] = torch.inf  # what vLLM wrote is certain; behind that a target's own tie counts, too
    log_probs_AKV = decoded(target, drafter, ids, [P + n - 2 for n in answer.known], depth - 1).log_probs_AKV
    known_A1 = torch.tensor(answer.known, device=target.device)[:, None]
    behind_AK = known_A1 + torch.arange(depth, device=target.device)
    short_AK, lead_AK = _short_and_lead(log_probs_AKV, torch.tensor(ids, device=target.device)[P + behind_AK])
    # a draft falls otherwise by what it lacks, or by its lead; where it is accepted behind the answer, the target's
    doubt_AK = torch.where(short_AK == 0, lead_AK, short_AK)
    doubt_AK = torch.minimum(doubt_AK, lead_T[behind_AK].to(doubt_AK))
    return short_T[: len(answer.ids)], (short_AK == 0).cumprod(1).sum(1).tolist(), doubt_AK


def _of_target(target: Target, ids: list[int], prompt: int) -> tuple[Tensor, Tensor]:
    """(T,) how far each token behind the prompt is from being the target's best; and how far that is from the next."""
    ids_1T = torch.tensor([ids], device=target.device)
    logits_TV = target.model(input_ids=ids_1T, use_cache=False).logits[0, prompt - 1 : -1]
    return _short_and_lead(logits_TV, ids_1T[0, prompt:])


def _short_and_lead(scores: Tensor, due: Tensor) -> tuple[Tensor, Tensor]:
    """What a token lacks of the best one's score, and what the second best does, as shares of the scores' range."""
    best, second = scores.topk(2).values.unbind(-1)
    least = scores.where(scores.isfinite(), best[..., None]).amin(-1)
    span = (best - least).clamp_min(1e-30)
    return (best - scores.gather(-1, due[..., None])[..., 0]) / span, (best - second) / span
