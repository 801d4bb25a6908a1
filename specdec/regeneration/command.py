"""``specdec regenerate``: the target writes the answers of a data set; flags of ``vllm serve`` go after ``--``.

The same command goes on with a run that ended early.
"""

import logging
import sys
import time
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from specdec.arguments import parse, target_shorthand
from specdec.data.conversations import tell_left_out
from specdec.data.rows import find_sources
from specdec.embedded.source import TargetSource
from specdec.files import sha256
from specdec.imports import flags
from specdec.provenance import provenance
from specdec.regeneration.asking import Asking
from specdec.regeneration.engines import Chosen, add_engines, choose
from specdec.regeneration.journal import Journal
from specdec.regeneration.outcome import Outcome, Truncated, record_of, write
from specdec.regeneration.rows import Row, digest, read_beginnings, read_chats
from specdec.regeneration.run import begin, go_on
from specdec.serving.arguments import log_told, split
from specdec.signals import Asked, asked_to_end

log = logging.getLogger(__name__)

FEW = 1  # the exit status where nothing was made of the data, or too little


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = ArgumentParser(prog="specdec regenerate", description=__doc__, exit_on_error=False, allow_abbrev=False)
    out.add_argument("--config", action="config", help="a YAML file with any of the arguments below")
    out.add_argument("--target", type=TargetSource, default=TargetSource())
    out.add_argument("--data", type=str, nargs="+", required=True, help="conversations as ChatData reads them; with --prompt_tokens plain text")  # fmt: skip # noqa: E501
    out.add_argument("--out", type=str, required=True, help="the data set to write, FILE.jsonl; FILE.json tells of it")
    out.add_argument("--limit", type=int | None, default=None, help="use the first rows only")
    out.add_argument("--layout", type=str | None, default=None, help="of all conversations; by default told by each row's columns")  # fmt: skip # noqa: E501
    out.add_argument("--broken", type=Literal["refuse", "drop"], default="refuse", help="whether a malformed conversation ends the run or is left out")  # fmt: skip # noqa: E501
    out.add_argument("--prompt_tokens", type=int | None, default=None, help="of plain text: what the target goes on from")  # fmt: skip # noqa: E501
    out.add_argument("--engine", type=Literal["transformers", "vllm", "openai"], default="transformers")
    add_engines(out)
    out.add_argument("--max_new_tokens", type=int, default=Asking.max_new_tokens, help="new tokens per answer")
    out.add_argument("--temperature", type=float, default=Asking.temperature, help="0 for greedy decoding")
    out.add_argument("--top_p", type=float, default=Asking.top_p, help="1 for all tokens")
    out.add_argument("--top_k", type=int, default=Asking.top_k, help="0 for all tokens")
    out.add_argument("--min_p", type=float, default=Asking.min_p, help="0 for all tokens")
    out.add_argument("--seed", type=int, default=Asking.seed, help="of it, a row's id and the turn every answer's seed is made")  # fmt: skip # noqa: E501
    out.add_argument("--thinking", type=bool | None, default=None, help="the chat template's enable_thinking")
    out.add_argument("--truncated", type=Truncated, default="drop", help="whether rows are written whose last answer ran out of tokens")  # fmt: skip # noqa: E501
    out.add_argument("--max_failed", type=float, default=0.1, help="share of failed rows from which on the exit status is 1")  # fmt: skip # noqa: E501
    return out


