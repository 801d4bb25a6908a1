"""``specdec drift``: what a drafter attends to, and how its recurrent state changes, draft step by draft step."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from rich.console import Console

from specdec.arguments import parse, target_shorthand
from specdec.compose import new_run
from specdec.drift.measure import Sums, measure
from specdec.drift.plot import plot
from specdec.drift.report import print_summaries, report
from specdec.drift.results import Document, document
from specdec.drift.settings import Settings
from specdec.drift.summary import difference, summary
from specdec.drift.texts import OwnText, own_texts
from specdec.drift.trained import trained_depth
from specdec.embedded.source import TargetSource
from specdec.evaluation.arguments import measuring_parser
from specdec.evaluation.pair import Pair, load_pairs
from specdec.evaluation.prompts import Prompt, fingerprint, load_prompts
from specdec.evaluation.several import labelled, told
from specdec.evaluation.skipping import Skipped, first_turns
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED
from specdec.files import staged_directory, write_json, write_text
from specdec.imports import flags
from specdec.progress import progress
from specdec.provenance import provenance
from specdec.target import Target

RESULT, COMPARISON, REPORT, FIGURE = "drift.json", "comparison.json", "report.md", "drift"


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = measuring_parser("drift", __doc__, several=True)
    default = Settings()
    out.add_argument("--labels", type=str, nargs="*", default=[], help="names of the drafters; by default of their directories")  # fmt: skip # noqa: E501
    out.add_argument("--depths", type=int, default=default.depths, help="draft steps; may exceed the trained ones")
    out.add_argument(
        "--anchors", type=int, default=default.anchors, help="chains for each prompt, spread over its answer"
    )
    out.add_argument("--sink_tokens", type=int, default=default.sink_tokens, help="first positions of the text that count as the sink")  # fmt: skip # noqa: E501
    out.add_argument("--recent", type=int, default=default.recent, help="committed tokens that count as recent")
    out.add_argument("--trained_depth", type=int | None, default=None, help="unroll steps in training, where no run directory around the drafter says it")  # fmt: skip # noqa: E501
    out.add_argument("--out", type=str | None, default=None, help="directory for the results; it must not exist yet, or be empty")  # fmt: skip # noqa: E501
    return out


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an argument, a file or the pair of a drafter and the target is wrong.
    """
    args = parse(parser(), target_shorthand(argv))
    found = drift(
        args.target,
        args.drafter,
        args.prompts,
        Path(args.out) if args.out else new_run("drift"),
        settings=Settings(args.depths, args.anchors, args.sink_tokens, args.recent),
        labels=args.labels,
        trained=args.trained_depth,
        max_new_tokens=args.max_new_tokens,
        limit=args.limit,
        layouts=args.layouts,
        device=args.device,
        other_target=args.other_target,
        command=["specdec", "drift", *flags(), *argv],
    )
    print_summaries(list(found.items()), Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150))
    return 0


def drift(
    source: TargetSource,
    directories: Sequence[str],
    prompt_files: Sequence[str | Path],
    out: Path,
    *,
    settings: Settings = Settings(),  # noqa: B008  frozen
    labels: Sequence[str] = (),
    trained: int | None = None,
    max_new_tokens: int = 128,
    limit: int | None = None,
    layouts: Sequence[str] = (),
    device: str = "cpu",
    other_target: bool = False,
    command: list[str] | None = None,
) -> dict[str, Document]:
    """Measure saved drafters on the target's own answers, and write results, report and figures into ``out``.

    Of one drafter ``out`` has ``drift.json``, of several every drafter's in a folder of its label, and
    ``comparison.json`` with the differences to the first, paired by prompt; always ``report.md``, ``drift.png`` and
    ``drift.pdf``.

    Returns:
        What the files ``drift.json`` hold, by label.

    Raises:
        ValueError: something given is wrong; nothing is written then.
    """
    settings.check_length(max_new_tokens)
    names = labelled(directories, labels)
    depths = [trained_depth(Path(directory), trained) for directory in directories]
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    with staged_directory(out) as folder:
        prompts = load_prompts(prompt_files, limit, layouts)
        pairs = load_pairs(source, directories, device, other_target)
        target = pairs[0].target
        texts, skipped = _texts(target, prompts, max_new_tokens, settings)
        context: dict[str, Any] = {
            "target": dict(target.identity),
            "settings": {
                **asdict(source),
                **asdict(settings),
                "prompts": [str(path) for path in prompt_files],
                "prompts_sha256": fingerprint(prompts),
                "max_new_tokens": max_new_tokens,
                "device": device,
                "intervals": f"{METHOD}, {RESAMPLES} resamples, seed {SEED}",
                "torch_threads": torch.get_num_threads(),
            },
            "provenance": provenance(command),
        }
        found: dict[str, Document] = {}
        for name, directory, pair, depth in zip(names, directories, pairs, depths, strict=True):
            sums = _measured(pair, texts, settings, name)
            one = document(pair.drafter.config, [text.prompt_id for text in texts], sums, depth, settings.depths)
            short = [Skipped(text.prompt_id, f"the answer ends after {len(text.ids) - text.prompt} tokens")
                     for text, each in zip(texts, sums, strict=True) if not each.chains]  # fmt: skip
            left_out = [each._asdict() for each in [*skipped, *short]]
            found[name] = {
                **one,
                "drafter": told(name, directory, pair),
                "summary": summary(one),
                "skipped": left_out,
                **context,
            }
        _write(folder, found)
    return found


def _write(folder: Path, found: dict[str, Document]) -> None:
    first, *others = found
    differences = {name: difference(found[name], found[first]) for name in others}
    plot(list(found.items()), folder / FIGURE)
    write_text(folder / REPORT, report(list(found.items()), f"{FIGURE}.png", differences))
    if not others:
        write_json(folder / RESULT, found[first])
        return
    for name, one in found.items():
        write_json(folder / name / RESULT, one)
    write_json(folder / COMPARISON, {"base": first, "differences": differences})


def _texts(
    target: Target, prompts: Sequence[Prompt], max_new_tokens: int, settings: Settings
) -> tuple[list[OwnText], list[Skipped]]:
    asked, skipped = first_turns(target, prompts, max_new_tokens, settings.depths + 1)
    left_out = {one.prompt_id for one in skipped}
    names = [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in left_out]
    with progress("answers", "tokens", len(asked) * max_new_tokens) as advance:
        texts = own_texts(target, list(zip(names, asked, strict=True)), max_new_tokens, advance)
    return texts, skipped


def _measured(pair: Pair, texts: Sequence[OwnText], settings: Settings, name: str) -> list[Sums]:
    total = sum(len(text.anchors(settings.anchors, settings.depths)) for text in texts)
    found: list[Sums] = []
    with progress(name, "chains", total) as advance:
        for text in texts:
            found.append(measure(pair.target, pair.drafter, text, settings))
            advance(found[-1].chains)
    return found
