"""``specdec parity``: is what was trained what is decoded, and what vLLM makes of the export, logit by logit?

Of a real vLLM's greedy answers each pass is compared with what the drafter would have had accepted there. A pass that
begins with n tokens of the answer known drafts the next K. What a drafter says there depends on the text alone, not on
the passes before; so one pass that rounding decides leaves the others comparable.

Legend: A passes, K drafts, T tokens, V vocabulary.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from operator import attrgetter, index
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from specdec.decoding import check_pair, warn_unless_made_for
from specdec.diagnostics.anchors import answered_texts
from specdec.diagnostics.parity_compare import NO_NUMBER, Compared, compare, decoded
from specdec.drafter import Drafter, load_drafter
from specdec.engines.client import Endpoint, SpecDecodeCounters, streaming
from specdec.engines.server import VllmLaunch, flag_of
from specdec.evaluation.prompts import Prompt, first_turns, load_prompts
from specdec.export import NotServable, export_drafter, subject_of
from specdec.export.formats import DrafterCheckpoint, drafts_of
from specdec.export.read import check_unchanged
from specdec.export.write import warn_if_rounded
from specdec.target import Target, TargetSource
from specdec.utils.files import claimed, scratch_folder, staged_directory, write_json
from specdec.utils.machine import provenance
from specdec.utils.numbers import Count, Depth, Range, Tokens
from specdec.utils.progress import progress
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import how_many
from specdec.utils.vllm import find_vllm

REPORT = "parity.json"
TRIES = 5  # of a prompt whose passes vLLM sends together
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
    limit: Count | None = 4,
    max_new_tokens: Tokens = 32,
    depth: Annotated[int, Range(0, 63)] = 7,
    device: str = "cpu",
    engine: Literal["vllm"] | None = None,
    url: str | None = None,
    draft_tokens: Depth | None = None,
    vllm_args: list[str] = [],  # noqa: B006
    out: Path | None = None,
) -> int:
    """Is what was trained what is decoded, and what vLLM makes of the export, logit by logit?

    Training's unroll, cached decoding and the exported files, as an independent reference of vLLM reads them, are
    compared at places of the same texts. With --engine vllm a real vLLM answers the same prompts, and what it accepts
    in every pass is compared, too. The exit status is 1 if anything differs or the export cannot be compared.

    Example: specdec parity --drafter runs/a/drafter --target Qwen/Qwen3-4B --engine vllm -- --max-model-len 4096

    Args:
        drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub
        target: the model that it drafts for; --target.dtype is the dtype of everything compared
        exported: a checkpoint of the drafter; by default it is exported for vLLM and thrown away
        prompts: as of specdec evaluate; by default three beginnings of Python files
        limit: use the first prompts only
        max_new_tokens: new tokens per answer
        depth: deepest draft compared; the first is 0, and a block drafter's last is the deepest
        device: where target and drafter run
        engine: a real one, too
        url: a vLLM that serves the drafter; by default one is started for it, as specdec serve finds it
        draft_tokens: drafts a pass of the vLLM that is started, as of specdec serve
        vllm_args: flags for vllm serve: give them after --
        out: a directory for parity.json, a new one

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; or the engine cannot be asked.
    """
    where = vllm_to_ask(target, engine, url, draft_tokens, vllm_args)
    if exported is not None:
        if not exported.is_dir():
            raise ValueError(f"{exported}: no such directory")
        check_unchanged(exported)
    if max_new_tokens < depth + 3:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: depth {depth} needs at least {depth + 3}")
    making = contextlib.nullcontext() if out is None else claimed(out)
    with making, scratch_folder() as scratch:
        built_in = [Prompt(f"built-in-{n}", None, None, None, text) for n, text in enumerate(PROMPTS[:limit])]
        own, model = load_drafter(drafter, dtype=None), target.load(device)
        model.prove()
        dtype = str(model.dtype).removeprefix("torch.")
        if where and dtype == "float64":
            raise ValueError("vLLM has no float64: give --target.dtype float32 with --engine vllm")
        masks = own.config.recurrence.masks
        drafts, depth = drafts_of(masks, draft_tokens) if where else 0, min(depth, (masks or depth + 1) - 1)
        asked, _ = first_turns(model, load_prompts(prompts, limit) if prompts else built_in, max_new_tokens + drafts)
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False)
        subject = subject_of(own, model)
        directory, method, refused = exported or scratch / "served", subject.method, None
        if exported is None:
            try:
                export_drafter(own, model, directory)
            except NotServable as error:
                refused = str(error)
        else:
            warn_unless_made_for(model, own)
            warn_if_rounded(own, model, subject)
        check_pair(model, own.to(model.device, model.dtype))  # only now: what is exported keeps its dtype
        numbered = [(str(n), ids) for n, ids in enumerate(asked)]
        with progress("the target's answers", "text", len(asked)) as done:
            texts = answered_texts(model, numbered, max_new_tokens, to_end=False, on_answer=lambda: done(1))
        with progress("comparing", "text", len(texts)) as done:
            compared = compare(model, own, texts, depth, None if refused else directory, method, lambda: done(1))
        compared = compared._replace(not_compared=refused or compared.not_compared)
        console.print(comparison_table(compared, dtype))
        if compared.not_compared:
            console.print(f"the export was not compared: {compared.not_compared}", markup=False)
        passes = None
        if where and compared.not_compared is None:
            served = DrafterCheckpoint.of(directory.resolve(), subject)
            try:
                answers = ask_all(where, served, dtype, asked, max_new_tokens + drafts, scratch / "vllm.log")
            except StopRequested as to_end:
                return to_end.status
            passes = compare_passes(model, own, answers, compared.allowed)
            table = Table("draft", "passes", "accepted by vLLM", "by this drafter", "verdict")
            table.title = "vLLM and decoding"
            for one in passes.positions:
                table.add_row(*map(str, (one.position, one.passes, one.accepted, one.expected)), one.verdict)
            console.print(table)
        verdict = None
        if not compared.equal:
            verdict = "NOT THE SAME: see above"
        elif compared.not_compared is not None:
            verdict = "NOT SERVED: what was trained is what is decoded; why no export was compared stands above"
        elif passes and passes.fault:
            verdict = f"NOT THE SAME: {passes.fault}"
        if out is not None:
            engines = None
            if passes:
                positions = [{**one._asdict(), "verdict": one.verdict} for one in passes.positions]
                engines = {**passes._asdict(), "positions": positions, "holds": passes.fault is None}
            rows = [row._asdict() | {"equal": row.equal, "verdict": row.verdict} for row in compared.rows]
            found = {
                "drafter": drafter, "target": model.identity, "exported": exported and str(exported),
                "method": method, "dtype": dtype, "texts": len(texts),
                "holds": verdict is None, "export_not_compared": compared.not_compared,
                "rows": [{key: None if value == NO_NUMBER else value for key, value in row.items()} for row in rows],
                "engine": engines, "provenance": provenance(),
            }  # fmt: skip
            with staged_directory(out, replace=True) as folder:
                write_json(folder / REPORT, found)
    same = f"what was trained is what is decoded and what {'vLLM serves' if passes else 'is served'}"
    console.print(verdict or same, markup=False)
    return 1 if verdict else 0


def comparison_table(compared: Compared, dtype: str) -> Table:
    """A line for each pair and place, one for each run of depths that differs."""
    allowed = f"a difference of up to {compared.rows[0].allowed:g} of their range is rounding"
    table = Table("pair", "the text", "depth", "difference", "of the range", "agreement", "verdict")
    table.title = f"log-probabilities in {dtype}: {allowed}"
    for (pair, place, verdict), group in itertools.groupby(compared.rows, attrgetter("pair", "place", "verdict")):
        run = list(group)
        depths = str(run[0].depth) if len(run) == 1 else f"{run[0].depth} to {run[-1].depth}"
        figures = f"{max(row.gap for row in run):.1e}", f"{max(row.share for row in run):.1e}"
        best = f"{sum(row.agree for row in run)} of {sum(row.slots for row in run)} best tokens"
        table.add_row(pair, place, depths, *figures, best, escape(verdict))
    return table


def vllm_to_ask(
    target: TargetSource, engine: str | None, url: str | None, draft_tokens: int | None, vllm_args: Sequence[str]
) -> VllmLaunch | str | None:
    """What is started, the URL of what runs, or None; ValueError if options do not go together or vLLM is missing."""
    options = {"--url": url, "--draft_tokens": draft_tokens, "flags after --": vllm_args}
    given = [name for name, value in options.items() if value]
    if engine is None and given:
        raise ValueError(f"{', '.join(given)} would go to vLLM, which is not asked without --engine vllm")
    if url and len(given) > 1:
        raise ValueError(f"{', '.join(given[1:])} would start vLLM, which is not started with --url")
    if "--dtype" in map(flag_of, vllm_args):
        raise ValueError("--dtype after -- is not passed on: vLLM runs in the target's, give --target.dtype")
    if url or engine is None:
        return url and Endpoint(url).url
    return VllmLaunch(find_vllm(), target, port=0, draft_tokens=draft_tokens, extra=tuple(vllm_args))


class VllmAnswer(NamedTuple):
    """What a server did with one prompt, end tokens ignored."""

    prompt: list[int]
    ids: list[int]
    drafts: int  # of a pass
    known: list[int]  # tokens of the answer that were known when each pass began; the first is 1, the prompt's own
    accepted: list[int]  # drafts that each pass accepted; of the last one those within the answer


def ask_all(
    where: VllmLaunch | str, drafter: DrafterCheckpoint, dtype: str, prompts: Sequence[list[int]], tokens: int,
    log: Path,
) -> list[VllmAnswer]:  # fmt: skip
    """Put every prompt to the vLLM at a URL, or to one that is started for it in this dtype and ended.

    ``log`` is a new file for what a started one says. StopRequested if a signal came; ValueError as of
    :func:`ask`, or if vLLM does not come up.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(where, VllmLaunch):
            stack.enter_context(stop_on_signals())
            launch = dataclasses.replace(where, extra=("--dtype", dtype, *where.extra))
            where = stack.enter_context(launch.server(drafter, log)).url
        endpoint = Endpoint(where)
        model, answers = endpoint.model(), []
        done = stack.enter_context(progress("vLLM answers", "prompt", len(prompts)))
        for prompt in prompts:
            answers.append(ask(endpoint, model, prompt, tokens))
            done(1)
    return answers


