"""``specdec explain``: where acceptance is lost, bar by bar, from perfect drafts to what decoding accepts.

Of each prompt the target writes a greedy answer y_1 ... y_N. A *place* n is where a target pass can begin: y_1 to y_n
are known, y_n is the root, and the D drafts are to be y_n+1 ... y_n+D. At every level a draft is right or wrong:

- ``perfect``: always right;
- ``vocabulary``: right if the token is in the draft vocabulary;
- ``true_features``: right if the drafter says it after the target's own states of everything before;
- ``own_features``: the same in a chain, which from its second step on reads the drafter's own states.

What is accepted at a place is the number of right drafts before the first wrong one. A level's passes are those of
decoding with its drafts; two levels borrow passes: drift is what ``own_features`` loses at the passes of
``true_features``, exposure what ``own_tokens`` loses with the same drafts at their own passes. ``observed`` is the
decoder itself, another code path. The bars between the levels add up to it, and the report checks that.

Legend: A places, S places and some more, K drafts.
"""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.decoding import Chain, Request, SpeculativeDecoder
from specdec.diagnostics.anchors import AnchoredText, AnsweredText, answered_texts
from specdec.diagnostics.explain_report import (
    EXPORTED,
    OBSERVED,
    OWN_FEATURES,
    OWN_TOKENS,
    PERFECT,
    TRUE_FEATURES,
    VOCABULARY,
    Levels,
    plot_waterfall,
    report_tables,
    verdict,
    waterfall,
)
from specdec.diagnostics.parity.compare import open_export
from specdec.diagnostics.parity.compare import served as served_outputs
from specdec.diagnostics.parity.reference import ServedDrafter
from specdec.diagnostics.report import print_report, write_report
from specdec.drafter import Drafter, load
from specdec.evaluation.config import MeasurementConfig, drafter_facts, load_pair
from specdec.evaluation.prompts import first_turns
from specdec.evaluation.style import few_prompts
from specdec.export import export_drafter, subject_of
from specdec.export.read import check_unchanged
from specdec.nn.backend import matmul_backend
from specdec.target import Target
from specdec.utils.files import staged_directory, write_json
from specdec.utils.progress import progress

NEW = "new"
TOGETHER = 16  # sequences decoded side by side
REPORT, FIGURE, NUMBERS = "report.md", "explain.png", "explain.json"


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(MeasurementConfig):
    """What is explained.

    Args:
        drafter: the drafter's directory.
        depth: drafts a pass, in a chain.
        exported: a checkpoint of the drafter to draft with, too, or new: export it now and throw that away.
    """

    drafter: str
    depth: int = 5
    exported: str | None = None

    def __post_init__(self) -> None:
        Chain(self.depth)
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens must be at least 2, for a pass to measure, not {self.max_new_tokens}")
        if self.exported is not None and self.exported != NEW:
            if not Path(self.exported).is_dir():
                raise ValueError(f"{self.exported}: no such directory; --exported {NEW} exports the drafter now")
            check_unchanged(Path(self.exported))


