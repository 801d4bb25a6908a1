"""``specdec regenerate``: the target writes the answers of a data set, so that a drafter learns from its own words."""

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specdec.answering.dialogue import Dialogue, TurnAnswer
from specdec.answering.in_process import InProcess
from specdec.data.chat import read_conversations, warn_of_broken
from specdec.engines.client import Endpoint
from specdec.engines.regenerate_options import RegenerateConfig
from specdec.engines.remote import Remote
from specdec.target.identity import IDENTIFYING
from specdec.utils.files import staged, write_json, write_text
from specdec.utils.journal import Journal
from specdec.utils.machine import provenance
from specdec.utils.progress import progress
from specdec.utils.reading import sha256
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

FORMAT = "specdec.regenerate.v5"  # of the record and of the journal
# The settings that the answers depend on.
ASKING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "thinking")
MOST_FAILED = 0.1  # of the rows, for the exit status 0


def regenerate(config: RegenerateConfig) -> int:
    """Let the target write the answers of a data set, in this process or behind a server that runs at --url.

    The same command resumes a run that ended early. A server's key is read from $VLLM_API_KEY. The exit status is
    1 if no row was made, or more than a tenth of them failed.

    Example: specdec regenerate --target Qwen/Qwen3-4B --data chats.jsonl --out own.jsonl
    """
    out = config.out
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out}: name it FILE.jsonl; its record will be FILE.json")
    path = out.with_name(f"{out.name}.journal")
    for file in (out, out.with_suffix(".json")):
        if file.exists() and not path.exists():
            raise ValueError(
                f"{file} exists already, without {path.name}: choose another --out or remove it first"
            )
    hint = f"what is done is kept in {path}: the same command resumes"
    try:
        with stop_on_signals():
            answering, identity = _answering(config)
            rows, left_out = _read_rows(config)
            dialogues = [json.dumps([row.id, row.turns, row.tools], sort_keys=True) for row in rows]
            digest = hashlib.sha256("".join(dialogues).encode()).hexdigest()
            about: dict[str, Any] = {
                "format": FORMAT,
                "target": identity,
                "asking": {name: getattr(config, name) for name in ASKING},
                "input": {"rows": len(rows), "sha256": digest},
            }
            settings = about | {"target": _with_source(identity)}
            with Journal(path, "specdec.regenerate", settings) as journal:
                try:
                    _answer(rows, answering, journal)
                except ValueError as error:
                    raise ValueError(f"{error}; {hint}") from error
            about |= {
                "data": config.data,
                "left_out": left_out,
                "provenance": provenance(seed=config.seed),
            }
            counts = _write(rows, out, config.truncated, about)
    except StopRequested as stop:
        sys.stderr.write(f"specdec regenerate: stopped; {hint}\n")
        return stop.status
    if counts["truncated"] and config.truncated == "drop":
        log.warning(
            "rows that ran out of tokens are left out: raise --max_new_tokens, or give --truncated keep"
        )
    if counts["failed"]:
        log.warning("%s failed; the same command tries again", how_many(counts["failed"], "row"))
    sys.stdout.write(_summary(rows, out, counts))
    most = MOST_FAILED * (counts["rows"] - counts["skipped"])
    return 1 if not counts["written"] or counts["failed"] > most else 0


def _answering(config: RegenerateConfig) -> tuple[InProcess | Remote, dict[str, Any]]:
    """Return what answers, and the target's identity: what the answers depend on, not where it runs."""
    if config.url is None:
        target = config.target.load(config.device)
        ends = sorted(target.eos_token_ids)
        identity = {"engine": config.engine, **target.identity, "eos_token_ids": ends}
        return InProcess(target, config, config.batch_size), identity
    endpoint = Endpoint(config.url)
    model = config.model or endpoint.model()
    return Remote(endpoint, model, config), {"engine": config.engine, "model": model}


