"""Acceptance of one EAGLE-3 drafter in specdec, a real vLLM, and llama.cpp with quantized targets and drafters.

Every engine answers the same prompts greedily up to the end of the text, in chains of ``--draft_tokens``. The
acceptance length counts the bonus token, of the passes that lie within an answer; the interval is over prompts. Texts
are compared with specdec's plain decoding in float32. llama.cpp's speed, with the drafter and without, is of its own
times, one user at a time, prompt left out.

``python -m benchmarks.engines --target DIR --drafter DIR --gguf F32.gguf Q8_0.gguf --prompts FILE --out FILE.md``

Give the unquantized file first: the drafters of ``--quantized_drafters`` are served with it. vLLM is asked where
``$SPECDEC_VLLM_PYTHON`` names its Python, in float32.
"""

import argparse
import os
import shlex
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import harness
from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.drafter import load_drafter
from specdec.engines.llama import LlamaLaunch, find_llama_server
from specdec.engines.llama_bench import LlamaBench, for_bench
from specdec.engines.llama_proposals import ask_llama_cpp
from specdec.engines.proposals import ProposalEngine, RecordedAnswer
from specdec.evaluation.prompts import first_turns, load_prompts
from specdec.export import export_drafter
from specdec.export.formats import vllm_arguments
from specdec.export.gguf import FILE
from specdec.report.statistics import interval
from specdec.target import Target, TargetSource
from specdec.utils.vllm import VARIABLE

COLUMNS = (
    "engine",
    "target",
    "drafter",
    "texts equal",
    "acceptance length",
    "tokens/s",
    "tokens/s alone",
    "ratio",
)


class Line(NamedTuple):
    """One engine's answers."""

    engine: str
    target: str
    drafter: str
    answers: list[list[int]]
    accepted: list[list[int]]  # by prompt, of each pass
    speed: float | None = None
    speed_alone: float | None = None


def accepted_of(answer: RecordedAnswer) -> list[int]:
    """Return how many leading drafts of every pass within the answer are the text's tokens."""
    text = [*answer.prompt, *answer.ids]
    numbers = []
    for recorded in answer.passes:
        following = text[recorded.place + 1 : recorded.place + 1 + len(recorded.drafts)]
        if recorded.place < len(answer.prompt) or len(following) < len(recorded.drafts):
            continue
        matches = [draft == token for draft, token in zip(recorded.drafts, following, strict=True)]
        numbers.append(matches.index(False) if False in matches else len(matches))
    return numbers


def ask_specdec(
    a: argparse.Namespace, target: Target, prompts: list[list[int]]
) -> tuple[Line, list[list[int]]]:
    """Return specdec's line, and the texts of plain decoding."""
    alone = PlainDecoder(target)
    plain = [alone.generate(ids, a.tokens).ids for ids in prompts]
    drafter = load_drafter(a.drafter, dtype=target.dtype)
    decoder = SpeculativeDecoder(target, drafter, Chain(a.draft_tokens))
    generations = [decoder.generate(ids, a.tokens) for ids in prompts]
    accepted = [list(generation.accepted) for generation in generations]
    texts = [generation.ids for generation in generations]
    return Line("specdec", "float32", "float32", texts, accepted), plain


def ask_vllm(
    a: argparse.Namespace, checkpoint: Any, prompts: list[list[int]], end_tokens: Collection[int]
) -> Line:
    """Return vLLM's line."""
    serve = vllm_arguments(TargetSource(a.target), checkpoint, a.draft_tokens)[1:]
    flags = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    with ProposalEngine.started() as engine:
        whole = engine.ask([*serve, *flags], prompts, a.tokens)
        name = f"vLLM {engine.version}"
    answers = [answer._replace(ids=with_end(answer.ids, end_tokens)) for answer in whole]
    accepted = [accepted_of(answer) for answer in answers]
    return Line(name, "float32", "float32", [answer.ids for answer in answers], accepted)


