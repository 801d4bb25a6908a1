"""One EAGLE-3 training step in float64: specdec beside the official code, specforge and speculators, on the same rows.

Which rows are trained differs. The official code trains slot t of step k where token t + k, its feature's, is an
answer's; speculators where token t + 1 + k is, which it reads; specdec where that and t + 2 + k are, which it predicts.
Here each gets the mask that means specdec's rows by its own rule, the same weights and the same target states. What is
left is how a loss is reduced, which says what a copied clip of the gradient's norm would do. Linux only.

``python benchmarks/equal_rows.py --peers PYTHON --eagle EAGLE/eagle/traineagle3/cnets.py --out FILE.md``
"""

import argparse
import contextlib
import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.training import recipe

DECAY, CLIP = 0.8, 0.5  # of the steps; the official code's clip, and specdec's
TOLERANCE = 1e-8  # relative; the exit status is 1 if a loss or a gradient differs by more
FLOAT32, FLOAT = torch.float32, Tensor.float
Step = tuple[float, dict[str, Tensor]]  # a loss and its gradient
Asked = tuple[str, list[str]]  # a mask of recipe.MASKS and a system's options


class Peer(NamedTuple):
    """Another trainer, and how it reduces what all sum over the same rows."""

    name: str
    module: str
    options: list[str]
    every: bool  # it trains rows whose likeliest target token the draft vocabulary lacks, too
    reduction: str
    weigh: Callable[
        [float, int], float
    ]  # from a step's rows and the tokens to its sum's factor, decay aside


def peers(eagle: Path | None) -> list[Peer]:
    """Those that can be had."""
    over_tokens = "sum over steps of the sum over rows / T"
    official = [
        Peer("official EAGLE-3", "of_eagle", [str(eagle)], False, over_tokens, lambda n, T: 1 / T)
    ]
    return (official if eagle else []) + [
        Peer("specforge", "of_specforge", [], False, over_tokens, lambda n, T: 1 / T),
        Peer("speculators", "of_speculators", ["sdpa"], True, "sum over steps of the sum over rows / (rows + 1e-5)",
             lambda n, T: 1 / (n + 1e-5)),
    ]  # fmt: skip


# --- the worker ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def asked_for_float32(kind: torch.dtype, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What code that asks for float32 gets; the peers' norms, softmaxes and losses do, whatever their weights are."""
    before = torch.float32, Tensor.float
    torch.float32, Tensor.float = kind, convert  # type: ignore[misc, assignment]
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.float32, Tensor.float = before  # type: ignore[misc, assignment]
        torch.set_default_dtype(before[0])


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]:
    """What builds a system with the options asked for, takes its step and writes its gradients to a file."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what is compiled would keep float32
    torch.set_num_threads(job["threads"])
    build = importlib.import_module(f"benchmarks.training.{job['module']}").build
    narrow_rope()

    def step(asked: dict[str, Any]) -> dict[str, Any]:
        system: recipe.System = build(
            recipe.Job(**job | {name: asked[name] for name in ("mask", "options")})
        )
        ours = job["module"] == "of_specdec"
        with asked_for_float32(*(FLOAT32, FLOAT) if ours else (torch.float64, Tensor.double)):
            loss = system.backward()
        torch.save(system.gradients(), asked["out"])
        return {
            "loss": float(loss),
            "versions": {name: version(name) for name in (*system.packages, "torch")},
        }

    return {}, step


def narrow_rope() -> None:
    """Give every rotary embedding that is called from now on float32 where it asks for it."""
    call = torch.nn.Module.__call__

    def narrowed(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not type(module).__name__.endswith("RotaryEmbedding"):
            return call(module, *args, **kwargs)
        with asked_for_float32(FLOAT32, FLOAT):
            return call(module, *args, **kwargs)

    torch.nn.Module.__call__ = narrowed  # type: ignore[method-assign]


# --- the parent ------------------------------------------------------------------------------------------------------


def taken(
    a: argparse.Namespace, module: str, many: list[Asked], versions: dict[str, str]
) -> list[Step]:
    """A system's steps, one for each mask with options, in a process of its own."""
    harness.tell(module)
    python, out = sys.executable if module == "of_specdec" else a.peers, list[Step]()
    job = recipe.Job(module, [], a.workload, "float64", "all", a.threads, a.seed)._asdict()
    with tempfile.TemporaryDirectory(prefix="equal_rows-") as folder:
        path = Path(folder) / "gradients.pt"
        with harness.Worker(
            python, module, Path(__file__).resolve(), job, Path(folder) / "log"
        ) as worker:
            for mask, options in many:
                reply = worker.ask({"mask": mask, "options": options, "out": str(path)})
                versions |= reply["versions"]
                out.append((reply["loss"], torch.load(path, weights_only=True)))
    return out


def sums(steps: list[Step], rows: list[float]) -> list[Step]:
    """Losses summed over the rows of each unroll step, from specdec's means over one, two, ... steps: differences."""
    out, before = list[Step](), (0.0, dict[str, Tensor]())
    for k, (loss, gradient) in enumerate(steps):
        total = sum(DECAY**j * n for j, n in enumerate(rows[: k + 1]))
        now = loss * total, {name: value * total for name, value in gradient.items()}
        step = {
            name: (value - before[1].get(name, 0.0)) / DECAY**k for name, value in now[1].items()
        }
        out.append(((now[0] - before[0]) / DECAY**k, step))
        before = now
    return out


