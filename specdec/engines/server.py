"""A vLLM server for a target, with a drafter or alone, as a child process that ends with its ``with`` block.

vLLM needs a separate environment where it runs without a GPU, so it is run, never imported.
"""

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec.drafter import DrafterConfig, load_drafter
from specdec.engines.client import Endpoint, RequestError
from specdec.export import FORMATS, export_drafter
from specdec.export.checkpoint import OURS, check_unchanged
from specdec.export.formats import DrafterCheckpoint, vllm_arguments
from specdec.target import TargetSource, load_config
from specdec.utils import supervise
from specdec.utils.numbers import Depth, Port, Positive, check_numbers
from specdec.utils.reading import explained, read_json
from specdec.utils.text import printable

log = logging.getLogger(__name__)

# Flags that are not passed on: vLLM would take the last of two, and others would see keys on the command line.
_SPECDECS = (
    "--speculative-config -sc --spec-method --spec-model --spec-tokens --model --host --port"
)
REFUSED = dict.fromkeys(_SPECDECS.split(), "specdec gives it to vLLM itself") | {
    "--api-key": "set VLLM_API_KEY in the environment",
    "--hf-token": "set HF_TOKEN in the environment",
}
# An engine's processes pass an error on, and the first to do so only hints at the real one.
# llama.cpp's lines say E after the time, or name an assertion; and argparse's say error.
_ERROR = re.compile(
    r"(?:\w+Error|Value error)[:,] (?!.*See root cause above).+|GGML_ASSERT.+|(?<=\d E )(?!.*is normal).+|error: .+"
)

TIMEOUT = 1800.0  # seconds until it is healthy: large weights take long to load
GRACE = 20.0  # seconds to end by itself
# Seconds to end before it is healthy: vLLM does not listen while it loads, and nobody waits for an answer.
HURRY = 2.0
POLL = 0.1
LOG_EVERY = 300  # polls between two lines about a server that starts


@dataclass(frozen=True)
class VllmLaunch:
    """The way that vLLM is started for a target; ValueError for a flag that specdec gives, or a number out of range."""

    vllm: Sequence[str]  # the command, see :func:`find_vllm`
    target: TargetSource
    host: str = "127.0.0.1"
    port: Port = 8000  # 0 for one that is free
    timeout: Positive = TIMEOUT  # seconds until it must be healthy
    draft_tokens: Depth | None = None  # a pass; see DrafterCheckpoint.drafts
    extra: Sequence[str] = ()  # further flags of vllm serve

    format = "vllm"

    def __post_init__(self) -> None:
        check_flags(self.extra)
        check_numbers(VllmLaunch, vars(self))

    def server(
        self, drafter: DrafterCheckpoint | None, log: Path, caching: bool = True
    ) -> "contextlib.AbstractContextManager[Server]":
        """Return the server, to be entered.

        Args:
            caching: whether prefixes are cached, unless a flag of ``extra`` says otherwise.
        """
        drafts = drafter.drafts(self.draft_tokens) if drafter else 0
        port = self.port or free_port(self.host)
        arguments = vllm_arguments(self.target, drafter, drafts)
        arguments += ["--host", self.host, "--port", str(port)]
        if not caching:
            arguments.append("--no-enable-prefix-caching")
        arguments += self.extra  # the last of two flags counts
        return running_server([*self.vllm, *arguments], self.host, port, log, self.timeout)


def check_flags(words: Sequence[str], refused: Mapping[str, str] = REFUSED) -> None:
    """Raise ValueError for a flag of the engine's server that is not passed on; the message says why.

    Args:
        refused: reasons by flag; by default those of ``vllm serve``.
    """
    for flag in map(flag_of, words):
        if flag in refused:
            raise ValueError(f"{flag} after -- is not passed on: {refused[flag]}")


def flag_of(word: str) -> str:
    """Return the flag that a word of a command line gives, however it is written; of another word something else."""
    return re.split("[=.]", word)[0].replace("_", "-")  # --speculative-config.method is one, too


