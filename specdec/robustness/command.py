"""``specdec robustness``: how much of its acceptance a drafter keeps when its input is other than usual.

Every prompt is decoded clean and under every condition, losslessly: what a condition does to the text, target and
drafter both see.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from specdec.arguments import parse, target_shorthand
from specdec.compose import new_run
from specdec.decoding import parse_growth
from specdec.evaluation.arguments import measuring_parser
from specdec.evaluation.conversation import template_sha256
from specdec.evaluation.pair import load_pairs
from specdec.evaluation.prompts import fingerprint, load_prompts
from specdec.evaluation.several import labelled, told
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED
from specdec.files import sha256, staged_directory, write_json
from specdec.imports import flags
from specdec.provenance import provenance
from specdec.robustness.filler import filler
from specdec.robustness.parse import parse_conditions
from specdec.robustness.partial import Partial
from specdec.robustness.plot import plot
from specdec.robustness.record import comparison, record
from specdec.robustness.report import print_report, write_report
from specdec.robustness.run import measure, plan, plan_clean
from specdec.robustness.setting import Setting

log = logging.getLogger(__name__)

_FREE = {"source", "prompts", "filler", "batch_size", "torch_threads", "intervals"}  # of settings: they decide no count
RECORD, COMPARISON, REPORT, FIGURE = "robustness.json", "comparison.json", "report.md", "robustness.png"


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = measuring_parser("robustness", __doc__, several=True)
    out.add_argument("--labels", type=str, nargs="*", default=[], help="names of the drafters; by default of their directories")  # fmt: skip # noqa: E501
    out.add_argument("--growth", type=str, default="chain:depth=5", help="one, as of specdec evaluate")
    out.add_argument("--conditions", type=str, nargs="*", default=[], help="no_bos, template:family=chatml, context:tokens=4096, noise_hidden:alpha=0.5, ...; a name alone is all of its kind, none is all there are")  # fmt: skip # noqa: E501
    out.add_argument("--system", type=str | None, default=None, help="system prompt of all conversations, the clean ones too")  # fmt: skip # noqa: E501
    out.add_argument("--thinking", type=bool | None, default=None, help="the chat template's enable_thinking, in the clean run too")  # fmt: skip # noqa: E501
    out.add_argument("--filler", type=str | None, default=None, help="text that contexts are filled with; by default the standard library's sources that the embedded target did not train on")  # fmt: skip # noqa: E501
    out.add_argument("--batch_size", type=int, default=8, help="sequences decoded side by side; fewer where texts are long")  # fmt: skip # noqa: E501
    out.add_argument("--plain", type=bool, default=False, help="decode plainly too, and count identical outputs")
    out.add_argument("--seed", type=int, default=0, help="of noise and temperatures")
    out.add_argument("--out", type=str | None, default=None, help="directory for the results; a new one")
    return out


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; nothing is written then.
    """
    args = parse(parser(), target_shorthand(argv))
    out = Path(args.out) if args.out else new_run("robustness")
    robustness(args, out, ["specdec", "robustness", *flags(), *argv])
    return 0


def robustness(args: Namespace, out: Path, command: list[str]) -> list[dict[str, Any]]:
    """Measure and write the results into ``out``, which appears when they are whole.

    Returns:
        What ``robustness.json`` of every drafter holds.

    Raises:
        ValueError: as of :func:`main`.
    """
    conditions, growth = parse_conditions(args.conditions), parse_growth(args.growth)
    if args.batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {args.batch_size}")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"seed is {args.seed}: it must lie from 0 to 2**31 - 1")
    labels = labelled(args.drafter, args.labels)
    prompts = load_prompts(args.prompts, args.limit, args.layouts)
    documents = filler(args.filler)
    pairs = load_pairs(args.target, args.drafter, args.device, args.other_target)
    target, drafters = pairs[0].target, [pair.drafter for pair in pairs]
    nodes = growth.nodes_drafted + 1
    setting = Setting(
        target, prompts, args.max_new_tokens, nodes,
        system=args.system, thinking=args.thinking, documents=documents,
    )  # fmt: skip
    settings = {
        **asdict(args.target),
        "prompts": list(args.prompts),
        "prompts_sha256": fingerprint(prompts),
        "max_new_tokens": args.max_new_tokens,
        "growth": growth.name,
        "growth_config": growth.describe(),
        "system": args.system,
        "thinking": args.thinking,
        "chat_template_sha256": template_sha256(target.tokenizer, prompts),
        "filler": args.filler,
        "filler_sha256": sha256(args.filler) if args.filler else None,
        "seed": args.seed,
        "device": args.device,
        "batch_size": args.batch_size,
        "plain": args.plain,
        "intervals": f"{METHOD}, {RESAMPLES} resamples, seed {SEED}",
        "torch_threads": torch.get_num_threads(),
    }
    made = provenance(command)
    whose = [told(*one) for one in zip(labels, args.drafter, pairs, strict=True)]
    deciding = {name: value for name, value in settings.items() if name not in _FREE}
    deciding |= {"target": target.identity["fingerprint"]} | {
        one: made[one] for one in ("versions", "git_commit", "python")
    }
    designs = [(one["weights_sha256"], drafter.config.to_json()) for one, drafter in zip(whose, drafters, strict=True)]
    partial = Partial(Path(f"{out}.partial"), deciding, designs)
    with staged_directory(out) as folder, _telling(partial):
        plans = [plan_clean(setting), *(plan(condition, setting) for condition in conditions)]
        found = measure(
            setting, drafters, growth, plans,
            batch=args.batch_size, seed=args.seed, plain=args.plain, partial=partial,
        )  # fmt: skip
        context = {"target": dict(target.identity), "settings": settings, "provenance": made}
        own = [[row[index] for row in found] for index in range(len(drafters))]
        records = [record(one, outcomes, **context) for one, outcomes in zip(whose, own, strict=True)]
        compared = comparison(labels, own) if len(drafters) > 1 else None
        plot(records, compared, folder / FIGURE)
        write_report(folder / REPORT, records, compared, FIGURE)
        if compared is not None:
            write_json(folder / COMPARISON, compared | context)
        for label, one in zip(labels, records, strict=True):
            write_json(folder / RECORD if compared is None else folder / label / RECORD, one)
    partial.end()
    print_report(records, compared, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 190))
    return records


@contextlib.contextmanager
def _telling(partial: Partial) -> Iterator[None]:
    """Say what is kept if this ends early."""
    if partial.folder.is_dir():
        log.info("going on with what is kept in %s, as far as it was measured with these settings", partial.folder)
    try:
        yield
    except BaseException:
        if partial.folder.is_dir():
            out = str(partial.folder).removesuffix(".partial")
            log.info("what was measured is kept in %s: the same command with --out %s goes on", partial.folder, out)
        raise
