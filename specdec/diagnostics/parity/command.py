"""``specdec parity``: is what was trained what is decoded, and what vLLM makes of the export, logit by logit."""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.decoding import check_pair, warn_unless_made_for
from specdec.diagnostics.anchors import answered_texts
from specdec.diagnostics.parity.compare import NO_NUMBER, Compared, compare
from specdec.diagnostics.parity.vllm import EnginePasses, ask_all, compare_passes, vllm_to_ask
from specdec.drafter import Drafter, load
from specdec.engines.serve import DrafterCheckpoint, VllmLaunch
from specdec.evaluation.prompts import Prompt, first_turns, load_prompts
from specdec.export import FORMATS, NotServable, export_drafter, subject_of
from specdec.export.checkpoint import CONFIG, OURS, check_unchanged
from specdec.export.formats import Format, ServingTarget, format_of
from specdec.export.switches import VLLM
from specdec.export.tensors import canonical
from specdec.export.write import warn_if_rounded
from specdec.target import Target, TargetSource
from specdec.utils.files import read_json, write_json
from specdec.utils.machine import provenance
from specdec.utils.progress import progress
from specdec.utils.signals import Asked

REPORT = "parity.json"
FINE = 1e-3  # a share below which no part of a drafter is lost unseen
NOBODY = ServingTarget("", [], 1)  # what a checkpoint is served with says nothing of the drafter
PROMPTS = (  # which the embedded target knows
    "def read_json(path):\n    with open(path, encoding='utf-8') as file:\n",
    "import re\nimport sys\n\n\nclass Parser:\n    def __init__(self, text):\n        self.text = text\n",
    "for index in range(",
)


