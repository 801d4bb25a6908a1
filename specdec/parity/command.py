"""``specdec parity``: is what was trained what is decoded, and what vLLM makes of the export, logit by logit."""

import sys
import tempfile
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.console import Console

from specdec.arguments import parse, target_shorthand
from specdec.decoding import check_pair, warn_unless_made_for
from specdec.drafter import Drafter
from specdec.embedded.source import TargetSource
from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.skipping import first_turns
from specdec.export import NotServable, export_drafter, subject_of
from specdec.export.arguments import load_as_stored
from specdec.export.shared import warn_if_rounded
from specdec.files import write_json
from specdec.imports import flags
from specdec.parity.differences import differences
from specdec.parity.report import as_json, table
from specdec.parity.run import Parity, parity
from specdec.parity.texts import answered, default_prompts
from specdec.provenance import provenance
from specdec.target import Target

REPORT = "parity.json"


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = ArgumentParser(prog="specdec parity", description=__doc__, exit_on_error=False, allow_abbrev=False)
    out.add_argument("--config", action="config", help="a YAML file with any of the arguments below")
    out.add_argument("--target", type=TargetSource, default=TargetSource())
    out.add_argument("--drafter", type=str, required=True, help="the drafter's directory")
    out.add_argument("--exported", type=str | None, default=None, help="a checkpoint of it; by default it is exported for vLLM and thrown away")  # fmt: skip # noqa: E501
    out.add_argument("--prompts", type=str, nargs="+", default=[], help="as of specdec evaluate; by default three beginnings of Python files")  # fmt: skip # noqa: E501
    out.add_argument("--limit", type=int | None, default=4, help="use the first prompts only")
    out.add_argument("--max_new_tokens", type=int, default=32, help="new tokens per answer")
    out.add_argument("--depth", type=int, default=7, help="deepest draft compared; the first is 0")
    out.add_argument("--device", type=str, default="cpu")
    out.add_argument("--out", type=str | None, default=None, help=f"directory for {REPORT}; no older one in it")
    return out


def main(argv: list[str]) -> int:
    """Run the command; status 1 if anything differs or the export could not be compared.

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong.
    """
    args = parse(parser(), target_shorthand(argv))
    report = Path(args.out) / REPORT if args.out else None
    if report is not None and report.exists():
        raise ValueError(f"{report} exists already: choose another place or remove it first")
    if args.exported is not None and not Path(args.exported).is_dir():
        raise ValueError(f"{args.exported}: no such directory")
    prompts = load_prompts(args.prompts, args.limit) if args.prompts else default_prompts(args.limit)
    drafter = load_as_stored(args.drafter)
    target = args.target.load(args.device)
    target.prove()
    asked, _ = first_turns(target, prompts, args.max_new_tokens)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, console.status("exporting") as status:
        directory, refused = Path(args.exported) if args.exported else Path(folder) / "served", None
        subject = subject_of(drafter, target)
        if args.exported:
            warn_unless_made_for(target, drafter)
            warn_if_rounded(drafter, target, subject)
            findings = differences(directory, drafter, target)
        else:
            refused, findings = _refusal(drafter, target, directory), []
        method = subject.method
        check_pair(target, drafter.to(target.device, target.dtype))  # only now: what is exported keeps its dtype
        texts = answered(target, asked, args.max_new_tokens, args.depth)
        found = parity(target, drafter, texts, args.depth, None if refused else directory, method, status.update)
    found = found._replace(lacking=refused or found.lacking)
    dtype = str(target.dtype).removeprefix("torch.")
    if report is not None:
        about = {"drafter": args.drafter, "target": target.identity, "exported": args.exported, "method": method}
        about |= {"dtype": dtype, "texts": len(texts), "provenance": provenance(["specdec", "parity", *flags(), *argv])}
        write_json(report, as_json(found, findings, **about))
    _show(found, findings, dtype)
    return 0 if found.holds else 1


def _refusal(drafter: Drafter, target: Target, directory: Path) -> str | None:
    """Export for vLLM; why it cannot be done."""
    try:
        export_drafter(drafter, target, directory)
    except NotServable as error:
        return str(error)
    return None


def _show(found: Parity, findings: list[str], dtype: str) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    console.print(table(found.rows, dtype))
    for line in findings:
        console.print(f"the export is not what this drafter exports: {line}", markup=False, highlight=False)
    if found.lacking:
        console.print(f"the export was not compared: {found.lacking}", markup=False, highlight=False)
    console.print(_told(found), markup=False, highlight=False)


def _told(found: Parity) -> str:
    if found.holds:
        return "what was trained is what is decoded and what is served"
    if all(row.equal for row in found.rows):
        return "NOT SERVED: what was trained is what is decoded, and there is no export that an engine reads so"
    return "NOT THE SAME: see above"