def explain(config: ExplainConfig) -> int:
    """Where acceptance is lost, bar by bar: vocabulary, drafter, drift, exposure; and beyond decoding, on request.

    The exit status is 1 if the bars do not add up to what decoding accepts.

    Example: specdec explain --target Qwen/Qwen3-4B --drafter runs/a/drafter --prompts mt_bench.jsonl --limit 40
    """
    depth, tokens = config.depth, config.max_new_tokens
    with staged_directory(config.place("explain")) as folder:
        prompts = config.load_prompts()
        pair = load_pair(config.target, config.drafter, config.device, config.other_target)
        target = pair.target
        ids, skipped = first_turns(target, prompts, tokens + depth, depth + 1)
        left_out = {one.prompt_id for one in skipped}
        kept = [prompt for prompt in prompts if prompt.prompt_id not in left_out]
        named = [(prompt.prompt_id, own) for prompt, own in zip(kept, ids, strict=True)]
        served = None if config.exported is None else _served(config, config.exported, target)
        levels, texts = measure_levels(target, pair.drafter, named, tokens, depth, served)
        context = {"drafter": drafter_facts(config.drafter, pair), **config.context(target, kept)}
        used = [text.prompt_id for text in texts]
        told = {
            "version": 1,
            "depth": depth,
            **waterfall(levels, depth),
            "prompts": used,
            "skipped": [one._asdict() for one in skipped],
            **context,
        }
        tables, notes = report_tables(told), [verdict(told), *few_prompts(len(used))]
        plot_waterfall(told, folder / FIGURE)
        write_report(folder / REPORT, "Where acceptance is lost", notes, FIGURE, tables, context)
        write_json(folder / NUMBERS, told)
    print_report(tables[:1], notes)
    return 0 if told["check"]["holds"] else 1


def _served(config: ExplainConfig, exported: str, target: Target) -> ServedDrafter:
    """The export as an engine has it."""
    stored = load(config.drafter, dtype=None)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(exported)
        if exported == NEW:
            directory = Path(scratch) / "served"
            export_drafter(stored, target, directory, served=config.target)
        return open_export(directory.resolve(), subject_of(stored, target).method, target)


class ExplainedText(NamedTuple):
    """A prompt and what the target said to it."""

    prompt_id: str
    ids: list[int]  # prompt, answer, and D tokens behind it; behind an end token repetitions of it, which nothing reads
    prompt: int  # tokens of the prompt
    kept: int  # N, tokens of the answer
    end: int | None  # the first end token's place in the answer and the D tokens behind it, from 1

    @property
    def anchors(self) -> range:
        """Of the places n = 1 to N - 1."""
        return range(self.prompt, self.prompt + self.kept - 1)

    def most(self, depth: int) -> list[int]:
        """Drafts that can be accepted at each place: none behind an end token, which is the pass's last token."""
        return [depth if self.end is None else min(depth, self.end - n - 1) for n in range(1, self.kept)]

    @classmethod
    def of(cls, text: AnsweredText, max_new_tokens: int, depth: int, end: frozenset[int]) -> "ExplainedText":
        """From an answer of ``max_new_tokens + depth`` tokens, or of fewer up to an end token."""
        made = len(text.ids) - text.prompt
        kept = min(max_new_tokens, made)
        padding = [text.ids[-1]] * (kept + depth - made)
        return cls(*text._replace(ids=[*text.ids, *padding]), kept, made if text.ids[-1] in end else None)


def passes(accepted: Sequence[int]) -> list[int]:
    """Where passes begin, from place 0 on, if each begins behind what the one before has committed.

    Args:
        accepted: drafts accepted at each place.
    """
    found, place = list[int](), 0
    while place < len(accepted):
        found.append(place)
        place += accepted[place] + 1
    return found


def measure_levels(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[tuple[str, list[int]]],
    max_new_tokens: int,
    depth: int,
    served: ServedDrafter | None = None,
) -> tuple[Levels, list[ExplainedText]]:
    """Every level of the prompts whose answers come to a target pass, and their texts.

    Args:
        prompts: ids and tokens, each with room for the answer and ``depth`` tokens behind it.
        served: an exported checkpoint as an engine has it.

    Raises:
        ValueError: no answer comes to a target pass.
    """
    end, stages = target.eos_token_ids, 3 + (served is not None)
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(progress("explaining", "prompts", stages * len(prompts)))
        if target.device.type == "cpu":
            stack.enter_context(matmul_backend())
        answers = answered_texts(target, prompts, max_new_tokens + depth, on_answer=lambda: advance(1))
        every = [ExplainedText.of(text, max_new_tokens, depth, end) for text in answers]
        texts = [text for text in every if text.anchors]
        if not texts:
            raise ValueError("no answer comes to a target pass: all end with their first token")
        advance((stages - 1) * (len(every) - len(texts)))
        runs = [at_every_place(target, drafter, text, depth, advance) for text in texts]
        # drift is what the passes of true features lose, exposure what the same drafts lose at their own passes
        begun = {name: name for name in (PERFECT, VOCABULARY, TRUE_FEATURES)} | {OWN_FEATURES: TRUE_FEATURES}
        levels = {name: [_at(run[name], run[of]) for run in runs] for name, of in begun.items()}
        levels[OWN_TOKENS] = [_at(run[OWN_FEATURES], run[OWN_FEATURES]) for run in runs]
        levels[OBSERVED] = observed(
            target, drafter, [text.ids[: text.prompt] for text in texts], max_new_tokens, depth, advance
        )
        if served is not None:
            levels[EXPORTED] = [export_passes(target, served, text, depth, advance) for text in texts]
    return levels, texts


