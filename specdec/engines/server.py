"""A vLLM server for a target, with a drafter or alone, as a child process that ends with its ``with`` block.

vLLM wants an environment of its own where it runs without a GPU, so it is run, never imported.
"""

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec.drafter import DrafterConfig, load_drafter
from specdec.engines.client import Endpoint, RequestError
from specdec.export import FORMATS, export_drafter
from specdec.export.checkpoint import OURS, check_unchanged
from specdec.export.formats import DrafterCheckpoint, vllm_arguments
from specdec.export.switches import VLLM
from specdec.target import TargetSource, load_config
from specdec.utils import supervise
from specdec.utils.numbers import Depth, Port, Positive, check_numbers
from specdec.utils.reading import explained, read_json
from specdec.utils.text import printable

log = logging.getLogger(__name__)

# flags that are not passed on: what specdec says itself, of which vLLM would take the last; what others would see
REFUSED = dict.fromkeys(
    (
        "--speculative-config",
        "-sc",
        "--spec-method",
        "--spec-model",
        "--spec-tokens",
        "--model",
        "--host",
        "--port",
    ),
    "specdec gives it to vLLM itself",
) | {
    "--api-key": "set VLLM_API_KEY in the environment",
    "--hf-token": "set HF_TOKEN in the environment",
}
# the last of them: an engine's processes pass an error on, the first of them with a hint at the real one
_ERROR = re.compile(r"(?:\w+Error|Value error)[:,] (?!.*See root cause above).+")

TIMEOUT = 1800.0  # seconds until it is healthy: large weights take long to load
GRACE = 20.0  # seconds to end by itself
# the same before it is healthy: vLLM does not listen while it loads, and nobody waits for an answer
HURRY = 2.0
POLL = 0.1
LOG_EVERY = 300  # polls between two lines about a server that starts


@dataclass(frozen=True)
class VllmLaunch:
    """How vLLM is started for a target; ValueError if a flag in ``extra`` is specdec's, or a number out of range."""

    vllm: Sequence[str]  # the command, see :func:`find_vllm`
    target: TargetSource
    host: str = "127.0.0.1"
    port: Port = 8000  # 0 for one that is free
    timeout: Positive = TIMEOUT  # seconds until it must be healthy
    draft_tokens: Depth | None = None  # a pass; see DrafterCheckpoint.drafts
    extra: Sequence[str] = ()  # further flags of vllm serve

    def __post_init__(self) -> None:
        check_flags(self.extra)
        check_numbers(VllmLaunch, vars(self))

    def server(
        self, drafter: DrafterCheckpoint | None, log: Path, caching: bool = True
    ) -> "contextlib.AbstractContextManager[Server]":
        """The server, to be entered; without ``caching``, prefixes are cached only if a flag of ``extra`` says so."""
        drafts = drafter.drafts(self.draft_tokens) if drafter else 0
        port = self.port or free_port(self.host)
        arguments = vllm_arguments(self.target, drafter, drafts, self.vllm[0])
        arguments += ["--host", self.host, "--port", str(port)]
        # the last of two flags counts
        arguments += [*([] if caching else ["--no-enable-prefix-caching"]), *self.extra]
        return running([*self.vllm, *arguments], self.host, port, log, self.timeout)


def check_flags(words: Sequence[str]) -> None:
    """ValueError for a flag of ``vllm serve`` that is not passed on, and why."""
    for flag in map(flag_of, words):
        if flag in REFUSED:
            raise ValueError(f"{flag} after -- is not passed on: {REFUSED[flag]}")


def flag_of(word: str) -> str:
    """The flag that a word of a command line gives, however vLLM lets it be written; else some other word."""
    return re.split("[=.]", word)[0].replace("_", "-")  # --speculative-config.method is one, too


