"""The sweep: four arms of three seeds on a tiny target, each trained and decoded with."""

from pathlib import Path

from benchmarks.faulting import scene as faulting
from specdec.files import write_text
from specdec.sweep.job import Job

PROMPTS = 4
ARMS = {
    f"aux_norm={aux} K={steps}": (f"--model.drafter.norms.aux={aux}", f"--model.ttt_steps={steps}")
    for aux in ("none", "each")
    for steps in (2, 3)
}
SEEDS = (0, 1, 2)
NAME = "eagle3"


def build(folder: Path) -> faulting.Scene:
    """The target and the text of ``benchmarks/faults.py``, and prompts."""
    scene = faulting.build(folder)
    lines = [f'{{"prompt": "def add_{number}(a, b):"}}\n' for number in range(40, 40 + PROMPTS)]
    write_text(folder / "prompts.jsonl", "".join(lines))
    return scene


def jobs(scene: faulting.Scene, study: Path, steps: int, every: int, arms: int = len(ARMS)) -> list[Job]:
    """A fit and an evaluation of every arm and seed.

    Args:
        steps: optimizer steps of a fit, with a checkpoint after ``every`` of them.
    """
    out = []
    variant = faulting.Variant(NAME, (*faulting._preset(NAME), faulting.NO_VALIDATION))
    for arm, (name, changes) in enumerate(list(ARMS.items())[:arms]):
        for seed in SEEDS:
            fit, measure = f"fit-{arm}-{seed}", f"evaluate-{arm}-{seed}"
            trained, measured = study / "fits" / fit, study / "measures" / measure
            given = [arg for arg in faulting.arguments(scene, variant, steps, every) if "ttt_steps" not in arg]
            given += [*changes, f"--seed_everything={seed}", f"--out={trained}", "--ckpt_path=auto"]
            out.append(
                Job(
                    key=fit, kind="fit", label=f"{name} seed={seed}: fit", command=("fit", *given),
                    directory=f"fits/{fit}", done="DONE.json", resumes=True,
                )
            )  # fmt: skip
            asked = {
                "target": scene.target,
                "drafter": trained / "drafter",
                "prompts": scene.target.parent / "prompts.jsonl",
                "growth": "chain:depth=3",
                "max_new_tokens": 16,
                "compile": "off",
                "out": measured,
            }
            out.append(
                Job(
                    key=measure, kind="evaluate", label=f"{name} seed={seed}: evaluate",
                    command=("evaluate", *(word for key, value in asked.items() for word in (f"--{key}", str(value)))),
                    directory=f"measures/{measure}", done="metrics.json", needs=(fit,),
                )
            )  # fmt: skip
    return sorted(out, key=lambda job: job.kind != "fit")
