"""``specdec parity``: is what was trained what is decoded, and what vLLM makes of the export, logit by logit?"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.decoding import check_pair, warn_unless_made_for
from specdec.diagnostics.anchors import answered_texts
from specdec.diagnostics.parity_compare import NO_NUMBER, Compared, compare
from specdec.diagnostics.parity_vllm import EnginePasses, ask_all, compare_passes, vllm_to_ask
from specdec.drafter import load
from specdec.engines.server import DrafterCheckpoint, VllmLaunch
from specdec.evaluation.prompts import Prompt, first_turns, load_prompts
from specdec.export import NotServable, export_drafter, subject_of
from specdec.export.read import check_unchanged
from specdec.target import TargetSource
from specdec.utils.files import write_json
from specdec.utils.machine import provenance
from specdec.utils.progress import progress
from specdec.utils.signals import StopRequested

REPORT = "parity.json"
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
    draft_tokens: int | None = None,
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
        url: a vLLM that serves the drafter; by default one is started for it, as specdec serve finds it
        draft_tokens: drafts a pass of the vLLM that is started
        vllm_args: flags for vllm serve: give them after --
        out: a directory for parity.json; no older one in it

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; or the engine cannot be asked.
    """
    where = vllm_to_ask(target, engine, url, draft_tokens, vllm_args)
    report = None if out is None else out / REPORT
    if report is not None and report.exists():
        raise ValueError(f"{report} exists already: choose another place or remove it first")
    if exported is not None:
        if not exported.is_dir():
            raise ValueError(f"{exported}: no such directory")
        check_unchanged(exported)
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
        directory, method, unserved = exported or Path(scratch) / "served", subject_of(own, model).method, None
        if exported is None:
            try:
                export_drafter(own, model, directory)
            except NotServable as error:
                unserved = str(error)
        else:
            warn_unless_made_for(model, own)
        check_pair(model, own.to(model.device, model.dtype))  # only now: what is exported keeps its dtype
        texts = answered_texts(model, [(str(n), ids) for n, ids in enumerate(asked)], max_new_tokens, to_end=False)
        with progress("comparing", "texts", len(texts)) as done:
            compared = compare(model, own, texts, depth, None if unserved else directory, method, lambda: done(1))
        compared = compared._replace(lacking=unserved or compared.lacking)
        console.print(comparison_table(compared, dtype))
        if compared.lacking:
            console.print(f"the export was not compared: {compared.lacking}", markup=False)
        passes = None
        if where and compared.lacking is None:
            served = DrafterCheckpoint(directory.resolve(), method)
            try:
                answers = ask_all(where, served, dtype, asked, max_new_tokens + drafts, Path(scratch) / "vllm.log")
            except StopRequested as to_end:
                return to_end.status
            passes = compare_passes(model, own, answers, compared.allowed)
            console.print(engine_table(passes))
    verdict = _verdict(compared, passes)
    if report is not None:
        rows = [row._asdict() | {"equal": row.equal, "verdict": row.verdict} for row in compared.rows]
        write_json(report, {
            "drafter": drafter,
            "target": model.identity,
            "exported": exported and str(exported),
            "method": method,
            "dtype": dtype,
            "texts": len(texts),
            "holds": verdict is None,
            "export_not_compared": compared.lacking,
            "rows": [{key: None if value == NO_NUMBER else value for key, value in row.items()} for row in rows],
            "engine": passes and passes.as_json(),
            "provenance": provenance(),
        })  # fmt: skip
    same = f"what was trained is what is decoded and what {'vLLM serves' if passes else 'is served'}"
    console.print(verdict or same, markup=False)
    return 1 if verdict else 0


def _verdict(compared: Compared, engine: EnginePasses | None) -> str | None:
    """What is not one and the same, the worst first; None if everything is."""
    if not compared.equal:
        return "NOT THE SAME: see above"
    if compared.lacking is not None:
        return "NOT SERVED: what was trained is what is decoded, and there is no export that an engine reads so"
    return f"NOT THE SAME: {engine.fault}" if engine and engine.fault else None


def comparison_table(compared: Compared, dtype: str) -> Table:
    """A line for each pair and place, one for each run of depths that differs."""
    title = (
        f"log-probabilities in {dtype}: a difference of up to {compared.rows[0].allowed:g} of their range is rounding"
    )
    table = Table("pair", "the text", "depth", "difference", "of the range", "agreement", "verdict", title=title)
    for (pair, place, verdict), group in itertools.groupby(
        compared.rows, lambda row: (row.pair, row.place, row.verdict)
    ):
        run = list(group)
        depths = str(run[0].depth) if len(run) == 1 else f"{run[0].depth} to {run[-1].depth}"
        figures = f"{max(row.gap for row in run):.1e}", f"{max(row.share for row in run):.1e}"
        best = f"{sum(row.agree for row in run)} of {sum(row.slots for row in run)} best tokens"
        table.add_row(pair, place, depths, *figures, best, escape(verdict))
    return table


def engine_table(engine: EnginePasses) -> Table:
    """A line for each of vLLM's draft positions."""
    table = Table("draft", "passes", "accepted by vLLM", "by this drafter", "verdict", title="vLLM and decoding")
    for one in engine.positions:
        table.add_row(*map(str, (one.position, one.passes, one.accepted, one.expected)), one.verdict)
    return table