def ask_llama(
    a: argparse.Namespace, checkpoint: Any, file: Path, drafter: str, prompts: list[list[int]]
) -> Line:
    """Return llama.cpp's line for a target's file, with its speeds."""
    launch = LlamaLaunch(
        find_llama_server(), TargetSource(a.target), file, draft_tokens=a.draft_tokens,
        extra=("--threads", str(a.threads)),
    )  # fmt: skip
    exact = "f32" in file.stem
    name, answers = ask_llama_cpp(launch, checkpoint, prompts, a.tokens, exact)
    timed = for_bench(replace(launch, port=0), 1, max(map(len, prompts)) + a.tokens)
    bench = LlamaBench(timed, prompts, a.tokens, temperature=0.0, ignore_eos=False)
    speeds = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for served in (checkpoint, None):
            with timed.server(served, folder / f"{served is None}.log") as server:
                figures = bench(server.url, 1, folder / "figures.json", folder)
            speeds.append(1000 / figures["median_tpot_ms"])
    accepted = [accepted_of(answer) for answer in answers]
    texts = [answer.ids for answer in answers]
    return Line(name, file.stem, drafter, texts, accepted, *speeds)


def cells(line: Line, plain: list[list[int]], end_tokens: Collection[int]) -> list[str]:
    """Return a line's cells; a text ends at its first end token."""
    equal = sum(
        with_end(ids, end_tokens) == with_end(text, end_tokens)
        for ids, text in zip(line.answers, plain, strict=True)
    )
    sums_PF = np.array(
        [[sum(numbers) + len(numbers), len(numbers)] for numbers in line.accepted], float
    )
    figure = interval(sums_PF)
    assert figure is not None
    acceptance = f"{figure.mean:.2f} [{figure.low:.2f}, {figure.high:.2f}]"
    speeds = ["-", "-", "-"]
    if line.speed and line.speed_alone:
        speeds = [
            f"{line.speed:.1f}",
            f"{line.speed_alone:.1f}",
            f"{line.speed / line.speed_alone:.2f}",
        ]
    return [line.engine, line.target, line.drafter, f"{equal} of {len(plain)}", acceptance, *speeds]


def with_end(ids: list[int], end_tokens: Collection[int]) -> list[int]:
    """Return the tokens up to the first end token, which is kept."""
    ends = [at for at, token in enumerate(ids) if token in end_tokens]
    return ids[: ends[0] + 1] if ends else ids


def compare(a: argparse.Namespace) -> list[str]:
    """Ask every engine, and return the report's lines."""
    target = TargetSource(a.target).load()
    prompts, _ = first_turns(target, load_prompts([a.prompts], a.count), a.tokens + a.draft_tokens)
    first, plain = ask_specdec(a, target, prompts)
    lines = [first]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = TargetSource(a.target)
        drafter = load_drafter(a.drafter, dtype=torch.float32)
        export_drafter(drafter, target, folder / "vllm", served=source)
        exported = export_drafter(drafter, target, folder / "gguf", "gguf", served=source)
        if os.environ.get(VARIABLE):
            harness.tell("vLLM")
            lines.append(
                ask_vllm(
                    a,
                    exported.checkpoint._replace(directory=folder / "vllm"),
                    prompts,
                    target.eos_token_ids,
                )
            )
        for file in a.gguf:
            harness.tell(f"llama.cpp, {file.stem}")
            lines.append(ask_llama(a, exported.checkpoint, file, "f32", prompts))
        for quantized in a.quantized_drafters:
            place = folder / quantized.stem
            place.mkdir()
            (place / FILE).symlink_to(quantized.resolve())
            harness.tell(f"llama.cpp, drafter {quantized.stem}")
            checkpoint = exported.checkpoint._replace(directory=place)
            lines.append(ask_llama(a, checkpoint, a.gguf[0], quantized.stem, prompts))
    rows = [cells(line, plain, target.eos_token_ids) for line in lines]
    about = harness.machine(a.threads)
    about["command"] = shlex.join(
        ["python", "-m", "benchmarks.engines", *about["command"].split()[2:]]
    )
    versions = {name: about["versions"][name] for name in ("torch", "transformers")}
    facts = f"- {len(prompts)} prompts, up to {a.tokens} tokens, chains of {a.draft_tokens}, one text at a time"
    return [
        "# One drafter in several engines", "", *harness.conditions(about, versions), facts, "",
        *harness.table(COLUMNS, rows, 3),
    ]  # fmt: skip


def main() -> None:
    """Read the command line, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--gguf", type=Path, nargs="+", required=True)
    parser.add_argument("--quantized_drafters", type=Path, nargs="*", default=[])
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft_tokens", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--force", action="store_true")
    a = parser.parse_args()
    harness.check_out(a.out, a.force)
    lines = compare(a)
    harness.keep(a.out, lines, {})


if __name__ == "__main__":
    main()
