"""Exports in speculators' format, loaded by the speculators library itself, beside the drafters they were made of.

Every shipped design that the format can hold is exported for targets of several kinds, with random weights. The library
gets the directory and nothing else (``SpeculatorModel.from_pretrained``), the target's states and the text, and runs
the unroll of its own training; its log-probs at every position and step are compared with those of specdec's.

``python benchmarks/loaded.py --peers PYTHON --out benchmarks/results/loaded_<hardware>_<yyyymm>.md``
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import harness

LENGTH, STEPS = 129, 4  # the library runs whole blocks of 128 rows
TOLERANCE = 1e-4  # of log-probs in float32, as a share of their range
# of the library
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError, OSError)
TARGETS = ("Llama", "Llama, tied", "Qwen3")


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]:
    """In the library's environment: what loads a directory and keeps its log-probs in a file."""
    from safetensors.torch import load_file, save_file
    from speculators.model import SpeculatorModel

    torch.set_num_threads(job["threads"])

    @torch.no_grad()
    def load(folder: str) -> dict[str, Any]:
        try:
            model = SpeculatorModel.from_pretrained(folder + "/served").float().eval()
            text, logits = load_file(folder + "/text.safetensors"), list[torch.Tensor]()
            model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0]))
            states, ids, one_document = text["states"], text["ids"], torch.zeros_like(text["ids"])
            # all depths in one pass, at places drawn: here at most
            if type(model).__name__ == "PEagleDraftModel":
                from speculators.losses import resolve_loss_config
                from speculators.models.peagle.data import generate_cod_sample_indices

                all_of_it = {
                    "num_depths": STEPS,
                    "down_sample_ratio": 1.0,
                    "down_sample_ratio_min": 1.0,
                }
                torch.manual_seed(0)
                anchors, depths = generate_cod_sample_indices(
                    ids.shape[1], torch.ones_like(ids), **all_of_it
                )
                torch.manual_seed(0)
                loss = resolve_loss_config("kl_div", "eager")  # which is not read
                last = states[..., : model.hidden_size]
                model(
                    states,
                    ids,
                    one_document,
                    verifier_last_hidden_states=last,
                    loss_config=loss,
                    **all_of_it,
                )
                (drawn,) = logits
                logits = [
                    drawn.new_full((ids.shape[1], drawn.shape[-1]), float("nan"))
                    for _ in range(STEPS)
                ]
                for k, one in enumerate(logits):
                    one[anchors[depths == k]] = drawn[depths == k]
            else:
                model(states, ids, one_document, ttt_steps=STEPS)
        except FAILURES as error:  # whatever it says is the result
            return {"error": f"{type(error).__name__}: {error}"}
        save_file(
            {str(k): one.log_softmax(-1) for k, one in enumerate(logits)},
            folder + "/theirs.safetensors",
        )
        return {"class": type(model).__name__}

    return {
        "versions": {name: version(name) for name in ("speculators", "torch", "transformers")}
    }, load


