"""Certificate of losslessness: what speculative decoding says is what the target says.

Greedily, every token must be the target's likeliest after the text before it, up to rounding. Sampled continuations
are counted against the target's exact distribution of them, by Pearson's chi-square.

Legend: B rows, T tokens, V vocabulary.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.special import chdtrc
from torch import Tensor

from specdec.decoding import (
    DraftShape,
    Generation,
    Request,
    Sampling,
    SpeculativeDecoder,
    check_length,
)
from specdec.drafter import Drafter
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.rounding import moved_logits
from specdec.utils.files import write_json
from specdec.utils.progress import progress
from specdec.utils.reading import sha256
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

# of the greatest logit's size, or of 1 if that is smaller: what rounding in another order may amount to, some units of
# each format's last place, the more as layers add up. In bfloat16 logits of a small random model were up to 2.4 % off
# float64's in every kind of pass, and two of them are compared
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 2e-3}
MOST_TIES = 0.02  # of all tokens: rounding does not decide more often

LEAST_EXPECTED = 5.0  # draws in a cell of the chi-square; rarer continuations are counted together
TOGETHER = 32  # sequences drawn side by side
# tokens that sampling leaves at each place; tokens of a continuation
TOP_K = 3
LENGTH = 3
LOOKED_AT = 16  # prompts, for the one after which draws tell most
SUSPECT = 1e-6  # a p-value below it fails
RULES: tuple[Literal["one_hot", "without_replacement", "block"], ...] = (
    "one_hot",
    "without_replacement",
    "block",
)


def certify(
    target: Target,
    drafter: Drafter,
    shapes: Sequence[DraftShape],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    runs: int,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    batch: int = 1,
    compiled: bool = False,
) -> dict[str, Any]:
    """Check every shape greedily on all prompts, and sampled, by every rule that can judge it, after one of them.

    Args:
        runs: draws of each sampled check, by the eager decoder; none in 16 bits, where rounding moves probabilities.
        sampling: how draws are made, except for the rule and the top-k; at temperature 1 if it is greedy.

    Returns:
        The statement, JSON-ready: ``holds``, and what every check found.

    Raises:
        ValueError: no prompt leaves room for the draws.
    """
    checks: list[dict[str, Any]] = []
    sampling = replace(sampling, temperature=sampling.temperature or 1.0, top_k=TOP_K)
    place = None
    if target.dtype in (torch.float32, torch.float64):
        nodes = 1 + max(shape.nodes_drafted for shape in shapes)
        place = most_open(target, replace(sampling, rule="one_hot"), prompts, runs, nodes)
    else:
        log.warning(
            "certify: draws are checked in float32 alone: rounding in 16 bits changes their distribution"
        )
    for shape in shapes:
        decoder = SpeculativeDecoder(target, drafter, shape, batch=batch, compiled=compiled)
        checks.append(check_greedy(decoder, prompts, max_new_tokens))
        for rule in RULES if place is not None else ():
            drawn = replace(sampling, rule=rule)
            try:
                shape.check_rule(drawn.acceptance)
            except ValueError:
                continue  # the rule is not for this shape, and decoding would refuse it
            together = min(runs, TOGETHER, target.most_texts)
            decoder = SpeculativeDecoder(target, drafter, shape, drawn, batch=together)
            checks.append(check_sampled(decoder, prompts[place or 0], runs))
    return {
        "holds": not any(check["fault"] for check in checks),
        "checks": checks,
        "tolerance": TOLERANCE[target.dtype],
        "dtype": str(target.dtype).removeprefix("torch."),
        "greedy": {"compiled": compiled, "batch_size": batch},
        "sampled": None
        if place is None
        else {"compiled": False, "batch_size": TOGETHER, "prompt": place},
        "seed": sampling.seed,
    }


def write_certificate(
    path: Path, statement: dict[str, Any], drafter_directory: Path, context: dict[str, Any]
) -> None:
    """Write the statement with what it is about: hashes of target and drafter, settings, versions; or not at all."""
    weights = {file.name: sha256(file) for file in sorted(drafter_directory.glob("*.safetensors"))}
    about = {name: context[name] for name in ("target", "settings", "provenance")}
    write_json(path, {**statement, "drafter_sha256": weights, **about})
    if not statement["holds"]:
        faults = "; ".join(
            f"{check['shape']}: {check['fault']}" for check in statement["checks"] if check["fault"]
        )
        # its folder is not in place yet
        log.error("the certificate does not hold (%s): see %s", faults, path.name)


@torch.inference_mode()
def check_greedy(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], max_new_tokens: int
) -> dict[str, Any]:
    """Decode every prompt greedily, without an end token, and judge all tokens.

    JSON-ready: ``fault``, None or what else than rounding made a difference; the tokens that are ``wrong``, the
    ``near_ties``, and how many tokens, accepted drafts and passes there were.
    """
    shape = decoder.shape.name
    requests = [Request(prompt, max_new_tokens) for prompt in prompts]
    generations = dict(_counted(decoder, requests, f"{shape}, greedily", "prompt"))
    near_ties: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        for token in _unlikely_tokens(decoder.target, prompt, generations[number].ids):
            is_tie = token["gap"] <= token["allowed"]
            (near_ties if is_tie else wrong).append({"prompt": number, **token})
    tokens = sum(len(generation.ids) for generation in generations.values())
    passes = [n for generation in generations.values() for n in generation.accepted]
    fault = None if passes else "no pass verified anything: ask for more new tokens"
    if len(near_ties) > max(1, MOST_TIES * tokens):
        ties = how_many(len(near_ties), "near-tie")
        fault = f"{ties} in {how_many(tokens, 'token')}: rounding is not that rough"
    if missing := len(prompts) * max_new_tokens - tokens:
        fault = f"the answers are {how_many(missing, 'token')} short"
    if wrong:
        fault = f"{len(wrong)} of {how_many(tokens, 'token')} wrong"
    return {
        "check": "greedy",
        "shape": shape,
        "fault": fault,
        "tokens": tokens,
        "accepted": sum(passes),
        "passes": len(passes),
        "near_ties": near_ties,
        "wrong": wrong,
    }


def _unlikely_tokens(
    target: Target, prompt: list[int], ids: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the tokens of an answer that are not the target's likeliest, with the gap and what rounding allows of it.

    Every token is judged after the answer's own text, so a difference hides none behind it.
    """
    text_1T = torch.tensor([[*prompt, *ids[:-1]]])
    logits_TV = _logits(target, text_1T, len(ids))[0].double()
    best_T, likeliest_T = logits_TV.max(-1)
    chosen_T = logits_TV.gather(-1, torch.tensor(ids, device=best_T.device)[:, None])[:, 0]
    gap_T = best_T - chosen_T
    allowed_T = TOLERANCE[target.dtype] * best_T.abs().clamp_min(1)
    in_16_bits = target.dtype in (torch.bfloat16, torch.float16)
    moves = target.recurrent or (in_16_bits and target.routed)
    if moves and bool((gap_T > allowed_T).any()):
        # a tie of two experts moves logits by more than rounding, and so do recurrent layers, which read a text as a
        # whole in another form than token by token: by what the model itself moves them on this text
        allowed_T = allowed_T.clamp_min(2 * float(moved_logits(target, text_1T).max()))
    for position in gap_T.nonzero()[:, 0].tolist():
        yield {
            "position": position,
            "token": ids[position],
            "likeliest": int(likeliest_T[position]),
            "gap": float(gap_T[position]),
            "allowed": float(allowed_T[position]),
        }