def main(argv: list[str]) -> int:
    """Run the command.

    Returns:
        0; 1 if no row was made or too many failed; 128 and the signal's number if it was stopped.

    Raises:
        ValueError: an argument or a file is wrong, the run was begun otherwise, or the target is not to be had.
    """
    ours, extra = split(argv)
    arguments = parser()
    args = parse(arguments, target_shorthand(ours))
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "thinking")
    asking = Asking(**{name: args[name] for name in names})
    out = Path(args.out)
    kept = _journal(out)
    try:
        with asked_to_end():
            chosen = choose(arguments, args, asking, extra)
            left_out: list[str] | None = [] if args.broken == "drop" else None
            rows = _rows(args, chosen, left_out)[: args.limit]
            settings = {
                "target": chosen.identity,
                "asking": asking.record(),
                "input": {"rows": len(rows), "sha256": digest(rows), "prompt_tokens": args.prompt_tokens},
            }
            with Journal(kept, settings) as journal:
                outcome, session = _regenerate(rows, chosen, journal)
                more = {
                    **settings,
                    "data": {name: sha256(name) if Path(name).is_file() else None for name in find_sources(args.data)},
                    "left_out": left_out or [],
                    "seconds": journal.seconds + journal.elapsed,
                    "sessions": journal.sessions,
                    "last_session": session,
                    "how": chosen.how,
                    "provenance": provenance(["specdec", "regenerate", *flags(), *argv], asking.seed),
                }
                record = write(outcome, out, args.truncated, more)
    except Asked as asked:
        sys.stderr.write(f"specdec regenerate: stopped; {_kept(kept)}\n")
        return asked.status
    _tell(record, out)
    return FEW if not record["counts"]["written"] or outcome.failed_share() > args.max_failed else 0


def _journal(out: Path) -> Path:
    """Where the answers are kept until all are there, and after.

    Raises:
        ValueError: the data set cannot be written there.
    """
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out}: name it FILE.jsonl; its record will be FILE.json")
    kept = out.with_name(f"{out.name}.journal")
    if out.exists() and not kept.exists():
        raise ValueError(f"{out} exists already, without {kept.name}: choose another --out or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    return kept


def _rows(args: Namespace, chosen: Chosen, left_out: list[str] | None) -> list[Row]:
    if args.prompt_tokens is None:
        rows = read_chats(args.data, args.layout, left_out)
        tell_left_out(left_out or ())
        return rows
    if args.layout is not None:
        raise ValueError("--layout is of conversations: with --prompt_tokens a row has a 'text' or a 'prompt'")
    if left_out is not None:
        raise ValueError("--broken is of conversations: a text that cannot be read has to be mended")
    if args.thinking is not None:
        raise ValueError("--thinking is the chat template's: plain text has none")
    return read_beginnings(args.data, chosen.tokenizer, args.prompt_tokens)


def _regenerate(rows: list[Row], chosen: Chosen, journal: Journal) -> tuple[Outcome, dict[str, Any]]:
    """What became of the rows, and how fast this session was."""
    outcome = begin(rows, journal)
    before = outcome.tokens
    seconds = 0.0
    if any(not talk.done for talk in outcome.talks):
        try:
            with log_told(), chosen.up() as engine:
                start = time.monotonic()
                go_on(outcome, engine, journal)
                seconds = time.monotonic() - start
        except ValueError as error:
            raise ValueError(f"{error}; {_kept(journal.path)}") from error
    tokens = outcome.tokens - before
    return outcome, {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
    }


def _kept(journal: Path) -> str:
    return f"what is done is kept in {journal}: the same command goes on"


def _tell(record: dict[str, Any], out: Path) -> None:
    counts = record["counts"]
    others = ", ".join(f"{counts[name]} {name}" for name in ("truncated", "failed", "skipped") if counts[name])
    speed = record["last_session"]["tokens_per_second"]
    fast = f", {speed:.0f} tokens/s" if speed else ""
    sys.stdout.write(
        f"{out}: {counts['written']} of {counts['rows']} rows{f' ({others})' if others else ''}, "
        f"{record['answers']['tokens']} tokens{fast}\n"
    )
    if counts["truncated"] and record["truncated"] == "drop":
        log.warning(
            "%d rows ran out of tokens and are left out: raise --max_new_tokens, or run this again with "
            "--truncated keep",
            counts["truncated"],
        )
    if counts["failed"]:
        log.warning(
            "%d rows failed, %s says why; the same command tries them again: %s",
            counts["failed"], record_of(out), next(iter(record["failed"].values())),
        )  # fmt: skip
