"""Hugging Face's ``generate`` with a specdec drafter beside plain ``generate``, prompt by prompt in turns.

Both are ``model.generate(**inputs)``, greedy, one prompt at a time; one has ``custom_generate=DraftedGenerate(model,
drafter)``. Each holds its own copy of the model, in a process of its own. Every text is compared with plain
``generate``'s. Where they part, the plain model says by how much of its greatest logit the two tokens differ: no more
than rounding allows, or the exit status is 1.

``python benchmarks/generate.py --drafter DIR --out benchmarks/results/generate_<hardware>_<yyyymm>.md``

``--target`` is a directory, or the embedded target (the default), whose prompts are held out from its training unless
``--prompts`` names files in the formats of ``specdec evaluate``. Linux only: it reads ``/proc``.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness

PROMPT = 128  # tokens of a prompt held out from the embedded target
DTYPES = ["float32", "bfloat16"]
Answers = dict[str, list[dict[str, Any]]]


class System(NamedTuple):
    """A line of the table."""

    key: str
    drafted: bool
    compiled: bool = False


SYSTEMS = (
    System("generate", drafted=False),
    System("generate, drafter", drafted=True),
    System("generate, drafter, compiled", drafted=True, compiled=True),
)
PLAIN = SYSTEMS[0].key


# --- the workers -----------------------------------------------------------------------------------------------------


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Load the model, and the drafter if one is to draft; what answers prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    from specdec.decoding import DraftedGenerate

    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=dtype).eval()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": job["tokens"]}
    if model.generation_config.pad_token_id is None:
        options["pad_token_id"] = 0
    drafted = None
    if job["drafted"]:
        drafted = DraftedGenerate(model, job["drafter"], job["shape"], job["compiled"])
        options["custom_generate"] = drafted

    def ask(question: Any) -> dict[str, Any]:
        if "parting" in question:
            return margin(model, **question)
        ids = torch.tensor([question["prompt"]])
        mask = torch.ones_like(ids)
        out, spent = harness.timed(lambda: model.generate(ids, attention_mask=mask, **options))
        answer = {"ids": out[0, ids.shape[1] :].tolist(), **spent}
        if drafted is not None and drafted.generation is not None:
            made = drafted.generation
            answer["accepted"] = list(made.accepted)
            answer["draft_seconds"] = sum(made.draft_ms) / 1e3
            answer["verify_seconds"] = sum(made.verify_ms) / 1e3
        return answer

    packages = ("specdec-lightning", "torch", "transformers")
    return {"versions": {name: version(name) for name in packages}}, ask


def margin(model: Any, prompt: list[int], parting: list[int], tokens: list[int]) -> dict[str, Any]:
    """By how much two tokens' logits differ after a text, as a share of the greatest (at least 1), and what of it
    rounding allows in the model's dtype."""
    import torch

    from specdec.evaluation.lossless import TOLERANCE

    with torch.inference_mode():
        logits_V = model(torch.tensor([[*prompt, *parting]]), use_cache=False).logits[0, -1]
    first, second = logits_V[tokens].double().tolist()
    size = max(1.0, float(logits_V.abs().max()))
    return {"margin": abs(first - second) / size, "allowed": TOLERANCE[model.dtype]}


# --- the parent ------------------------------------------------------------------------------------------------------


def prompt_ids(a: argparse.Namespace, target: Any) -> list[list[int]]:
    """Token ids of ``--count`` prompts, and one more to warm up with."""
    from specdec.embedded import SEED, held_out_prompts
    from specdec.evaluation.prompts import PromptConversation, load_prompts

    tokenizer = target.tokenizer
    if not a.prompts:
        rows = held_out_prompts(a.count + 1, PROMPT, SEED, tokenizer)
        return [tokenizer.encode(row["prompt"]) for row in rows]
    prompts = load_prompts(a.prompts, a.count + 1)
    if len(prompts) < 2:
        raise ValueError(f"{', '.join(a.prompts)}: two prompts are needed, one to warm up with")
    first_turns = [PromptConversation(prompt, tokenizer).next_ids() for prompt in prompts]
    return [ids for ids in first_turns if ids is not None]


