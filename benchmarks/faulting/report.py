"""The dated Markdown file and the JSON beside it."""

from collections.abc import Sequence
from typing import Any

from benchmarks.faulting.campaign import TOP, Killed
from benchmarks.faulting.flips import Flipped
from benchmarks.report import conditions

NOTES = f"""\
- **Runs** are `specdec fit` with the presets' drafters on a tiny target, on the CPU, a process group each, started
  again with the same command (`--ckpt_path auto`) after every kill until it ends by itself. *Dropout* draws from
  torch's global generator; *noise* is EAGLE-1's.
- **At steps**: SIGKILL of the group after a random number of batches and up to 50 ms. **In saves**: SIGKILL at a random
  one of the writes, syncs, renames and removals of all saves, with `$TMPDIR` on another file system than the run.
- **Losses** are those of every batch on every rank, those that were run again after a kill included, compared as
  hexadecimal floats with the undisturbed run's. A batch that no run logged counts as differing.
- **Unreadable**: a file under a checkpoint's name that does not verify after a kill, or no whole checkpoint where there
  had been one. **Left over**: temporary files in the run's directory or in `$TMPDIR` once the run has ended.
- **Checkpoints**: the most that a run ended with; `save_top_k` {TOP} and the last one are {TOP + 1}.
- **Flips**: one bit of a random byte, in every file of the artefact in turn, read as specdec reads it (a checkpoint to
  go on with, a drafter to decode with, an export to serve). *Without hashes*: noticed by torch or safetensors alone.
"""


def faults(killed: Sequence[Killed], flipped: Sequence[Flipped]) -> list[str]:
    """What is wrong, in words; nothing if all is well."""
    found = [
        f"{one.variant}, {one.where}: {one.kills} kills, {one.differing} losses differ, weights equal: "
        f"{one.weights_equal}, {one.unreadable} unreadable, {one.leftovers} left over, "
        f"{one.most_checkpoints} checkpoints"
        for one in killed
        if not one.holds
    ]
    return found + [
        f"{one.what}: {one.detected} of {one.flips} flips detected, {one.named} named"
        for one in flipped
        if not one.holds
    ]


def to_json(about: dict[str, Any], killed: Sequence[Killed], flipped: Sequence[Flipped]) -> dict[str, Any]:
    """All figures."""
    return {
        "run": about,
        "faults": faults(killed, flipped),
        "kills": [one.to_json() for one in killed],
        "flips": [one.to_json() for one in flipped],
    }


def markdown(about: dict[str, Any], killed: Sequence[Killed], flipped: Sequence[Flipped]) -> str:
    """The dated file."""
    parts = [
        f"# Training under SIGKILL and flipped bits, {about['date'][:10]}\n",
        *conditions(about, about["versions"], f"; {about['seconds']} s in all"),
        "\n## Result\n",
    ]
    for where in dict.fromkeys(one.where for one in killed):
        some = [one for one in killed if one.where == where]
        equal = all(one.weights_equal for one in some)
        parts.append(
            f"- {sum(one.kills for one in some)} SIGKILLs {where}: **{sum(one.differing for one in some)}** of "
            f"{sum(one.losses for one in some):,} losses differ, final weights "
            f"{'bit-equal' if equal else '**differ**'}, "
            f"{sum(one.unreadable for one in some)} unreadable checkpoints, {sum(one.leftovers for one in some)} files "
            "left over."
        )
    flips, detected = sum(one.flips for one in flipped), sum(one.detected for one in flipped)
    if flipped:
        parts.append(
            f"- {flips} one-bit flips: **{detected}** detected; {sum(one.without for one in flipped)} without hashes."
        )
    parts += [f"- **Fault**: {fault}." for fault in faults(killed, flipped)]
    parts += ["\n## How to read it\n", NOTES, "## SIGKILL\n"]
    parts.append(
        "| run | killed | kills | runs | losses | differ | weights | unreadable | left over | checkpoints | seconds |"
    )
    parts.append("|---|---|---:|---:|---:|---:|---|---:|---:|---:|---:|")
    parts += [
        f"| {one.variant} | {one.where} | {one.kills} | {one.runs} | {one.losses:,} | {one.differing} "
        f"| {'bit-equal' if one.weights_equal else 'differ'} | {one.unreadable} | {one.leftovers} "
        f"| {one.most_checkpoints} | {one.seconds:.0f} |"
        for one in killed
    ]
    parts += [
        "\n## Flipped bits\n",
        "| artefact | flips | detected | named | without hashes |",
        "|---|---:|---:|---:|---:|",
    ]
    parts += [f"| {one.what} | {one.flips} | {one.detected} | {one.named} | {one.without} |" for one in flipped]
    return "\n".join(parts) + "\n"