def ask(endpoint: Endpoint, model: str, prompt: list[int], tokens: int) -> VllmAnswer:
    """Put a prompt to a server that nobody else uses; ValueError if it does not draft, or sends passes together."""
    # without a penalty of its own the target's generation_config.json has a say
    body = {"prompt": prompt, "repetition_penalty": 1.0, "return_token_ids": True}
    for _ in range(TRIES):
        before = SpecDecodeCounters.read(endpoint)
        events = endpoint.events("/v1/completions", streaming(model, tokens) | body)
        try:
            sent = [event["choices"][0]["token_ids"] for event in events if event.get("choices")]
            pieces = [[index(token) for token in piece] for piece in sent if piece]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{endpoint.url}/v1/completions sends no token_ids, which vLLM does from 0.10.2 on"
            ) from error
        ids = [token for piece in pieces for token in piece]
        counted = before.increase(endpoint, len(ids))
        if not counted.passes:
            raise ValueError(f"{endpoint.url} drafts nothing: is it served with the drafter?")
        if (counted.generated, counted.passes) == (len(ids), len(pieces) - 1):
            known = [sum(map(len, pieces[:number])) for number in range(1, len(pieces))]
            return VllmAnswer(prompt, ids, counted.draft_tokens, known, [len(piece) - 1 for piece in pieces[1:]])
    raise ValueError(
        f"{endpoint.url} sent {how_many(len(ids), 'token')} in {how_many(len(pieces), 'piece')} and counted "
        f"{counted.generated} in {how_many(counted.passes, 'pass')} and the prompt's, {TRIES} times: does somebody "
        f"else use it, has it another --stream-interval than 1, "
        f"or a --max-model-len below {len(prompt) + tokens + counted.draft_tokens + 1}?"
    )


