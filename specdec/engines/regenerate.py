"""``specdec regenerate``: the target writes the answers of a data set, so that a drafter learns from its own words."""

import contextlib
import hashlib
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from specdec.data.chat import read_conversations
from specdec.data.layouts import ChatConversation, Message
from specdec.engines.answers import AnswerSettings, Dialogue, InProcess, Remote, TurnAnswer
from specdec.engines.client import Endpoint
from specdec.engines.serve import TIMEOUT, VllmLaunch, find_vllm
from specdec.target import TargetSource
from specdec.utils.files import sha256, staged, write_json
from specdec.utils.journal import Journal
from specdec.utils.machine import provenance
from specdec.utils.progress import progress
from specdec.utils.signals import Asked, asked_to_end

log = logging.getLogger(__name__)

FORMAT = "specdec.regenerate.v3"
MOST_FAILED = 0.1  # of the rows, for the exit status 0
KEPT = "what is done is kept in {}: the same command goes on"

Engine = contextlib.AbstractContextManager[InProcess | Remote]  # entered for as long as it is needed


def regenerate(
    *,
    data: list[str],
    out: Path,
    target: TargetSource = TargetSource(),  # noqa: B008
    engine: Literal["transformers", "vllm", "openai"] = "transformers",
    limit: int | None = None,
    layout: str | None = None,
    broken: Literal["refuse", "drop"] = "refuse",
    max_new_tokens: int = AnswerSettings.max_new_tokens,
    temperature: float = AnswerSettings.temperature,
    top_p: float = AnswerSettings.top_p,
    top_k: int = AnswerSettings.top_k,
    min_p: float = AnswerSettings.min_p,
    seed: int = AnswerSettings.seed,
    thinking: bool | None = None,
    truncated: Literal["drop", "keep"] = "drop",
    device: str = "cpu",
    batch_size: int = 32,
    url: str | None = None,
    model: str | None = None,
    concurrency: int = 64,
    vllm: str | None = None,
    timeout: float = TIMEOUT,
    vllm_args: list[str] = [],  # noqa: B006
) -> int:
    """Let the target write the answers of a data set; flags of vllm serve go after --.

    The same command goes on with a run that ended early. A server's key is read from $VLLM_API_KEY. The exit status is
    1 if no row was made, or more than a tenth of them failed.

    Example: specdec regenerate --target Qwen/Qwen3-4B --data chats.jsonl --out own.jsonl --engine vllm

    Args:
        data: conversations as ChatData reads them
        out: the data set to write, FILE.jsonl; FILE.json tells of it
        engine: the target in this process, in a vLLM that is started or stands at --url, or at the --url of another
        limit: use the first rows only
        layout: of all conversations; by default told by each row's columns
        broken: whether a malformed conversation ends the run or is left out
        max_new_tokens: new tokens per answer
        temperature: 0 for greedy decoding
        top_p: 1 for all tokens
        top_k: 0 for all tokens
        min_p: 0 for all tokens
        seed: of it, a row's id and the turn every answer's seed is made
        thinking: the chat template's enable_thinking
        truncated: whether rows are written whose last answer ran out of tokens
        device: of --engine transformers
        batch_size: prompts at a time, of --engine transformers
        url: a server that runs already, as http://127.0.0.1:8000; --engine says whether it is vLLM
        model: its name at --url; by default the first served
        concurrency: questions to a server at a time
        vllm: a Python that has vLLM, or its executable; by default $SPECDEC_VLLM_PYTHON, else this environment
        timeout: seconds until vLLM must be healthy
        vllm_args: flags for vllm serve: give them after --

    Raises:
        ValueError: an argument or a file is wrong, the run was begun otherwise, or the target is not to be had.
    """
    settings = AnswerSettings(max_new_tokens, temperature, top_p, top_k, min_p, seed, thinking)
    if (url is None and engine == "openai") or (url is not None and engine == "transformers"):
        raise ValueError("--engine openai asks a server at its --url, --engine vllm may; --engine transformers cannot")
    if vllm_args and (engine != "vllm" or url is not None):
        raise ValueError("flags after -- are those of vllm serve, which is started with --engine vllm and no --url")
    if min(batch_size, concurrency) < 1:
        raise ValueError("batch_size and concurrency must be at least 1")
    kept = _journal_of(out)
    try:
        with asked_to_end():
            if engine == "transformers":
                identity, chosen = _in_process(target, device, batch_size, settings)
            elif url is None:
                launch = VllmLaunch(find_vllm(vllm), target, port=0, timeout=timeout, extra=tuple(vllm_args))
                flags = " ".join(vllm_args)
                identity = {"engine": "vllm", "source": target.source, "revision": target.revision, "flags": flags}
                chosen = _started(launch, settings, concurrency)
            else:
                endpoint = Endpoint(url)
                identity = {"engine": engine, "model": model or endpoint.model()}
                served = Remote(endpoint, identity["model"], settings, engine == "vllm", concurrency)
                chosen = contextlib.nullcontext(served)
            left_out: list[str] | None = [] if broken == "drop" else None
            rows = [dialogue(one) for one in read_conversations(data, layout, left_out)][:limit]
            if left_out:
                log.warning("%d broken rows were left out, as: %s", len(left_out), left_out[0])
            about = {
                "target": identity,  # known by what the answers depend on, not by where it runs
                "asking": asdict(settings),
                "input": {"rows": len(rows), "sha256": _digest(rows)},
            }
            with Journal(kept, "specdec.regenerate", about) as journal:
                _go_on(rows, chosen, journal)
            more = {**about, "data": data, "left_out": left_out or [], "provenance": provenance(seed=seed)}
            record = _write(rows, out, truncated, more)
    except Asked as asked:
        sys.stderr.write(f"specdec regenerate: stopped; {KEPT.format(kept)}\n")
        return asked.status
    counts = record["counts"]
    others = ", ".join(f"{counts[name]} {name}" for name in ("truncated", "failed", "skipped") if counts[name])
    of_all = f"{counts['written']} of {counts['rows']} rows{f' ({others})' if others else ''}"
    sys.stdout.write(f"{out}: {of_all}, {counts['tokens']} tokens\n")
    if counts["truncated"] and truncated == "drop":
        log.warning("rows that ran out of tokens are left out: raise --max_new_tokens, or give --truncated keep")
    if counts["failed"]:
        first = next(iter(record["failed"].values()))
        log.warning("%d rows failed; the same command tries them again: %s", counts["failed"], first)
    most = MOST_FAILED * (counts["rows"] - counts["skipped"])
    return 1 if not counts["written"] or counts["failed"] > most else 0