def measure(
    a: argparse.Namespace, dtype: str, prompts: list[list[int]], folder: Path
) -> tuple[Answers, list[dict[str, Any]]]:
    """Every system's answers to every prompt, by its key, and the margins where texts part from plain ones."""
    chosen = [system for system in SYSTEMS if a.compiled or not system.compiled]
    answers: Answers = {system.key: [] for system in chosen}
    partings: list[dict[str, Any]] = []
    job = {"target": a.directory, "drafter": a.drafter, "shape": a.shape, "dtype": dtype,
           "tokens": a.tokens, "threads": a.threads}  # fmt: skip
    with contextlib.ExitStack() as alive:
        workers = {}
        for system in chosen:
            harness.tell(f"{dtype}: starting {system.key} and warming it up")
            worker = harness.Worker(
                sys.executable,
                system.key,
                Path(__file__).resolve(),
                job | system._asdict(),
                folder / f"{system.key}.log",
            )
            workers[system.key] = alive.enter_context(worker)
            # a longer text than any before would compile again
            longest = max(prompts, key=len)
            worker.ask({"prompt": longest})
            worker.ask({"prompt": prompts[-1]})
            a.versions |= worker.about["versions"]
        for number, prompt in enumerate(prompts[:-1]):
            harness.tell(f"{dtype}: prompt {number + 1} of {len(prompts) - 1}")
            for turn in range(len(chosen)):
                key = chosen[(turn + number) % len(chosen)].key
                answers[key].append(workers[key].ask({"prompt": prompt}))
            for key in answers:
                parting = parting_of(answers[PLAIN][-1]["ids"], answers[key][-1]["ids"])
                if parting is not None:
                    found = workers[PLAIN].ask({"prompt": prompt, **parting})
                    partings.append({"system": key, "prompt": number, **parting, **found})
    return answers, partings


def parting_of(plain: list[int], drafted: list[int]) -> dict[str, Any] | None:
    """The text up to where two answers part, and their two tokens there; None if they are equal.

    Raises:
        ValueError: one is the beginning of the other, which rounding cannot do.
    """
    if plain == drafted:
        return None
    pairs = zip(plain, drafted, strict=False)
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        raise ValueError(f"texts of {len(plain)} and {len(drafted)} tokens begin alike: one ended")
    return {"parting": plain[:place], "tokens": [plain[place], drafted[place]]}


def speedup(plain: Sequence[dict], drafted: Sequence[dict]) -> tuple[float, float, float]:
    """How many times as many tokens a second as plain ``generate``, with its 95 % interval over prompts."""
    import numpy as np

    from specdec.report.statistics import POSITIVE, interval, over

    columns = [(len(a["ids"]), a["seconds"], len(b["ids"]), b["seconds"])
               for a, b in zip(drafted, plain, strict=True)]  # fmt: skip
    found = interval(np.array(columns, dtype=float), over, POSITIVE)
    assert found is not None
    return found.mean, found.low or 0.0, found.high or float("inf")