def parity(
    *,
    drafter: str,
    target: TargetSource = TargetSource(),  # noqa: B008  frozen
    exported: Path | None = None,
    prompts: list[str] = [],  # noqa: B006  read only
    limit: int | None = 4,
    max_new_tokens: int = 32,
    depth: int = 7,
    device: str = "cpu",
    engine: Literal["vllm"] | None = None,
    url: str | None = None,
    vllm: str | None = None,
    draft_tokens: int | None = None,
    timeout: float | None = None,
    vllm_args: list[str] = [],  # noqa: B006
    out: Path | None = None,
) -> int:
    """Is what was trained what is decoded, and what vLLM makes of the export, logit by logit?

    Training's unroll, cached decoding and the exported files, as an independent reference of vLLM reads them, are
    compared at places of the same texts. With --engine vllm a real vLLM answers the same prompts, and what it accepts
    in every pass is compared, too. The exit status is 1 if anything differs or the export cannot be compared.

    Example: specdec parity --drafter runs/a/drafter --target Qwen/Qwen3-4B --engine vllm -- --max-model-len 4096

    Args:
        drafter: the drafter's directory
        target: the model that it drafts for; --target.dtype is the dtype of everything compared
        exported: a checkpoint of the drafter; by default it is exported for vLLM and thrown away
        prompts: as of specdec evaluate; by default three beginnings of Python files
        limit: use the first prompts only
        max_new_tokens: new tokens per answer
        depth: deepest draft compared; the first is 0
        device: where target and drafter run
        engine: a real one, too
        url: a vLLM that serves the drafter; by default one is started for it
        vllm: a Python that has vLLM, or its executable; by default as of specdec serve
        draft_tokens: drafts a pass of the vLLM that is started
        timeout: seconds until it must be healthy
        vllm_args: flags for vllm serve: give them after --
        out: a directory for parity.json; no older one in it

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; or the engine cannot be asked.
    """
    where = vllm_to_ask(target, engine, url, vllm_args, vllm=vllm, draft_tokens=draft_tokens, timeout=timeout)
    report = None if out is None else out / REPORT
    if report is not None and report.exists():
        raise ValueError(f"{report} exists already: choose another place or remove it first")
    if exported is not None:
        if not exported.is_dir():
            raise ValueError(f"{exported}: no such directory")
        check_unchanged(exported)
        if where and (other := format_at(exported).engine) != VLLM:
            raise ValueError(f"{exported}: exported for {other}: give --engine vllm an export of --format vllm")
    if depth < 0 or max_new_tokens < depth + 3 or (limit is not None and limit < 1):
        least = f"depth must be at least 0, max_new_tokens at least {depth + 3} for it, limit at least 1"
        raise ValueError(f"depth is {depth}, max_new_tokens is {max_new_tokens}, limit is {limit}: {least}")
    built_in = [Prompt(f"built-in-{n}", None, None, None, text) for n, text in enumerate(PROMPTS[:limit])]
    own, model = load(drafter, dtype=None), target.load(device)
    model.prove()
    dtype = str(model.dtype).removeprefix("torch.")
    if where and dtype == "float64":
        raise ValueError("vLLM has no float64: give --target.dtype float32 with --engine vllm")
    drafts = (draft_tokens or VllmLaunch.draft_tokens) if where else 0
    asked, _ = first_turns(model, load_prompts(prompts, limit) if prompts else built_in, max_new_tokens + drafts)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False)
    with tempfile.TemporaryDirectory(prefix="specdec-parity-") as scratch:
        directory, method = exported or Path(scratch) / "served", subject_of(own, model).method
        lacking = _export(own, model, directory, exported is not None)
        named = differences(exported, own, model) if exported else []
        check_pair(model, own.to(model.device, model.dtype))  # only now: what is exported keeps its dtype
        texts = answered_texts(model, [(str(n), ids) for n, ids in enumerate(asked)], max_new_tokens, to_end=False)
        with progress("comparing", "texts", len(texts)) as done:
            served = None if lacking else directory
            compared = compare(model, own, texts, depth, served, method, lambda: done(1))
        compared = compared._replace(lacking=lacking or compared.lacking)
        _show(compared, named, dtype, console)
        passes, failed = None, None
        if where and compared.lacking is None:
            try:
                drafted = DrafterCheckpoint(directory.resolve(), method)
                answers = ask_all(where, drafted, dtype, asked, max_new_tokens, Path(scratch) / "vllm.log")
                passes = compare_passes(model, own, answers, compared.allowed)
                console.print(_engine_table(passes, dtype))
            except Asked as to_end:
                return to_end.status
            except ValueError as error:  # what was compared before is not lost
                failed = error
    verdict = _verdict(compared, named, passes)
    if report is not None:
        rows = [row._asdict() | {"equal": row.equal, "verdict": row.verdict} for row in compared.rows]
        write_json(report, {
            "drafter": drafter,
            "target": model.identity,
            "exported": exported and str(exported),
            "method": method,
            "dtype": dtype,
            "texts": len(texts),
            "holds": verdict is None and failed is None,
            "export_not_compared": compared.lacking,
            "differences": [one.text for one in named],
            "rows": [{key: None if value == NO_NUMBER else value for key, value in row.items()} for row in rows],
            "engine": passes and passes.as_json(),
            "engine_failed": failed and " ".join(str(failed).split()),
            "provenance": provenance(),
        })  # fmt: skip
    if failed is not None:
        raise failed
    same = f"what was trained is what is decoded and what {'vLLM serves' if passes else 'is served'}"
    console.print(verdict or same, markup=False)
    return 1 if verdict else 0


def _export(drafter: Drafter, target: Target, into: Path, given: bool) -> str | None:
    """Export the drafter unless an export is given; why it cannot be."""
    if given:
        warn_unless_made_for(target, drafter)
        warn_if_rounded(drafter, target, subject_of(drafter, target))
        return None
    try:
        export_drafter(drafter, target, into)
    except NotServable as error:
        return str(error)
    return None


def _verdict(compared: Compared, named: list["ExportDifference"], engine: EnginePasses | None) -> str | None:
    """What is not one and the same, the worst first; None if everything is."""
    if not compared.equal:
        return "NOT THE SAME: see above"
    if compared.allowed > FINE and any(one.differs for one in named):
        return "NOT THE SAME: see above; what that does drowns in this precision, --target.dtype float32 shows it"
    if compared.lacking is not None:
        return "NOT SERVED: what was trained is what is decoded, and there is no export that an engine reads so"
    if engine is None or engine.holds:
        return None
    if engine.different:
        return f"NOT THE SAME: {engine.different} of {engine.tokens} tokens are not this target's"
    if any(one.different for one in engine.positions):
        return "NOT THE SAME: vLLM accepts other drafts than these, see above"
    odds = f"{1 / engine.chance:.0e}"
    return f"NOT THE SAME: close passes fall to one side in vLLM, as rounding does once in {odds} times"


