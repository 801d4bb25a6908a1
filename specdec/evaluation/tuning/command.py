"""``specdec tune``: which shape of draft is the fastest on this machine, for each batch size."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser
from rich.console import Console

from specdec.arguments import parse, target_shorthand
from specdec.compose import new_run
from specdec.embedded.source import TargetSource
from specdec.evaluation.arguments import measuring_parser
from specdec.evaluation.pair import load_pair
from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.skipping import first_turns
from specdec.evaluation.tuning.costs import ladder
from specdec.evaluation.tuning.measure import measure
from specdec.evaluation.tuning.model import break_even
from specdec.evaluation.tuning.plot import plot
from specdec.evaluation.tuning.report import print_tuning, report
from specdec.evaluation.tuning.results import told_break_even, told_profile
from specdec.files import staged_directory, write_json, write_text
from specdec.imports import flags
from specdec.nn.products import fast_products
from specdec.provenance import provenance

PLOT = "tune.png"


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = measuring_parser("tune", __doc__)
    out.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 4, 16], help="sequences decoded side by side")
    out.add_argument("--compile", type=Literal["on", "off"], default="on", help="tune for compiled decoding; each shape is a graph of its own, so that fewer are timed")  # fmt: skip # noqa: E501
    out.add_argument("--repeats", type=int, default=5, help="timed calls of every shape")
    out.add_argument("--out", type=str | None, default=None, help="directory for the results; it must not exist yet")
    return out


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong.
    """
    args = parse(parser(), target_shorthand(argv))
    found = tune(
        args.target,
        Path(args.drafter),
        args.prompts,
        Path(args.out) if args.out else new_run("tune"),
        batch_sizes=args.batch_sizes,
        compiled=args.compile == "on",
        max_new_tokens=args.max_new_tokens,
        limit=args.limit,
        layouts=args.layouts,
        repeats=args.repeats,
        device=args.device,
        other_target=args.other_target,
        command=["specdec", "tune", *flags(), *argv],
    )
    print_tuning(found, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150))
    return 0


def tune(
    source: TargetSource,
    drafter_directory: Path,
    prompt_files: Sequence[str | Path],
    out: Path,
    *,
    batch_sizes: Sequence[int] = (1, 4, 16),
    compiled: bool = True,
    max_new_tokens: int = 128,
    limit: int | None = None,
    layouts: Sequence[str] = (),
    repeats: int = 5,
    device: str = "cpu",
    other_target: bool = False,
    command: list[str] | None = None,
) -> dict[str, Any]:
    """Measure, recommend, check, and write ``tune.json``, ``tune.png`` and ``report.md`` into ``out``, a new directory.

    Returns:
        What ``tune.json`` holds.

    Raises:
        ValueError: something given is wrong; nothing is written then.
    """
    sizes = _checked(batch_sizes, max_new_tokens, repeats)
    prompts = load_prompts(prompt_files, limit, layouts)
    target, drafter, _ = load_pair(source, drafter_directory, device, other_target)
    largest = max(shape.nodes for shape in ladder(compiled, drafter.config.draft_vocab_size))
    asked, skipped = first_turns(target, prompts, max_new_tokens, largest + 1)
    with staged_directory(out) as folder, fast_products():
        profile, tuned = measure(target, drafter, asked, sizes, compiled, max_new_tokens, repeats)
        best = {one.costs.batch: one.predictions[0].speedup for one in tuned}
        found: dict[str, Any] = {
            "break_even": told_break_even(break_even(best), sizes),
            "batches": [one.told() for one in tuned],
            "profile": told_profile(profile, max(one.costs.most_nodes for one in tuned)),
            "target": dict(target.identity),
            "drafter": {"directory": str(drafter_directory), **drafter.config.to_json()},
            "settings": {
                **asdict(source),
                "prompts": [str(path) for path in prompt_files],
                "prompts_used": len(asked),
                "batch_sizes": sizes,
                "compile": compiled,
                "max_new_tokens": max_new_tokens,
                "repeats": repeats,
                "device": device,
                "torch_threads": torch.get_num_threads(),
            },
            "skipped": [one._asdict() for one in skipped],
            "provenance": provenance(command),
        }
        plot(found, folder / PLOT)
        write_text(folder / "report.md", report(found, PLOT))
        write_json(folder / "tune.json", found)
    return found


def _checked(batch_sizes: Sequence[int], max_new_tokens: int, repeats: int) -> list[int]:
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes must be numbers from 1 up, not {list(batch_sizes)}")
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens must be at least 2, for a pass to time, not {max_new_tokens}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    return sorted(set(batch_sizes))