def report(
    answers: Answers, partings: Sequence[dict[str, Any]]
) -> tuple[list[str], dict[str, Any]]:
    """The tables of one dtype, and their figures."""
    rows = []
    times = []
    figures: dict[str, Any] = {}
    for key, each in answers.items():
        seconds = sum(answer["seconds"] for answer in each)
        tokens = sum(len(answer["ids"]) for answer in each)
        equal = sum(a["ids"] == b["ids"] for a, b in zip(each, answers[PLAIN], strict=True))
        figures[key] = {"tokens_per_second": tokens / seconds, "equal": equal}
        shown = ["1", "-"]
        if key != PLAIN:
            ratio, low, high = speedup(answers[PLAIN], each)
            passes = [n for answer in each for n in answer["accepted"]]
            length = 1 + sum(passes) / len(passes)
            draft = sum(answer["draft_seconds"] for answer in each)
            verify = sum(answer["verify_seconds"] for answer in each)
            rest = seconds - draft - verify
            figures[key] |= {"speedup": [ratio, low, high], "acceptance_length": length}
            shown = [f"{ratio:.2f} [{low:.2f}, {high:.2f}]", f"{length:.2f}"]
            parts = [f"{1e3 * part / len(passes):.2f}" for part in (draft, verify, rest)]
            times.append([key, *parts, f"{len(passes)}"])
        rows.append([key, f"{tokens / seconds:.1f}", *shown, f"{equal} of {len(each)}"])
    per_token = 1e3 / figures[PLAIN]["tokens_per_second"]
    lines = [
        *harness.table(
            ["system", "tokens/s", "speed-up", "acceptance length", "texts equal"], rows
        ),
        "",
        f"Milliseconds of a pass, where plain `generate` takes {per_token:.2f} a token; *rest* has the prompts' own "
        "passes and everything between passes:",
        "",
        *harness.table(["system", "draft", "verify", "rest", "passes"], times),
    ]
    if partings:
        worst = max(partings, key=lambda parting: parting["margin"])
        wrong = len([parting for parting in partings if parting["margin"] > parting["allowed"]])
        lines += [
            "",
            f"Where texts part, the two tokens' logits are at most {worst['margin']:.1e} of the greatest apart; "
            f"rounding is allowed {worst['allowed']:.0e}; {wrong} of {len(partings)} are further apart.",
        ]
    return lines + harness.disturbances(answers), figures


def options() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--target", default="embedded", help="a directory, or the embedded one")
    p.add_argument("--drafter", metavar="DIR", required=True, help="one of the target's")
    p.add_argument("--prompts", nargs="+", default=[], help="files, as of specdec evaluate")
    p.add_argument("--shape", default="chain:depth=4", help="of the drafts")
    p.add_argument("--compiled", action="store_true", help="measure the compiled drafter too")
    p.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    p.add_argument("--count", type=int, default=20, help="prompts")
    p.add_argument("--tokens", type=int, default=128, help="new tokens of each, at most")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    return p.parse_args()


def main() -> int:
    """Measure every dtype; the exit status is 1 if a text differs by more than rounding."""
    a = options()
    a.versions = {}
    harness.check_out(a.out, a.force)
    from specdec.target import TargetSource

    source = TargetSource(a.target)
    a.directory = str(source.directory())
    prompts = prompt_ids(a, source.load())
    about = harness.machine(a.threads)
    lines: list[str] = []
    raw: dict[str, Any] = {"run": about}
    is_lossless = True
    for dtype in a.dtypes:
        with tempfile.TemporaryDirectory(prefix="generate-") as folder:
            answers, partings = measure(a, dtype, prompts, Path(folder))
        shown, figures = report(answers, partings)
        is_lossless &= all(parting["margin"] <= parting["allowed"] for parting in partings)
        timed = {key: [{n: v for n, v in answer.items() if n != "ids"} for answer in each]
                 for key, each in answers.items()}  # fmt: skip
        raw[dtype] = {"figures": figures, "partings": partings, "systems": timed}
        lines += [f"\n## {dtype}\n", *shown]
        head = [
            f"# `generate` with a drafter, {about['date'][:10]}\n",
            *harness.conditions(about, a.versions),
            "",
            f"{len(prompts) - 1} prompts, at most {a.tokens} new tokens each, greedy, one at a time; drafts "
            f"`{a.shape}`. Acceptance length: tokens committed per pass of the target, the bonus token included.",
        ]
        harness.keep(a.out, [*head, *lines], raw)
    return 0 if is_lossless else 1


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(start)
    else:
        sys.exit(main())
