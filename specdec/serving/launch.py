"""How vLLM is started for a target, with a drafter or alone."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.embedded.source import TargetSource
from specdec.export.arguments import found_at
from specdec.export.format import target_words, vllm_words
from specdec.export.write import DRAFT_TOKENS
from specdec.serving.drafted import Drafted
from specdec.serving.server import GRACE, TIMEOUT, Server, free_port

# what specdec itself says; vLLM would take the last of two
OURS = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens", "--model", "--host", "--port")
# what would stand in the list of processes, and in records of the command
SECRET = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
QUIET = {"VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Launch:
    """A target in vLLM.

    Args:
        vllm: the words that start it, see :func:`specdec.serving.engine.find_vllm`.
        port: 0 for one that is free.
        timeout: seconds until it must be healthy.
        grace: seconds to end by itself.
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
    grace: float = GRACE
    draft_tokens: int = DRAFT_TOKENS
    extra: Sequence[str] = ()

    def __post_init__(self) -> None:
        for word in self.extra:
            if flag_of(word) in OURS:
                raise ValueError(f"{word} after -- is not passed on: specdec gives it to vLLM itself")
            if flag_of(word) in SECRET:
                raise ValueError(
                    f"{flag_of(word)} after -- is not passed on, since others would see it: set "
                    f"{SECRET[flag_of(word)]} in the environment"
                )
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens must be at least 1, not {self.draft_tokens}")
        if self.timeout <= 0 or self.grace < 0:
            raise ValueError(f"timeout must be above 0 and grace at least 0, not {self.timeout:g} and {self.grace:g}")

    def server(
        self, drafter: Drafted | None, log: Path, on_wait: Callable[[float, str], None] = lambda seconds, line: None
    ) -> Server:
        """The server, to be entered; without a drafter the target serves alone."""
        port = self.port or free_port(self.host)
        return Server(
            self.words(drafter, port),
            host=self.host,
            port=port,
            log=log,
            name="vLLM",
            timeout=self.timeout,
            grace=self.grace,
            environment=QUIET,
            on_wait=on_wait,
        )

    def words(self, drafter: Drafted | None, port: int) -> list[str]:
        """The command line."""
        target = found_at(self.target)
        words = ["serve", target]
        if drafter is not None:
            words = vllm_words(target, drafter.method, str(drafter.directory), self.draft_tokens)
        words += target_words(self.target.revision, self.target.trust_remote_code)
        return [*self.vllm, *words, "--host", self.host, "--port", str(port), *self.extra]


def flag_of(word: str) -> str:
    """The flag that a word of a command line gives, however vLLM lets it be written; else some other word."""
    return re.split("[=.]", word)[0].replace("_", "-")  # --speculative-config.method is one, too