def _with_source(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity with the target's source at every digest: a message of another digest says whose it is."""
    digests = {name: identity.get(name) for name in IDENTIFYING if name != "dtype"}
    named = {name: f"{identity['source']}: {digest}" for name, digest in digests.items() if digest}
    return identity | named


def _read_rows(config: RegenerateConfig) -> tuple[list[Dialogue], list[str]]:
    """Return the rows to answer, and the faults of broken rows that were left out."""
    left_out: list[str] | None = [] if config.broken == "drop" else None
    conversations = read_conversations(config.data, config.layout, left_out)[: config.limit]
    rows = list(map(Dialogue.of, conversations))
    warn_of_broken(left_out)
    return rows, left_out or []


def _answer(rows: Sequence[Dialogue], answering: InProcess | Remote, journal: Journal) -> None:
    """Take the journal's answers, ask for those that are missing or failed, and append them to the journal."""
    by_id = {row.id: row for row in rows}
    for answer in (TurnAnswer(**entry) for entry in journal.entries):
        if answer.failed is None:
            by_id[answer.row].answers.append(answer)
    left = [row for row in rows if not row.done]
    total = sum(not row.skipped for row in rows)
    with progress("answers", "row", total, total - len(left)) as advance:
        for answer in answering.answers(left):
            fields = answer._asdict()
            journal.append({name: value for name, value in fields.items() if value is not None})
            advance(by_id[answer.row].ends_with(answer))


def _write(
    rows: Sequence[Dialogue], out: Path, truncated: str, about: dict[str, Any]
) -> dict[str, int]:
    """Write the data set, in the input's order, and then its record; return the record's counts."""
    due = [row for row in rows if not row.skipped]
    written = [row for row in due if row.left_out(truncated) is None]
    sums = out.with_name(f"{out.name}.sha256")  # compared by whoever reads the rows
    sums.unlink(missing_ok=True)
    with staged(out) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for row in written:
            stream.write(json.dumps(row.fields(), ensure_ascii=False) + "\n")
    answers = [answer for row in due for answer in row.answers if not answer.failed]
    counts = {
        "rows": len(rows),
        "complete": sum(row.complete for row in due),
        "ended": sum(bool(row.ended) for row in due),
        "truncated": sum(row.truncated for row in due),
        "failed": sum(bool(row.failed) for row in due),
        "skipped": len(rows) - len(due),
        "written": len(written),
        "answers": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
    }
    record = {
        "file": out.name,
        "sha256": sha256(out),
        "counts": counts,
        "failed": {row.id: f"{row.place}: {row.failed}" for row in due if row.failed},
        "ended": _reasons(row.ended for row in due),
        "skipped": _reasons(row.skipped for row in rows),
        "truncated": truncated,
        **about,
    }
    write_text(sums, f"{record['sha256']}  {out.name}\n")
    write_json(out.with_suffix(".json"), record)
    return counts


def _reasons(reasons: Iterable[str | None]) -> dict[str, int]:
    """Count the reasons, the most frequent first."""
    return dict(Counter(reason for reason in reasons if reason).most_common())


def _summary(rows: Sequence[Dialogue], out: Path, counts: dict[str, int]) -> str:
    """Return the result in words, with the reasons of the rows that were not answered to their end."""
    tokens = how_many(counts["tokens"], "token")
    lines = [f"{out}: {counts['written']:,} of {how_many(counts['rows'], 'row')} written, {tokens}"]
    lines.append(f"{how_many(counts['complete'], 'row')} answered to the end")
    lines += [
        f"{how_many(number, 'row')} ended early, kept up to that answer: {reason}"
        for reason, number in _reasons(row.ended for row in rows).items()
    ]
    if counts["truncated"]:
        lines.append(
            f"{how_many(counts['truncated'], 'row')} truncated: an answer ran out of tokens"
        )
    lines += [
        f"{how_many(number, 'row')} skipped: {reason}"
        for reason, number in _reasons(row.skipped for row in rows).items()
    ]
    if counts["failed"]:
        first = next(f"{row.place}: {row.failed}" for row in rows if row.failed)
        lines.append(f"{how_many(counts['failed'], 'row')} failed, as {first}")
    return "\n  ".join(lines) + "\n"