def compared(
    design: str, kind: str, folder: Path, ask: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """One design for one target: refused by the export, or how far apart the log-probs are at each step."""
    import transformers as hf
    from safetensors.torch import load_file, save_file

    from specdec.diagnostics.parity_compare import training_outputs
    from specdec.export import NotServable, export_drafter
    from specdec.nn.view import View
    from specdec.target import Target
    from tests.export.made import made_drafter
    from tests.tiny import llama_config, presets, variants

    torch.manual_seed(0)
    sizes = llama_config(tie_word_embeddings=kind.endswith("tied")).to_dict()
    config = (
        hf.Qwen3Config(**{**sizes, "model_type": "qwen3"})
        if kind == "Qwen3"
        else hf.LlamaConfig(**sizes)
    )
    hf.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "target")
    target = Target.load(folder / "target")
    drafter = made_drafter((presets() | variants())[design], target).eval()
    found: dict[str, Any] = {
        "design": design,
        "target": kind,
        "window": drafter.config.attention_window != "full",
    }
    try:
        export_drafter(drafter, target, folder / "served", "speculators")
    except NotServable as error:
        return found | {"refused": str(error)}
    ids = torch.randint(target.vocab_size, (LENGTH,)).tolist()
    # further on it reads zeros in the place of tokens that there are not
    slots = range(LENGTH - STEPS - 1)
    with torch.no_grad():
        ours = training_outputs(target, drafter, [ids], slots, STEPS - 1)
        ids_1T = torch.tensor([ids])
        documents = torch.zeros_like(ids_1T)
        read = target.forward(ids_1T, View.packed(documents), drafter.config.aux_layers).aux_BTNH
    text = {"states": read[:, :-1].flatten(2).contiguous(), "ids": ids_1T[:, 1:].contiguous()}
    save_file(text, folder / "text.safetensors")
    if error := (reply := ask(str(folder))).get("error"):
        return found | {"error": error}
    theirs = load_file(folder / "theirs.safetensors")
    known = drafter.vocab.target_ids_D
    apart = []
    for k in range(STEPS):
        one, two = ours.log_probs_AKV[:, k][:, known], theirs[str(k)][slots]
        there = two[:, 0].isfinite()  # P-EAGLE's places are drawn
        apart.append(
            float((one - two)[there].abs().max() / (one.max() - one.min()))
            if there.any()
            else float("inf")
        )
    return found | reply | {"apart": apart}


def judged(one: dict[str, Any]) -> list[float]:
    """At the steps that must be equal: the first alone with a window, which the library's unroll does not move on."""
    return list(one["apart"][:1] if one["window"] else one["apart"])


def report(
    about: dict[str, Any], versions: dict[str, str], cells: Sequence[dict[str, Any]]
) -> list[str]:
    """A table of designs by targets in Markdown, with reasons of refusals below."""
    designs = list(dict.fromkeys(one["design"] for one in cells))
    further = max(
        (max(one["apart"]) for one in cells if one["window"] and "apart" in one), default=0.0
    )
    reasons = [
        "A sliding window, which in the library's unroll does not move with the depth: equal at the first step, "
        f"{further:.1e} apart further on.",
        *dict.fromkeys(one["refused"] for one in cells if "refused" in one),
    ]
    rows = []
    for design in designs:
        row = [design]
        for one in (one for one in cells if one["design"] == design):
            if "refused" in one:
                row.append(f"refused ({reasons.index(one['refused']) + 1})")
            else:
                row.append(one.get("error") or f"{max(judged(one)):.1e}" + " (1)" * one["window"])
        rows.append(row)
    loaded = [one for one in cells if "apart" in one]
    equal = sum(max(judged(one)) <= TOLERANCE for one in loaded)
    return [
        f"# Exports in the speculators library, {about['date'][:10]}", "",
        *harness.conditions(about, about["versions"] | {f"the library's {k}": v for k, v in versions.items()}), "",
        f"{len(loaded)} exports loaded, {equal} equal to {TOLERANCE:g} at each of {STEPS} unroll steps, those with a "
        "sliding window at the first. A figure is the greatest difference of two log-probs, as a share of their "
        "range.", "",
        *harness.table(["design", *TARGETS], rows), "", *(f"{n}. {text}" for n, text in enumerate(reasons, 1)),
    ]  # fmt: skip


def main() -> int:
    """All of it; the exit status is 1 if an export is not loaded, or says something else."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--peers", default=sys.executable, metavar="PYTHON", help="the Python that has speculators"
    )
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    from tests.tiny import presets, variants

    about, cells, job = harness.machine(1), list[dict[str, Any]](), {"threads": 1}
    with (
        tempfile.TemporaryDirectory(prefix="loaded-") as name,
        harness.Worker(
            a.peers, "speculators", Path(__file__).resolve(), job, Path(name) / "log"
        ) as worker,
    ):
        for design, kind in itertools.product(presets() | variants(), TARGETS):
            folder = Path(name) / f"{design}-{kind}".replace(", ", "-")
            cells.append(compared(design, kind, folder, worker.ask))
            harness.tell(" ".join(f"{key}: {value}" for key, value in cells[-1].items()))
        harness.keep(a.out, report(about, worker.about["versions"], cells), cells)
    return int(
        any("error" in one or ("apart" in one and max(judged(one)) > TOLERANCE) for one in cells)
    )


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
