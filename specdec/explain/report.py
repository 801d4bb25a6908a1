"""A waterfall in words: ``report.md``, and a table on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.evaluation.markdown import bracketed, few_prompts, settings_table, table
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED

TITLES = {
    "perfect": "perfect drafts",
    "vocabulary": "draft vocabulary",
    "true_features": "true features",
    "own_features": "own features",
    "own_tokens": "own tokens",
    "observed": "observed by decoding",
    "exported": "exported checkpoint",
    "engine": "engine (vLLM)",
}
SAYS = {
    "perfect": "Every draft is right: the depth and the target's own token, less where an answer ends.",
    "vocabulary": "What the draft vocabulary lacks cannot be drafted. A larger vocabulary, or one counted on the "
    "target's own answers, wins this back.",
    "true_features": "The drafter is wrong though it reads the target's own states at every depth. More training, more "
    "data like these prompts or a larger drafter can win this back.",
    "own_features": "Drift: from its second draft on the drafter reads its own states. More unrolled steps "
    "(model.ttt_steps) or a normed recurrence (PostNorm) can win this back.",
    "own_tokens": "Exposure: its own drafts decide where the next pass begins, and undrifted ones would begin it "
    "elsewhere. Less drift wins this back, too.",
    "observed": "What specdec evaluate measures for this chain.",
    "exported": "The checkpoint as an engine is documented to read it. A difference is a fault, which specdec parity "
    "names.",
    "engine": "What vLLM accepts. A difference beyond rounding is a fault, which specdec parity --engine vllm names.",
}
PERTURBED_SAYS = "The same prompts under a condition of specdec robustness. Training data of that kind can win it back."


def title(name: str) -> str:
    """What a level is called."""
    return TITLES.get(name, name.replace("perturbed ", "perturbed: "))


def report(told: dict[str, Any], figure: str) -> str:
    """The text of ``report.md``.

    Args:
        figure: the plot's path, relative to it.
    """
    lines = ["# Where acceptance is lost", "", _check(told), ""]
    lines += [f"{note}\n" for note in few_prompts(len(told["prompts"]))]
    lines += [f"![Waterfall of acceptance]({figure})", ""]
    lines += [*table(_HEADINGS, [row for _, row in _rows(told)]), ""]
    lines += [
        "Losses are of the step from the level above; those below *observed by decoding* are beside that level. *Every "
        "place alike* is the mean over all places of the answers, as training sees them, and no acceptance length.",
        "",
        *(f"- **{title(name)}**: {SAYS.get(name, PERTURBED_SAYS)}" for name, _ in _rows(told)),
        "",
        "## Drafts accepted",
        "",
        "Share of target passes that accept at least k drafts.",
        "",
    ]
    positions = [str(k) for k in range(1, told["depth"] + 1)]
    joint = [[title(one["name"]), *(f"{share:.3f}" for share in one["joint"])] for one in told["levels"]]
    lines += [*table(["Level", *positions], joint), ""]
    if rows := [[one["prompt_id"], one["reason"]] for one in told["skipped"]]:
        lines += ["## Prompts left out", "", *table(["Prompt", "Reason"], rows, left=2), ""]
    lines += [f"Brackets: {METHOD}, {RESAMPLES:,} resamples, seed {SEED}; losses are paired by prompt.", ""]
    lines += ["## How they were made", ""]
    context = {key: told[key] for key in ("target", "drafter", "settings")} | told["provenance"]
    lines += settings_table(context.items())
    return "\n".join(lines) + "\n"


def printed(told: dict[str, Any], console: Console) -> None:
    """Show the levels as one table, and the check."""
    shown = Table(title=f"Where acceptance is lost: chains of {told['depth']}")
    for index, heading in enumerate(_HEADINGS):
        shown.add_column(heading, justify="right" if index else "left")
    for _, row in _rows(told):
        shown.add_row(*[Text(cell) for cell in row])
    console.print(shown)
    for note in few_prompts(len(told["prompts"])):
        console.print(Text(note), style="yellow")
    console.print(Text(_check(told)), style="" if told["check"]["holds"] else "bold red")


_HEADINGS = ["Level", "Acceptance length", "Loss", "Every place alike"]


def _rows(told: dict[str, Any]) -> list[tuple[str, list[str]]]:
    losses = {bar["to"]: bar["loss"] for bar in (*told["bars"], *told["beyond"])}
    rows = []
    for level in told["levels"]:
        name = level["name"]
        cells = (level["acceptance_length"], losses.get(name), level["every_place"])
        rows.append((name, [title(name), *(number(cell) for cell in cells)]))
    return rows


def number(value: dict[str, Any] | None, digits: int = 2) -> str:
    """With its interval, if it has one."""
    if value is None:
        return ""
    return bracketed(value["mean"], value["low"], value["high"], lambda each: _digits(each, digits))


def _digits(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _check(told: dict[str, Any]) -> str:
    check, levels = told["check"], {level["name"]: level["acceptance_length"]["mean"] for level in told["levels"]}
    parts = [levels["perfect"], *(-bar["loss"]["mean"] for bar in told["bars"])]
    sum_ = " + ".join(_digits(part, 3) for part in parts).replace("+ -", "- ")
    sum_ += f" = {_digits(levels['own_tokens'], 3)}"
    passes = f"{check['same_passes']} of {check['passes']} passes accept the same drafts"
    if check["holds"]:
        return f"The bars add up: {sum_}; decoding accepts {levels['observed']:.3f} ({passes})."
    return (
        f"THE BARS DO NOT ADD UP to what decodes: {sum_}, decoding accepts {levels['observed']:.3f}, a difference of "
        f"{number(check['difference'], 3)} ({passes}): specdec parity says where the two part."
    )
