"""What a real llama.cpp proposes: its server's log names the candidates of every draft.

Legend: K drafts a pass.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from specdec.engines.client import Endpoint
from specdec.engines.llama import CACHES, KEY, LlamaLaunch, complete
from specdec.engines.proposals import RecordedAnswer, RecordedPass
from specdec.export.formats import DrafterCheckpoint
from specdec.utils.files import scratch_folder

# "draft candidate   0, pos   2:    209 (   0.660) '<piece>'": the likeliest token of draft 2 of a pass
CANDIDATE = re.compile(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+)")
DEBUG = 5  # llama.cpp's level of logging at which it names them
WAIT = 10.0  # seconds for the log's last lines, which another thread writes
ROOM = 16  # tokens of context beyond a text and its drafts


class CountedPass(NamedTuple):
    """One pass, and what llama.cpp's counters make of it."""

    recorded: RecordedPass
    counted: int  # drafts that were verified: fewer than proposed at the end of an answer
    accepted: int


def ask_llama_cpp(
    launch: LlamaLaunch, drafter: DrafterCheckpoint, prompts: Sequence[list[int]], tokens: int, exact: bool
) -> tuple[str, list[RecordedAnswer]]:  # fmt: skip
    """Generate greedily for every prompt, one after another, up to this many tokens or the end of the text.

    Args:
        exact: keep keys and values in float32 and leave out the fused attention, which rounds to 16 bits.

    Returns:
        The engine's name and build, and the answers with every pass of the drafter.

    Raises:
        ValueError: it does not run, or its log and its counters disagree.
    """
    drafts = drafter.drafts(launch.draft_tokens)
    longest = max(map(len, prompts)) + tokens + drafts + ROOM
    flags = ["--verbosity", str(DEBUG)]
    if exact:
        flags += ["--flash-attn", "off", *(word for option in CACHES for word in (option, "f32"))]
    launch = replace(launch, port=0, slots=1, context=longest, extra=[*flags, *launch.extra])
    with scratch_folder() as scratch:
        log = scratch / "server.log"
        with launch.server(drafter, log) as server:
            endpoint = Endpoint(server.url, key=KEY)
            name = launch.engine_name(endpoint)
            answers = [answer_to(endpoint, log, prompt, tokens, drafts) for prompt in prompts]
            server.check()
    return name, answers


def answer_to(
    endpoint: Endpoint, log: Path, prompt: list[int], tokens: int, drafts: int
) -> RecordedAnswer:
    """Return the answer to one prompt with its passes."""
    begin = log.stat().st_size
    answer = complete(endpoint, prompt, tokens)
    ids = answer["tokens"]
    timings = answer["timings"]
    end = time.monotonic() + WAIT
    while True:
        passes = recorded_passes(logged_chains(log, begin), prompt, ids, tokens)
        counted = [passed.counted for passed in passes]
        accepted = [passed.accepted for passed in passes]
        if sum(counted) == timings.get("draft_n", 0):
            break
        if time.monotonic() > end:
            raise ValueError(
                f"llama.cpp counts {timings.get('draft_n', 0)} drafts and its log names {sum(counted)}: this build "
                "logs otherwise than those that are known (b11549)"
            )
        time.sleep(0.05)
    if sum(accepted) != timings.get("draft_n_accepted", 0):
        raise ValueError(
            f"llama.cpp counts {timings['draft_n_accepted']} accepted drafts, and of those in its log {sum(accepted)} "
            "are the text's tokens"
        )
    whole = [passed.recorded for passed in passes if len(passed.recorded.drafts) == drafts]
    return RecordedAnswer(list(prompt), ids, whole)


def logged_chains(log: Path, begin: int) -> list[list[int]]:
    """Return the drafts of each pass that a log names behind a place in it, counted in bytes."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode("utf-8", errors="replace")
    chains: list[list[int]] = []
    for position, token in CANDIDATE.findall(text):
        if position == "0":
            chains.append([])
        if chains:
            chains[-1].append(int(token))
    return chains


def recorded_passes(
    chains: Sequence[list[int]], prompt: list[int], ids: list[int], tokens: int
) -> list[CountedPass]:
    """Return the passes of one answer.

    Verification keeps the leading drafts that are the text's tokens and adds one of the target's own, so that the
    passes follow from the text. The last token of an answer is always the target's.

    Args:
        chains: drafts of every pass, in order.
        ids: the answer.
        tokens: new tokens that were asked for.
    """
    passes = []
    known = 1  # tokens of the answer: the prompt's pass has made the first
    for chain in chains:
        counted = min(len(chain), tokens - known - 1)
        rest = ids[known:-1]
        accepted = 0
        while accepted < min(counted, len(rest)) and chain[accepted] == rest[accepted]:
            accepted += 1
        place = len(prompt) + known - 1
        last = ids[known - 1] if known <= len(ids) else -1
        passes.append(CountedPass(RecordedPass(place, last, chain), counted, accepted))
        known += accepted + 1
    return passes