def check_sampled(decoder: SpeculativeDecoder, prompt: list[int], runs: int) -> dict[str, Any]:
    """Draw ``runs`` continuations, each with its seed, under a top-k so small that all of them can be listed.

    JSON-ready: ``fault``, None or why the draws cannot be the target's, or are too few to tell; Pearson's chi-square
    with its degrees of freedom and p-value; how many draws were such as the target never makes.
    """
    sampling = decoder.sampling
    shape = decoder.shape.name
    rule = type(sampling.acceptance).__name__
    requests = [Request(prompt, LENGTH, sampling.seed + n) for n in range(runs)]
    generations = _counted(decoder, requests, f"{shape}, drawn by {rule}", "draw")
    counts = Counter(tuple(generation.ids) for _, generation in generations)
    probs = _continuations(decoder.target, sampling, prompt)
    cells = _cells([(counts[path], p * runs) for path, p in probs.items()])
    chi_square = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    p_value = float(chdtrc(max(1, len(cells) - 1), chi_square))
    impossible = runs - sum(counts[path] for path in probs)
    fault = f"p-value {p_value:.1e}" if p_value <= SUSPECT else None
    if len(probs) > 1 and len(cells) == 1:
        fault = f"{how_many(runs, 'draw')} cannot tell any two of {len(probs)} continuations apart: draw more"
    if impossible:
        fault = f"the target never makes such draws as {impossible} of {runs}"
    return {
        "check": "sampled",
        "shape": shape,
        "rule": rule,
        "fault": fault,
        "sampling": asdict(sampling),
        "runs": runs,
        "continuations": len(probs),
        "chi_square": chi_square,
        "degrees": len(cells) - 1,
        "p_value": p_value,
        "impossible": impossible,
    }