def drafter_checkpoint(directory: Path, target: TargetSource, scratch: Path) -> DrafterCheckpoint:
    """The export that ``directory`` is, or that is made of the drafter in it at ``scratch``, a new directory.

    ValueError if there is neither, it is damaged, or vLLM cannot serve it with this target.
    """
    if not (directory / OURS).is_file():
        made = export_drafter(
            load_drafter(directory, dtype=None), target.load(), scratch, served=target
        )
        return made.checkpoint
    check_unchanged(directory)  # before anything in it is believed
    record = read_json(directory / OURS)
    chosen = FORMATS.get(str(record.get("exported_as")))
    if chosen is None or chosen.engine != VLLM:
        raise ValueError(
            f"{directory}: exported for {record.get('engine')}: export it again with --format vllm"
        )
    # of a target of another shape, vLLM may load it and draft nonsense
    config = load_config(target.directory(), target.revision, target.trust_remote_code)
    shape = {
        "target_hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "num_target_layers": "num_hidden_layers",
    }
    for ours, theirs in shape.items():
        here = record["drafter"].get(ours)
        there = getattr(config, theirs)
        if here != there:
            raise ValueError(
                f"the export is for a target of {theirs} {here}, {target.source} has {there}"
            )
    named = str(record["method"]), str(record["target"].get("architecture"))
    masks = DrafterConfig.from_json(record["drafter"], str(directory)).recurrence.masks
    return DrafterCheckpoint(directory, *named, bool(record.get("parallel")), masks)


class ServerError(ValueError):
    """The server did not come up, or ended by itself; the end of its log goes to standard error."""


class Server(NamedTuple):
    """A server that answers ``GET /health``."""

    url: str
    log: Path
    process: "subprocess.Popen[bytes]"

    def wait(self) -> None:
        """Wait for as long as it serves; raise ServerError once it has ended by itself."""
        self.process.wait()
        self.check()

    def check(self) -> None:
        """Raise ServerError if it has ended by itself."""
        if (status := self.process.poll()) is not None:
            raise ServerError(
                f"vLLM ended by itself with status {status}: {failure_reason(self.log)}"
            )


@contextlib.contextmanager
def running(
    command: Sequence[str], host: str, port: int, log_file: Path, timeout: float = TIMEOUT
) -> Iterator[Server]:
    """A server for the length of a block; it and all processes that it started end with this one, however that ends.

    ServerError if it ends, or does not answer at ``host`` and ``port`` after ``timeout`` seconds; nothing of it is left
    then. ValueError if the port is taken, or the log exists or cannot be written.
    """
    try:  # whoever answers at a taken port would pass for our server
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"port {port} of {host} cannot be had ({error}): choose another --port"
        ) from error
    if log_file.exists():
        raise ValueError(f"{log_file} exists already and is never overwritten: choose another log")
    with explained(log_file), log_file.open("xb") as out:
        process = subprocess.Popen(
            [sys.executable, "-I", supervise.__file__, str(GRACE), *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C goes to us alone
            env=os.environ | {"VLLM_NO_USAGE_STATS": "1"},
        )
    server = Server(
        f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}", log_file, process
    )
    grace = HURRY
    try:
        _wait_until_healthy(server, timeout)
        grace = GRACE
        yield server
    except ServerError:
        sys.stderr.write("".join(f"  {printable(line)}\n" for line in _lines(log_file)[-40:]))
        raise
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            process.stdin.write(str(grace).encode())
            process.stdin.close()
        process.wait()


def _wait_until_healthy(server: Server, timeout: float) -> None:
    begin = time.monotonic()
    polls = 0
    while not healthy(server.url):
        server.check()
        seconds = time.monotonic() - begin
        polls = polls + 1
        if seconds > timeout:
            raise ServerError(
                f"vLLM was not healthy after {timeout:g} s: {failure_reason(server.log)}"
            )
        if polls % LOG_EVERY == 0:
            log.info("starting vLLM, %.0f s: %s", seconds, "".join(_lines(server.log)[-1:])[:100])
        time.sleep(POLL)


def healthy(url: str) -> bool:
    """Whether ``GET /health`` is answered with 200."""
    with contextlib.suppress(RequestError):
        Endpoint(url, patience=2.0).text("/health")
        return True
    return False


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])


def failure_reason(path: Path) -> str:
    """The last error that a log tells of, else its last line."""
    lines = _lines(path) or ["it said nothing"]
    errors = [
        found[0] for line in lines if " WARNING " not in line and (found := _ERROR.search(line))
    ]
    return (errors or lines)[-1].strip()[:400]


def _lines(path: Path) -> list[str]:
    """Of a log, those that are not empty."""
    with contextlib.suppress(OSError):
        return [
            line
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
    return []
