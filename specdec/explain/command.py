"""``specdec explain``: where acceptance is lost, bar by bar, from perfect drafts to what decoding accepts.

With ``--engine vllm`` a real vLLM answers the same prompts; flags of ``vllm serve`` go after ``--``.
"""

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from specdec.arguments import parse, target_shorthand
from specdec.compose import new_run
from specdec.decoding import Chain
from specdec.evaluation.arguments import measuring_parser
from specdec.evaluation.conversation import template_sha256
from specdec.evaluation.pair import Pair, load_pair
from specdec.evaluation.prompts import Prompt, fingerprint, load_prompts
from specdec.evaluation.skipping import Skipped, first_turns
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED
from specdec.explain.beyond import ENGINE, of_engine, perturbed
from specdec.explain.plot import plot
from specdec.explain.report import printed, report
from specdec.explain.run import Asked, explain
from specdec.explain.waterfall import Level
from specdec.export import FORMATS, export_drafter, subject_of
from specdec.export.arguments import load_as_stored
from specdec.export.checkpoint import check_unchanged
from specdec.export.switches import VLLM
from specdec.files import read_json, staged_directory, write_json, write_text
from specdec.imports import flags
from specdec.parity.asked import ask_all, engine_asked
from specdec.parity.differences import format_at
from specdec.parity.exported import opened
from specdec.provenance import provenance
from specdec.robustness.conditions import KINDS
from specdec.robustness.filler import filler
from specdec.robustness.parse import parse_conditions
from specdec.robustness.setting import Setting
from specdec.serving.arguments import add_server, split
from specdec.serving.drafted import Drafted
from specdec.serving.launch import Launch
from specdec.signals import Asked as AskedToEnd
from specdec.target import Target

NEW = "new"
REPORT, FIGURE, NUMBERS = "report.md", "explain.png", "explain.json"


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = measuring_parser("explain", __doc__)
    out.add_argument("--depth", type=int, default=5, help="drafts a pass, in a chain")
    out.add_argument("--perturb", type=str, nargs="*", default=[], help=f"decode also under conditions of specdec robustness: {', '.join(KINDS)}")  # fmt: skip # noqa: E501
    out.add_argument("--exported", type=str | None, default=None, help=f"a checkpoint of the drafter to draft with, too, or {NEW}: export it now and throw that away")  # fmt: skip # noqa: E501
    out.add_argument("--format", type=str, default="vllm", help=f"of --exported {NEW}: {', '.join(FORMATS)}")
    out.add_argument("--engine", type=Literal["vllm"] | None, default=None, help="ask a real one, too: vllm")
    out.add_argument("--url", type=str | None, default=None, help="a vLLM that serves the drafter with --depth drafts a pass; by default one is started for it")  # fmt: skip # noqa: E501
    add_server(out, port=0)
    out.add_argument("--out", type=str | None, default=None, help="directory for the results; it must not exist yet")
    return out


def main(argv: list[str]) -> int:
    """Run the command; status 1 if the bars do not add up to what decoding accepts.

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; or the engine cannot be asked.
    """
    ours, extra = split(argv)
    arguments = parser()
    args = parse(arguments, target_shorthand(ours))
    _check(args)
    conditions = parse_conditions(args.perturb) if args.perturb else []
    where = engine_asked(arguments, args, extra, args.depth)
    out = Path(args.out) if args.out else new_run("explain")
    prompts = load_prompts(args.prompts, args.limit, args.layouts)
    pair = load_pair(args.target, args.drafter, args.device, args.other_target)
    target = pair.target
    dtype = str(target.dtype).removeprefix("torch.")
    if where and dtype == "float64":
        raise ValueError("vLLM has no float64: give --target.dtype float32 with --engine vllm")
    room = args.max_new_tokens + args.depth
    found, skipped = first_turns(target, prompts, room, args.depth + 1)
    left = {one.prompt_id for one in skipped}
    prompts = [prompt for prompt in prompts if prompt.prompt_id not in left]
    setting = Setting(target, prompts, args.max_new_tokens, args.depth + 1, documents=filler())
    others = perturbed(conditions, setting)
    with staged_directory(out) as folder, tempfile.TemporaryDirectory(prefix="specdec-explain-") as scratch:
        made = _exported(args, target, Path(scratch) / "served", bool(where))
        served = opened(made.directory, made.method, target) if made else None
        asked = Asked(found, [prompt.prompt_id for prompt in prompts], args.max_new_tokens, args.depth)
        measured = explain(pair, asked, others, served)
        waterfall, stopped, failed = measured.waterfall, None, None
        if where and made:
            try:
                level = _of_engine(where, made, dtype, asked, measured.texts, target, Path(scratch) / "vllm.log")
                waterfall.levels.append(level)
            except AskedToEnd as to_end:
                stopped = to_end.status
            except ValueError as error:
                failed = error  # what was measured before is kept
        about = _about(args, pair, measured.prompt_ids, skipped, prompts, [*flags(), *argv])
        about["engine_failed"] = " ".join(str(failed).split()) if failed else None
        told = {"version": 1, "depth": args.depth, **waterfall.told(args.depth), **about}
        plot(told, folder / FIGURE)
        write_text(folder / REPORT, report(told, FIGURE))
        write_json(folder / NUMBERS, told)
    printed(told, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150))
    if failed is not None:
        raise failed
    return stopped or (0 if waterfall.check.holds else 1)