def _in_process(
    target: TargetSource, device: str, batch: int, settings: AnswerSettings
) -> tuple[dict[str, Any], Engine]:
    """The target here, known by the fingerprint of its weights."""
    loaded = target.load(device)
    identity = {"engine": "transformers", **loaded.identity, "dtype": str(loaded.dtype)}
    return identity, contextlib.nullcontext(InProcess(loaded, settings, batch))


@contextlib.contextmanager
def _started(launch: VllmLaunch, settings: AnswerSettings, concurrency: int) -> Iterator[Remote]:
    """The target in a vLLM that is started for it."""
    with (
        tempfile.TemporaryDirectory(prefix="specdec-regenerate-") as scratch,
        launch.server(None, Path(scratch) / "server.log") as server,
    ):
        endpoint = Endpoint(server.url)
        yield Remote(endpoint, endpoint.model(), settings, True, concurrency, server.check)


def _journal_of(out: Path) -> Path:
    """Where the answers are kept until all are there, and after.

    Raises:
        ValueError: the data set cannot be written there.
    """
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out}: name it FILE.jsonl; its record will be FILE.json")
    kept = out.with_name(f"{out.name}.journal")
    if out.exists() and not kept.exists():
        raise ValueError(f"{out} exists already, without {kept.name}: choose another --out or remove it first")
    return kept


def dialogue(one: ChatConversation) -> Dialogue:
    """A conversation without its assistant's words.

    An answer is due to every run of turns that has a user's in it; one that comes twice in a row is one answer. The
    last user's turn is answered whether or not the row has an answer to it. From the first tool call on nothing is
    asked: what the target would call, nobody has run.
    """
    said: list[list[Message]] = []
    turns: list[Message] = []
    cut, skipped = False, None
    for message in one.messages:
        if message["role"] in ("tool", "function") or message.get("tool_calls"):
            cut, turns = True, []
            break
        if message["role"] != "assistant":
            turns.append(message)
        elif any(turn["role"] == "user" for turn in turns):
            said.append(turns)
            turns = []
        elif not said:
            skipped = "the assistant speaks before any user does"
            break
    if not skipped and any(turn["role"] == "user" for turn in turns):
        said.append(turns)
    if not said and not skipped:
        skipped = "a tool is called in the first answer" if cut else "no user's turn"
    return Dialogue(one.id, one.place, [] if skipped else said, one.tools, skipped=skipped, cut=cut and not skipped)


def _digest(rows: Sequence[Dialogue]) -> str:
    """SHA-256 of what is asked and in which order, wherever the files lie."""
    out = hashlib.sha256()
    for row in rows:
        out.update(json.dumps([row.id, row.said, row.tools], sort_keys=True).encode())
    return out.hexdigest()


def _go_on(rows: Sequence[Dialogue], chosen: Engine, journal: Journal) -> None:
    """Take what the journal has, ask what is left or failed, and keep it; the engine is not entered for nothing."""
    by_id = {row.id: row for row in rows}
    for answer in (TurnAnswer(**entry) for entry in journal.entries):
        if answer.failed is None:
            by_id[answer.row].add(answer)
    left = [row for row in rows if not row.done]
    if not left:
        return
    done = sum(not row.skipped for row in rows) - len(left)
    try:
        with chosen as engine, progress("answers", "rows", done + len(left), done) as advance:
            for found in engine.answers(left):
                journal.append({name: value for name, value in found._asdict().items() if value is not None})
                advance(by_id[found.row].done)
    except ValueError as error:
        raise ValueError(f"{error}; {KEPT.format(journal.path)}") from error


def _write(rows: Sequence[Dialogue], out: Path, truncated: str, more: dict[str, Any]) -> dict[str, Any]:
    """Write the data set, in the input's order, and then its record, which is returned.

    Raises:
        ValueError: the disk is full, or a file may not be written.
    """
    asked = [row for row in rows if not row.skipped]
    failed = {row.id: f"{row.place}: {row.failed}" for row in asked if row.failed}
    written = [row for row in asked if not row.failed and (truncated == "keep" or not row.truncated)]
    with staged(out) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for row in written:
            stream.write(json.dumps(row.result(), ensure_ascii=False) + "\n")
    answers = [answer for row in asked for answer in row.answers]
    record = {
        "format": FORMAT,
        "file": out.name,
        "sha256": sha256(out),
        "counts": {
            "rows": len(rows),
            "truncated": sum(row.truncated and not row.failed for row in asked),
            "failed": len(failed),
            "skipped": len(rows) - len(asked),
            "written": len(written),
            "cut_before_a_tool_call": sum(row.cut for row in asked),
            "answers": len(answers),
            "tokens": sum(answer.tokens for answer in answers),
        },
        "failed": failed,
        "skipped": dict(Counter(row.skipped for row in rows if row.skipped)),
        "truncated": truncated,
        **more,
    }
    write_json(out.with_suffix(".json"), record)
    return record