def drafter_checkpoint(
    directory: Path, target: TargetSource, scratch: Path, format: str = "vllm"
) -> DrafterCheckpoint:
    """Return the export in ``directory``, or export the drafter in it to ``scratch``, a new directory.

    Args:
        format: that of :data:`FORMATS` whose engine is to serve it.

    Raises:
        ValueError: there is neither, it is damaged, or the engine cannot serve it with this target.
    """
    if directory.is_file():
        raise ValueError(f"{directory}: a file: give its directory, {directory.parent}")
    if not (directory / OURS).is_file():
        drafter = load_drafter(directory, dtype=None)
        exported = export_drafter(drafter, target.load(), scratch, format, served=target)
        return exported.checkpoint
    check_unchanged(directory)  # before anything in it is believed
    record = read_json(directory / OURS)
    chosen = FORMATS.get(str(record.get("exported_as")))
    if chosen is None or chosen.engine != FORMATS[format].engine:
        raise ValueError(
            f"{directory}: exported for {record.get('engine')}: export it again with --format {format}"
        )
    # With a target of another shape, an engine may load it and draft nonsense.
    config = load_config(target.directory(), target.revision, target.trust_remote_code)
    shape = {
        "target_hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "num_target_layers": "num_hidden_layers",
    }
    for field, key in shape.items():
        size = record["drafter"].get(field)
        target_size = getattr(config, key)
        if size != target_size:
            raise ValueError(
                f"the export is for a target of {key} {size}, {target.source} has {target_size}"
            )
    method = str(record["method"])
    architecture = str(record["target"].get("architecture"))
    config = DrafterConfig.from_json(record["drafter"], str(directory))
    parallel = bool(record.get("parallel"))
    drafts = config.drafting.fixed_drafts
    return DrafterCheckpoint(directory, method, architecture, parallel, drafts)


class ServerError(ValueError):
    """The server did not come up, or ended by itself; the end of its log goes to standard error."""


class Server(NamedTuple):
    """A server that answers ``GET /health``."""

    url: str
    log: Path
    process: "subprocess.Popen[bytes]"
    engine: str = "vLLM"

    def wait(self) -> None:
        """Wait for as long as it serves; raise ServerError once it has ended by itself."""
        self.process.wait()
        self.check()

    def check(self) -> None:
        """Raise ServerError if it has ended by itself."""
        status = self.process.poll()
        if status is not None:
            raise ServerError(
                f"{self.engine} ended by itself with status {status}: {failure_reason(self.log)}"
            )


@contextlib.contextmanager
def running_server(
    command: Sequence[str], host: str, port: int, log_file: Path, timeout: float = TIMEOUT, engine: str = "vLLM"
) -> Iterator[Server]:  # fmt: skip
    """Run a server for the length of a block.

    It and all processes that it started end with this process, however that ends.

    Raises:
        ServerError: it ends, or does not answer at ``host`` and ``port`` after ``timeout`` seconds; nothing of it is
            left then.
        ValueError: the port is taken, or the log exists or cannot be written.
    """
    try:  # another server at a taken port would pass for ours
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
    address = "127.0.0.1" if host == "0.0.0.0" else host
    server = Server(f"http://{address}:{port}", log_file, process, engine)
    grace = HURRY
    try:
        _wait_until_healthy(server, timeout)
        grace = GRACE
        yield server
    except ServerError:
        for line in _lines(log_file)[-40:]:
            sys.stderr.write(f"  {printable(line)}\n")
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
        polls += 1
        if seconds > timeout:
            raise ServerError(
                f"{server.engine} was not healthy after {timeout:g} s: {failure_reason(server.log)}"
            )
        if polls % LOG_EVERY == 0:
            line = "".join(_lines(server.log)[-1:])[:100]
            log.info("starting %s, %.0f s: %s", server.engine, seconds, line)
        time.sleep(POLL)


def healthy(url: str) -> bool:
    """Return whether ``GET /health`` is answered with 200."""
    with contextlib.suppress(RequestError):
        Endpoint(url, timeout=2.0).text("/health")
        return True
    return False


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def failure_reason(path: Path) -> str:
    """Return the last error in a log, else its last line."""
    lines = _lines(path) or ["it said nothing"]
    matches = [_ERROR.search(line) for line in lines if " WARNING " not in line]
    errors = [match[0] for match in matches if match]
    return (errors or lines)[-1].strip()[:400]


def _lines(path: Path) -> list[str]:
    """Return the lines of a log that are not empty."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]