def reduced(steps: list[Step], factors: list[float]) -> Step:
    """The weighted sum of the steps' losses and gradients, decay included."""
    weights = [DECAY**k * factor for k, factor in enumerate(factors)]
    gradient = {
        name: sum(w * step[name] for w, (_, step) in zip(weights, steps, strict=True))
        for name in steps[0][1]
    }
    return sum(w * loss for w, (loss, _) in zip(weights, steps, strict=True)), gradient  # type: ignore[return-value]


def norm(gradient: dict[str, Tensor]) -> float:
    """Over all weights."""
    return float(torch.cat([value.flatten() for value in gradient.values()]).norm())


def compare(theirs: Step, same: Step, own: Step) -> dict[str, float]:
    """What is left of the difference when specdec's loss is reduced as theirs; both beside specdec's own reduction."""
    assert set(theirs[1]) == set(same[1]), set(theirs[1]) ^ set(same[1])
    worst = max(
        float((theirs[1][name] - value).norm() / value.norm()) for name, value in same[1].items()
    )
    scale = norm(theirs[1]) / norm(own[1])
    return {
        "loss": theirs[0], "loss_difference": abs(theirs[0] / same[0] - 1), "gradient_difference": worst,
        "loss_scale": theirs[0] / own[0], "gradient_scale": scale, "equal_clip": CLIP / scale,
    }  # fmt: skip


EVERY = ["every", "kl"]  # specdec's options for speculators' rows and loss
COLUMNS = [
    "trainer",
    "reduction",
    "theirs",
    "loss difference",
    "gradient difference",
    "loss scale",
    "gradient scale",
]
COLUMNS += ["clip"]
NOTES = """\
*theirs*: the loss as that trainer minimizes it, seven unroll steps weighted 0.8^k. *difference*: relative, of the loss
and of the worst weight's gradient (in norm), where specdec's losses of the same rows are reduced as theirs. *scale*:
their loss and gradient norm over specdec's own, which is one mean over the rows of all steps. *clip*: that of specdec's
gradient norm which does what 0.5 does there. Rotary angles are float32 everywhere, as in training; whatever else the
others compute in float32 by name (norms, softmax, loss) is computed in float64 here.
"""


def main() -> int:
    """Compare under every mask; the exit status."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--peers", metavar="PYTHON", required=True, help="python of the environment with the peers"
    )
    p.add_argument(
        "--eagle",
        metavar="FILE",
        type=Path,
        help="cnets.py of SafeAILab/EAGLE; without it, the others alone",
    )
    p.add_argument("--workload", choices=sorted(recipe.WORKLOADS), default="T")
    p.add_argument(
        "--masks", nargs="+", choices=recipe.MASKS, default=["all", "half"], help="rows supervised"
    )
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--out", type=Path, help="a .md file to write; the raw figures go to the .json beside it"
    )
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    size, versions = recipe.WORKLOADS[a.workload], dict[str, str]()
    weights, data = recipe.draw(size, a.seed)
    about, lines, raw = harness.machine(a.threads), list[str](), []
    # specdec's, by mask and whether every row counts
    found: dict[tuple[str, bool], list[Step]] = {}
    kinds = [(mask, every) for mask in a.masks for every in (False, True)]
    unrolled: list[Asked] = [
        (mask, [*EVERY * every, f"steps={k + 1}"])
        for mask, every in kinds
        for k in range(size.unroll)
    ]
    steps = taken(a, "of_specdec", unrolled, versions)
    for n, kind in enumerate(kinds):
        found[kind] = steps[n * size.unroll : (n + 1) * size.unroll]
    others = peers(a.eagle)
    theirs = [
        taken(a, peer.module, [(mask, peer.options) for mask in a.masks], versions)
        for peer in others
    ]
    for n, mask in enumerate(a.masks):
        positions, table = recipe.taught(size, mask), []
        every_row = recipe.per_step(size, torch.ones(len(positions)), positions)
        known = recipe.per_step(size, recipe.known(data, weights, positions), positions)
        for peer, taken_by in zip(others, theirs, strict=True):
            rows = every_row if peer.every else known
            summed = sums(found[mask, peer.every], rows)
            own = reduced(summed, [1 / sum(DECAY**k * n for k, n in enumerate(rows))] * len(rows))
            same = reduced(summed, [peer.weigh(n, size.tokens) for n in rows])
            one = compare(taken_by[n], same, own)
            raw.append(
                {"mask": mask, "peer": peer.name, "reduction": peer.reduction, "rows": rows, **one}
            )
            table.append([
                peer.name, peer.reduction, f"{one['loss']:.6f}", f"{one['loss_difference']:.1e}",
                f"{one['gradient_difference']:.1e}", f"{one['loss_scale']:.2f}", f"{one['gradient_scale']:.2f}",
                f"{one['equal_clip']:.3f}",
            ])  # fmt: skip
        lines += [f"\n## {a.workload}, {mask} rows supervised\n", *harness.table(COLUMNS, table, 2)]
    if a.eagle:
        lines.append(
            f"\nSHA-256 of the file given as `--eagle`: `{hashlib.sha256(a.eagle.read_bytes()).hexdigest()}`"
        )
    head = [
        f"# The same rows in float64, {about['date'][:10]}\n",
        *harness.conditions(about, versions),
    ]
    harness.keep(a.out, [*head, "", NOTES, *lines], {"run": about, "comparisons": raw})
    return int(
        any(max(one["loss_difference"], one["gradient_difference"]) > TOLERANCE for one in raw)
    )


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
