"""What ``serve`` and ``bench`` share: their arguments about vLLM, and how they wait for it."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from specdec.serving.drafted import Drafted
from specdec.serving.engine import VARIABLE, find_vllm
from specdec.serving.launch import Launch
from specdec.serving.server import Server, ServerError

log = logging.getLogger(__name__)

TOLD_EVERY = 30.0  # seconds, where nobody watches a terminal
WIDTH = 100  # letters of a log's line


def add_launched(parser: ArgumentParser, port: int = Launch.port) -> None:
    """How vLLM is run with a drafter."""
    parser.add_argument("--draft_tokens", type=int, default=Launch.draft_tokens, help="drafts a pass")
    add_server(parser, port)


def add_server(parser: ArgumentParser, port: int = Launch.port) -> None:
    """How vLLM is run."""
    parser.add_argument("--host", type=str, default=Launch.host, help="address to listen on")
    parser.add_argument("--port", type=int, default=port, help="port to listen on; 0 takes a free one")
    parser.add_argument("--vllm", type=str | None, default=None, help=f"a Python that has vLLM, or its executable; by default ${VARIABLE}, else this environment")  # fmt: skip # noqa: E501
    parser.add_argument("--timeout", type=float, default=Launch.timeout, help="seconds until vLLM must be healthy")
    parser.add_argument("--grace", type=float, default=Launch.grace, help="seconds that vLLM has to end by itself")


def launch_of(args: Namespace, extra: list[str]) -> Launch:
    """What :func:`add_launched` and ``--target`` stand for.

    Raises:
        ValueError: there is no vLLM, or ``extra`` holds what it must not.
    """
    return Launch(
        find_vllm(args.vllm),
        args.target,
        args.host,
        args.port,
        args.timeout,
        args.grace,
        args.draft_tokens,
        tuple(extra),
    )


def launched_given(parser: ArgumentParser, args: Namespace) -> list[str]:
    """What was given of :func:`add_launched`, or :func:`add_server`, which is heard only where vLLM is started."""
    names = ("draft_tokens", "host", "port", "vllm", "timeout", "grace")
    return [f"--{name}" for name in names if name in args and args[name] != parser.get_default(name)]


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and vLLM's after ``--``."""
    where = argv.index("--") if "--" in argv else len(argv)
    return argv[:where], argv[where + 1 :]


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[Callable[[float, str], None]]:
    """Tell how long it takes, and what the log says; what is yielded goes to the server as ``on_wait``."""
    console, told = Console(stderr=True), 0.0
    with console.status(f"starting {what}") as status:

        def on_wait(seconds: float, line: str) -> None:
            nonlocal told
            if console.is_terminal:
                status.update(f"starting {what}, {seconds:.0f} s  [dim]{line[:WIDTH].replace('[', '(')}[/]")
            elif seconds - told >= TOLD_EVERY:
                told = seconds
                log.info("starting %s, %.0f s: %s", what, seconds, line[:WIDTH])

        yield on_wait


@contextlib.contextmanager
def running(launch: Launch, drafter: Drafted | None, said: Path) -> Iterator[Server]:
    """vLLM, healthy; until then it is told how long that takes.

    Args:
        drafter: without one the target serves alone.
        said: a new file for what the server says.
    """
    with contextlib.ExitStack() as stack:
        with _waiting("vLLM" if drafter else "vLLM without the drafter") as on_wait:
            server = stack.enter_context(launch.server(drafter, said, on_wait))
        yield server


@contextlib.contextmanager
def log_told() -> Iterator[None]:
    """Let the end of a fallen server's log be seen: its one line seldom says why."""
    try:
        yield
    except ServerError as error:
        sys.stderr.write("".join(f"  {line}\n" for line in error.tail))
        raise