def most_open(
    target: Target, sampling: Sampling, prompts: Sequence[list[int]], runs: int, nodes: int
) -> int:
    """Return the number of the prompt whose draws tell most, of the first :data:`LOOKED_AT` with room for them.

    ``nodes`` is as of :func:`~specdec.decoding.check_length`. Raises ValueError if none has room.
    """
    cells = dict[int, int]()
    for number, prompt in enumerate(prompts):
        with contextlib.suppress(ValueError):
            check_length(target, prompt, LENGTH, nodes)
            probs = _continuations(target, sampling, prompt)
            cells[number] = len(_cells([(0, p * runs) for p in probs.values()]))
        if len(cells) == LOOKED_AT:
            break
    if not cells:
        raise ValueError(
            f"certify: no prompt leaves room for {LENGTH} more tokens in the target's positions"
        )
    return max(cells, key=lambda number: cells[number])


def _counted(
    decoder: SpeculativeDecoder, requests: Sequence[Request], what: str, unit: str
) -> Iterator[tuple[int, Generation]]:
    """Yield the generations without an end token, with progress."""
    with progress(f"certifying {what}", unit, len(requests)) as advance:
        for item in decoder.generate_all(requests, ()):
            advance(1)
            yield item


def _logits(target: Target, ids_BT: Tensor, last: int = 1) -> Tensor:
    """The target's logits after the last tokens of each row, (B, T) int64 to (B, last, V)."""
    ids_BT = ids_BT.to(target.device)
    return target.logits(
        target.forward(ids_BT, View.packed(torch.zeros_like(ids_BT)), ()).final_BTH[:, -last:]
    )


def _cells(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Pairs of draws and how many were expected; those that expect less than ``LEAST_EXPECTED`` are one together."""
    cells = [(0, 0.0)]
    for seen, expected in sorted(pairs, key=lambda pair: pair[1]):
        if cells[-1][1] >= LEAST_EXPECTED and expected >= LEAST_EXPECTED:
            cells.append((0, 0.0))
        cells[-1] = cells[-1][0] + seen, cells[-1][1] + expected
    return cells


@torch.inference_mode()
def _continuations(
    target: Target, sampling: Sampling, prompt: list[int]
) -> dict[tuple[int, ...], float]:
    """Every continuation that the sampled target can say, with its probability."""
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        paths = list(probabilities)
        ids_BT = torch.tensor([[*prompt, *path] for path in paths])
        probs_BV = sampling.probs(_logits(target, ids_BT)[:, 0].cpu()).double()
        longer: dict[tuple[int, ...], float] = {}
        for row, path in enumerate(paths):
            for token in probs_BV[row].nonzero().flatten().tolist():
                longer[(*path, token)] = probabilities[path] * float(probs_BV[row, token])
        probabilities = longer
    return probabilities