def _check(args: Namespace) -> None:
    Chain(args.depth)
    if args.max_new_tokens < 2:
        raise ValueError(f"max_new_tokens must be at least 2, for a pass to measure, not {args.max_new_tokens}")
    if args.format not in FORMATS:
        raise ValueError(f"unknown format {args.format!r}: choose from {', '.join(FORMATS)}")
    if args.out and Path(args.out).exists():
        raise ValueError(f"{args.out} exists already: choose another place or remove it first")
    if args.exported not in (None, NEW):
        if not Path(args.exported).is_dir():
            raise ValueError(f"{args.exported}: no such directory; --exported {NEW} exports the drafter now")
        check_unchanged(Path(args.exported))


def _exported(args: Namespace, target: Target, scratch: Path, for_engine: bool) -> Drafted | None:
    """The checkpoint that is measured, too; an engine needs one."""
    if args.exported is None and not for_engine:
        return None
    stored = load_as_stored(args.drafter)
    method = subject_of(stored, target).method
    directory = scratch
    if args.exported in (None, NEW):
        export_drafter(stored, target, scratch, args.format, served=args.target)
    else:
        directory = Path(args.exported).resolve()
    if for_engine and (other := format_at(directory).engine) != VLLM:
        raise ValueError(f"{args.exported}: exported for {other}: give --engine vllm an export of --format vllm")
    return Drafted(directory, method)


def _of_engine(
    where: Launch | str, made: Drafted, dtype: str, asked: Asked, texts: list[Any], target: Target, log: Path
) -> Level:
    answers = ask_all(where, made, dtype, [text.ids[: text.prompt] for text in texts], asked.max_new_tokens, log)
    if len(answers[0].accepted_at) != asked.depth:
        raise ValueError(
            f"vLLM drafts {len(answers[0].accepted_at)} tokens a pass, not {asked.depth}: give that --depth"
        )
    end = target.eos_token_ids
    accepted = [of_engine(one, text, asked.max_new_tokens, end) for one, text in zip(answers, texts, strict=True)]
    return Level(ENGINE, accepted)


def _about(
    args: Namespace, pair: Pair, used: list[str], skipped: list[Skipped], prompts: list[Prompt], argv: list[str]
) -> dict[str, Any]:
    target, drafter, made_for_each_other = pair
    return {
        "prompts": used,
        "without_a_pass": [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in used],
        "skipped": [one._asdict() for one in skipped],
        "target": dict(target.identity),
        "drafter": {
            "directory": str(args.drafter),
            "weights_sha256": read_json(Path(args.drafter) / "config.json")["weights_sha256"],
            **drafter.config.to_json(),
        },
        "settings": {
            **asdict(args.target),
            "prompts": [str(path) for path in args.prompts],
            "max_new_tokens": args.max_new_tokens,
            "depth": args.depth,
            "prompts_sha256": fingerprint(prompts),
            "chat_template_sha256": template_sha256(target.tokenizer, prompts),
            "perturb": list(args.perturb),
            "exported": args.exported,
            "format": args.format,
            "engine": args.engine,
            "device": args.device,
            "drafter_made_for_this_target": made_for_each_other,
            "intervals": f"{METHOD}, {RESAMPLES} resamples, seed {SEED}",
            "torch_threads": torch.get_num_threads(),
        },
        "provenance": provenance(["specdec", "explain", *argv]),
    }
