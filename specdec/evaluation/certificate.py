"""A statement that speculative decoding says what the target says."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from specdec.decoding import Growth, Sampling
from specdec.decoding.decoder import GREEDY
from specdec.drafter import Drafter
from specdec.evaluation.greedy_check import TOLERANCE, GreedyCheck, check_greedy, plain_tokens
from specdec.evaluation.sampled_check import TOGETHER, SampledCheck, check_sampled, most_open
from specdec.files import sha256, write_json
from specdec.target import Target

log = logging.getLogger(__name__)


def certify(
    target: Target,
    drafter: Drafter,
    growths: Sequence[Growth],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    runs: int,
    sampling: Sampling = GREEDY,
    batch: int = 1,
    compiled: bool = False,
    on_check: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Check every growth greedily on all prompts, and sampled, by every rule that can judge it, after one of them.

    The draws are made by the eager decoder, :data:`TOGETHER` sequences side by side, where they tell most. There are
    none in 16 bits, where rounding, which is another in every shape of a pass, moves a law by more than draws could
    tell.

    Args:
        sampling: how draws are made but for the rule and the top-k; at temperature 1 if it is greedy.

    Returns:
        The statement, JSON-ready: ``holds``, and what every check found.

    Raises:
        ValueError: no prompt leaves room for the draws.
    """
    checks: list[GreedyCheck | SampledCheck] = []
    sampling = replace(sampling, temperature=sampling.temperature or 1.0)
    place = None
    if target.dtype in (torch.float32, torch.float64):
        nodes = 1 + max(growth.nodes_drafted for growth in growths)
        place = most_open(target, replace(sampling, rule="one_hot"), prompts, runs, nodes)
    else:
        log.warning("certify: draws are checked in float32 alone: rounding in 16 bits changes the law that they have")
    wanted = plain_tokens(target, prompts, max_new_tokens, batch)
    for growth in growths:
        on_check(f"{growth.name}, greedy")
        checks.append(check_greedy(target, drafter, growth, prompts, wanted, batch=batch, compiled=compiled))
        if place is None:
            continue
        for rule in ("one_hot", "with_replacement", "without_replacement"):
            drawn = replace(sampling, rule=rule)
            try:
                growth.check_rule(drawn.acceptance)
            except ValueError:
                continue  # the rule is not for this growth, and decoding would refuse it
            on_check(f"{growth.name}, {rule}")
            checks.append(check_sampled(target, drafter, growth, drawn, prompts[place], runs))
    return {
        "statement": "what speculative decoding says is what the target says",
        "holds": not any(check.fault for check in checks),
        "checks": [{"check": type(check).__name__, "fault": check.fault, **_plain(check)} for check in checks],
        "tolerance": {str(dtype).removeprefix("torch."): value for dtype, value in TOLERANCE.items()},
        "dtype": str(target.dtype).removeprefix("torch."),
        "greedy": {"compiled": compiled, "batch_size": batch},
        "sampled": None if place is None else {"compiled": False, "batch_size": TOGETHER, "prompt": place},
        "seed": sampling.seed,
    }


def write_certificate(path: Path, statement: dict[str, Any], drafter_directory: Path, context: dict[str, Any]) -> None:
    """Write the statement with what it is about: hashes of target and drafter, settings, versions; or not at all."""
    weights = {file.name: sha256(file) for file in sorted(drafter_directory.glob("*.safetensors"))}
    about = {name: context[name] for name in ("target", "settings", "provenance")}
    write_json(path, {**statement, "drafter_sha256": weights, **about})
    if not statement["holds"]:
        faults = "; ".join(f"{one['growth']}: {one['fault']}" for one in statement["checks"] if one["fault"])
        log.error("the certificate does not hold (%s): see %s", faults, path)


def _plain(check: GreedyCheck | SampledCheck) -> dict[str, Any]:
    found = asdict(check)
    if isinstance(check, GreedyCheck):
        found |= {name: [d._asdict() for d in getattr(check, name)] for name in ("near_ties", "wrong")}
    return found
