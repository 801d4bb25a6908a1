"""``specdec parity``: is what was trained what is decoded, and what vLLM makes of the export, logit by logit.

With ``--engine vllm`` a real vLLM answers the same prompts, and what it accepts in every pass is compared; flags of
``vllm serve`` go after ``--``.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from specdec.arguments import parse, target_shorthand
from specdec.decoding import check_pair, warn_unless_made_for
from specdec.drafter import Drafter
from specdec.embedded.source import TargetSource
from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.skipping import first_turns
from specdec.export import NotServable, export_drafter, subject_of
from specdec.export.arguments import load_as_stored
from specdec.export.checkpoint import check_unchanged
from specdec.export.shared import rounded, warn_if_rounded
from specdec.export.switches import VLLM
from specdec.files import write_json
from specdec.imports import flags
from specdec.parity.asked import ask_all, engine_asked
from specdec.parity.differences import Finding, differences, format_at
from specdec.parity.passes import compare_passes
from specdec.parity.report import as_json, engine_table, table
from specdec.parity.run import Parity, parity
from specdec.parity.texts import answered, default_prompts
from specdec.provenance import provenance
from specdec.serving.arguments import add_launched, split
from specdec.serving.drafted import Drafted
from specdec.signals import Asked
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
    out.add_argument("--engine", type=Literal["vllm"] | None, default=None, help="a real one, too: vllm")
    out.add_argument("--url", type=str | None, default=None, help="a vLLM that serves the drafter; by default one is started for it")  # fmt: skip # noqa: E501
    add_launched(out, port=0)
    out.add_argument("--out", type=str | None, default=None, help=f"directory for {REPORT}; no older one in it")
    return out


def main(argv: list[str]) -> int:
    """Run the command; status 1 if anything differs or the export could not be compared.

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; or the engine cannot be asked.
    """
    ours, extra = split(argv)
    arguments = parser()
    args = parse(arguments, target_shorthand(ours))
    where = engine_asked(arguments, args, extra)
    report = Path(args.out) / REPORT if args.out else None
    if report is not None and report.exists():
        raise ValueError(f"{report} exists already: choose another place or remove it first")
    if args.exported is not None and not Path(args.exported).is_dir():
        raise ValueError(f"{args.exported}: no such directory")
    if args.exported is not None:
        check_unchanged(Path(args.exported))
    if where and args.exported and (other := format_at(Path(args.exported)).engine) != VLLM:
        raise ValueError(f"{args.exported}: exported for {other}: give --engine vllm an export of --format vllm")
    prompts = load_prompts(args.prompts, args.limit) if args.prompts else default_prompts(args.limit)
    drafter = load_as_stored(args.drafter)
    target = args.target.load(args.device)
    target.prove()
    room = args.max_new_tokens + (args.draft_tokens if where else 0)
    asked, _ = first_turns(target, prompts, room)
    dtype = str(target.dtype).removeprefix("torch.")
    if where and dtype == "float64":
        raise ValueError("vLLM has no float64: give --target.dtype float32 with --engine vllm")
    out = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory(prefix="specdec-parity-") as scratch:
        directory = Path(args.exported) if args.exported else Path(scratch) / "served"
        found, method = _three_ways(args, drafter, target, asked, directory)
        _show(found, dtype, out)
        about = {"drafter": args.drafter, "target": target.identity, "exported": args.exported, "method": method}
        about |= {"dtype": dtype, "texts": len(asked), "provenance": provenance(["specdec", "parity", *flags(), *argv])}
        if where and found.lacking is None:
            made = Drafted(directory.resolve(), method)
            try:
                answers = ask_all(where, made, dtype, asked, args.max_new_tokens, Path(scratch) / "vllm.log")
            except Asked as to_end:
                return to_end.status
            except ValueError as error:
                _write(report, found._replace(failed=" ".join(str(error).split())), about)
                raise
            with Console(stderr=True).status("comparing") as status:
                engine = compare_passes(target, drafter, answers, found.allowed, status.update)
            found = found._replace(engine=engine)
            out.print(engine_table(engine, dtype))
    _write(report, found, about)
    out.print(_told(found), markup=False, highlight=False)
    return 0 if found.holds else 1


def _write(report: Path | None, found: Parity, about: dict[str, Any]) -> None:
    if report is not None:
        write_json(report, as_json(found, **about))


def _three_ways(
    args: Namespace, drafter: Drafter, target: Target, asked: list[list[int]], directory: Path
) -> tuple[Parity, str]:
    """Training, decoding and the export; and the method that serves it."""
    with Console(stderr=True).status("exporting") as status:
        refused, subject = None, subject_of(drafter, target)
        findings: list[Finding] = []
        if args.exported:
            warn_unless_made_for(target, drafter)
            rounding = warn_if_rounded(drafter, target, subject)
            findings = differences(directory, drafter, target)
        else:
            refused, rounding = _refusal(drafter, target, directory), rounded(drafter, target, subject)
        check_pair(target, drafter.to(target.device, target.dtype))  # only now: what is exported keeps its dtype
        texts = answered(target, asked, args.max_new_tokens, args.depth)
        exported = None if refused else directory
        found = parity(target, drafter, texts, args.depth, exported, subject.method, status.update)
    found = found._replace(lacking=refused or found.lacking, findings=tuple(findings), rounded=rounding)
    return found, subject.method


def _refusal(drafter: Drafter, target: Target, directory: Path) -> str | None:
    """Export for vLLM; why it cannot be done."""
    try:
        export_drafter(drafter, target, directory)
    except NotServable as error:
        return str(error)
    return None


def _show(found: Parity, dtype: str, out: Console) -> None:
    out.print(table(found.rows, dtype))
    for finding in found.findings:
        out.print(f"the export is not what this drafter exports: {finding.text}", markup=False, highlight=False)
    if found.lacking:
        out.print(f"the export was not compared: {found.lacking}", markup=False, highlight=False)


def _told(found: Parity) -> str:
    if found.holds:
        return "what was trained is what is decoded and what " + ("vLLM serves" if found.engine else "is served")
    if not all(row.equal for row in found.rows):
        why = f"; rounded in training, {found.rounded}: --target.dtype compares in that dtype" if found.rounded else ""
        return f"NOT THE SAME: see above{why}"
    if found.blurred:
        return "NOT THE SAME: see above; what that does drowns in this precision, --target.dtype float32 shows it"
    if found.engine is None:
        return "NOT SERVED: what was trained is what is decoded, and there is no export that an engine reads so"
    if found.engine.different:
        return f"NOT THE SAME: {found.engine.different} of {found.engine.tokens} tokens are not this target's"
    if all(one.different == 0 for one in found.engine.positions):
        close = sum(one.rounding for one in found.engine.positions)
        return (
            f"NOT THE SAME: in {found.engine.fewer} of {close} close passes vLLM accepts fewer drafts, which rounding "
            f"does once in {1 / found.engine.chance:.0e} times"
        )
    return "NOT THE SAME: vLLM accepts other drafts than these, see above"