class DraftPosition(NamedTuple):
    """All passes at one draft position."""

    position: int  # from 1
    passes: int
    accepted: int  # passes at which the engine accepted as many drafts
    expected: int  # the same of this drafter, at the same places of the same answers
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

    @property
    def fault(self) -> str | None:
        """What differs beyond rounding; None if nothing does."""
        if self.different:
            return f"{self.different} of {how_many(self.tokens, 'token')} not this target's"
        return "vLLM accepts other drafts than these, see above" if any(x.different for x in self.positions) else None


@torch.no_grad()
def compare_passes(target: Target, drafter: Drafter, answers: Sequence[VllmAnswer], share: float) -> EnginePasses:
    """Compare every pass of every answer whose drafts all lie within it.

    Args:
        drafter: in the target's dtype, on its device.
        share: of a distribution's range, that rounding may make of one log-probability.

    Raises:
        ValueError: no answer is longer than a pass.
    """
    allowed, depth = 2 * share, answers[0].drafts  # each of two candidates has an error of its own
    if (masks := drafter.config.recurrence.masks) not in (0, depth):
        raise ValueError(f"the server drafts {depth} tokens a pass, and the drafter's block has {masks} masks")
    passes: list[tuple[int, int, bool]] = []  # drafts accepted by this drafter and by vLLM; is it close where they part
    close_tokens = wrong_tokens = 0
    for answer in answers:
        if not all(0 <= token < target.vocab_size for token in answer.ids):
            raise ValueError(f"the server's tokens are none of {target.source}'s: does it serve another target?")
        P, ids = len(answer.prompt), torch.tensor([*answer.prompt, *answer.ids], device=target.device)
        logits_TV = target.model(input_ids=ids[None], use_cache=False).logits[0, P - 1 : -1]
        short_T, _ = _short_and_lead(logits_TV, ids[P:])
        close_tokens += int(((short_T > 0) & (short_T <= allowed)).sum())
        wrong_tokens += int((short_T > allowed).sum())
        whole = [(n, count) for n, count in zip(answer.known, answer.accepted, strict=True) if n + depth < len(ids) - P]
        if not whole:
            continue
        places = [P + n for n, _ in whole]  # of each pass's first draft
        log_probs_AKV = decoded(target, drafter, ids.tolist(), [at - 2 for at in places], depth - 1).log_probs_AKV
        due_AK = torch.stack([ids[at : at + depth] for at in places])
        short_AK, lead_AK = _short_and_lead(log_probs_AKV, due_AK)
        right_AK = short_AK == 0
        doubt_AK = torch.where(right_AK, lead_AK, short_AK)  # how far a draft is from falling otherwise
        for ours, (_, theirs), doubt_K in zip(right_AK.cumprod(1).sum(1).tolist(), whole, doubt_AK, strict=True):
            passes.append((ours, theirs, ours != theirs and bool(doubt_K[min(ours, theirs)] <= allowed)))
    if not passes:
        raise ValueError(
            f"no answer holds a pass of {how_many(depth, 'draft')}: give more --max_new_tokens or fewer --draft_tokens"
        )
    positions = []
    for k in range(depth):
        accepted, expected = sum(theirs > k for _, theirs, _ in passes), sum(ours > k for ours, _, _ in passes)
        parted = [close for ours, theirs, close in passes if ours != theirs and min(ours, theirs) == k]
        rounding = sum(parted)
        positions.append(DraftPosition(k + 1, len(passes), accepted, expected, rounding, len(parted) - rounding))
    return EnginePasses(positions, sum(len(one.ids) for one in answers), close_tokens, wrong_tokens)


def _short_and_lead(scores: Tensor, due: Tensor) -> tuple[Tensor, Tensor]:
    """What a token lacks of the best one's score, and what the second best does, as shares of the scores' range."""
    best, second = scores.topk(2).values.unbind(-1)
    least = scores.where(scores.isfinite(), best[..., None]).amin(-1)
    span = (best - least).clamp_min(1e-30)
    return (best - scores.gather(-1, due[..., None])[..., 0]) / span, (best - second) / span