@torch.no_grad()
def at_every_place(
    target: Target, drafter: Drafter, text: ExplainedText, depth: int, advance: Callable[[int], None] = lambda n: None
) -> dict[str, list[int]]:
    """Drafts accepted at each place of one answer, by level."""
    anchors = text.anchors
    more = range(anchors.start, anchors.stop + depth - 1)  # where the drafts of the last place can read true states
    anchored, padded = AnchoredText(target, drafter, text.ids, depth, len(more)), [*text.ids, *[-1] * depth]
    right_SK = torch.cat([anchored.draft(some).matched(padded, some) for some in anchored.groups(more)])
    draft_AK = torch.arange(len(anchors), device=target.device)[:, None] + torch.arange(depth, device=target.device)
    due_AK = torch.tensor(text.ids, device=target.device)[draft_AK + anchors.start + 1]
    hits = {
        PERFECT: torch.ones_like(due_AK, dtype=torch.bool),
        VOCABULARY: drafter.vocab.to_draft(due_AK) >= 0,
        TRUE_FEATURES: right_SK[:, 0][draft_AK],  # the first draft of the chain that begins k places further on
        OWN_FEATURES: right_SK[: len(anchors)],
    }
    most_A = torch.tensor(text.most(depth), device=target.device)
    advance(1)
    return {name: hit_AK.cumprod(1).sum(1).minimum(most_A).tolist() for name, hit_AK in hits.items()}


def _at(accepted: Sequence[int], begun: Sequence[int]) -> list[int]:
    """What is accepted at each place, at the passes of a level."""
    return [accepted[place] for place in passes(begun)]


def observed(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_new_tokens: int, depth: int,
    advance: Callable[[int], None] = lambda n: None,
) -> list[list[int]]:  # fmt: skip
    """Drafts that every pass of decoding with a chain accepts, by prompt."""
    decoder = SpeculativeDecoder(target, drafter, Chain(depth), batch=min(TOGETHER, len(prompts)))
    found: dict[int, list[int]] = {}
    for number, made in decoder.generate_all([Request(ids, max_new_tokens) for ids in prompts], target.eos_token_ids):
        found[number] = list(made.accepted)
        advance(1)
    return [found[number] for number in range(len(prompts))]


@torch.no_grad()
def export_passes(
    target: Target, served: ServedDrafter, text: ExplainedText, depth: int, advance: Callable[[int], None]
) -> list[int]:
    """What every pass accepts if the export's reference drafts."""
    slots = [anchor - 1 for anchor in text.anchors]
    log_probs_AKV = served_outputs(target, served, text.ids, slots, depth - 1).log_probs_AKV
    due_AK = torch.tensor([text.ids[slot + 2 : slot + 2 + depth] for slot in slots], device=target.device)
    right_A = (log_probs_AKV.argmax(-1) == due_AK).cumprod(1).sum(1)
    accepted = [min(pair) for pair in zip(right_A.tolist(), text.most(depth), strict=True)]
    advance(1)
    return _at(accepted, accepted)