class ExportDifference(NamedTuple):
    """One difference of an export's files from what the drafter exports."""

    text: str
    differs: bool = True
    """False for keys that are there besides or are left out, unless they switch something on."""


def format_at(directory: Path) -> Format:
    """What a checkpoint says that it is, else what it looks like.

    Raises:
        ValueError: its files cannot be read.
    """
    ours = read_json(directory / OURS) if (directory / OURS).is_file() else {}
    return FORMATS.get(str(ours.get("exported_as"))) or format_of(read_json(directory / CONFIG))


def differences(directory: Path, drafter: Drafter, target: Target) -> list[ExportDifference]:
    """Every key of ``config.json`` and every tensor that is there and should not be, or lacks, or differs.

    This goes by the exporter's own tables: it names what is behind a difference, and proves nothing.
    """
    try:
        return list(_differences(directory, drafter, target))
    except (ValueError, SafetensorError) as error:
        return [ExportDifference(" ".join(str(error).split()))]


def _differences(directory: Path, drafter: Drafter, target: Target) -> Iterator[ExportDifference]:
    def by_name(tensors: dict[str, Tensor]) -> dict[str | None, tuple[str, Tensor]]:
        return {canonical(name): (name, value) for name, value in tensors.items()}

    subject, chosen = subject_of(drafter, target), format_at(directory)
    keys = chosen.flat(read_json(directory / CONFIG))
    due = json.loads(json.dumps(chosen.flat(chosen.config(subject, NOBODY))))
    for key, value in ((key, value) for key, value in due.items() if key != "architectures"):
        if key not in keys:
            text = f"config.json lacks {key}, which is {json.dumps(value)} for this drafter"
            yield ExportDifference(text, differs=value is True)
        elif keys[key] != value:
            text = f"config.json: {key} is {json.dumps(keys[key])}, for this drafter {json.dumps(value)}"
            yield ExportDifference(text)
    if more := sorted(set(keys) - set(due)):
        yield ExportDifference(f"config.json has also {', '.join(more)}", differs=False)
    wanted, found = by_name(chosen.tensors(drafter, subject)), dict[str | None, tuple[str, Tensor]]()
    for file in sorted(directory.glob("*.safetensors")):
        found |= by_name(load_file(file))
    yield from (ExportDifference(f"{wanted[known][0]} is not in the file") for known in wanted if known not in found)
    for known, (name, value) in found.items():
        own = wanted[known][1].to(value.dtype) if known in wanted else None
        if own is None:
            yield ExportDifference(f"{name} is in the file, this drafter exports no such tensor")
        elif own.shape != value.shape:
            yield ExportDifference(f"{name} is {list(value.shape)}, of this drafter {list(own.shape)}")
        elif not torch.equal(own, value):
            yield ExportDifference(f"{name} differs in {int((own != value).sum())} of {own.numel()} numbers")


def _show(compared: Compared, named: list[ExportDifference], dtype: str, console: Console) -> None:
    """A line for each pair and place, and one for each run of depths that differs; and what is told by name."""
    allowed = compared.rows[0].allowed
    title = f"log-probabilities in {dtype}: a difference of up to {allowed:g} of their range is rounding"
    table = Table("pair", "place", "depth", "difference", "of the range", "same best token", "verdict", title=title)
    groups = itertools.groupby(compared.rows, lambda row: (row.pair, row.place, row.verdict))
    for (pair, place, verdict), group in groups:
        run = list(group)
        depths = str(run[0].depth) if len(run) == 1 else f"{run[0].depth} to {run[-1].depth}"
        figures = f"{max(row.gap for row in run):.1e}", f"{max(row.share for row in run):.1e}"
        agree = f"{sum(row.agree for row in run)} of {sum(row.slots for row in run)}"
        table.add_row(pair, place, depths, *figures, agree, escape(verdict))
    console.print(table)
    for one in named:
        console.print(f"the export is not what this drafter exports: {one.text}", markup=False)
    if compared.lacking:
        console.print(f"the export was not compared: {compared.lacking}", markup=False)


def _engine_table(found: EnginePasses, dtype: str) -> Table:
    title = f"{found.tokens} greedy tokens of vLLM, beside cached decoding in {dtype}"
    table = Table("draft", "passes", "accepted by vLLM", "expected", "verdict", title=title)
    for one in found.positions:
        table.add_row(*map(str, (one.position, one.passes, one.accepted, one.expected, one.verdict)))
    return table
