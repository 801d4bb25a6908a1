"""What a real vLLM proposes: it runs in its own environment, and every pass of its drafter is recorded there."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from specdec.utils.files import scratch_folder
from specdec.utils.vllm import find_vllm

INSIDE = Path(__file__).parent / "inside_vllm"
TAIL = 5  # lines of vLLM's log that a message quotes


class RecordedPass(NamedTuple):
    """One pass of the drafter."""

    place: int  # in the text, of the last token that was known when it began
    last: int  # that token
    drafts: list[int]  # what it proposed, as ids of the target


class RecordedAnswer(NamedTuple):
    """An engine's answer to one prompt, end tokens ignored, and its passes."""

    prompt: list[int]
    ids: list[int]  # generated
    passes: list[RecordedPass]


class EngineRefusedError(ValueError):
    """The engine does not run with these arguments."""


class ProposalEngine:
    """vLLM as a child process, which runs one engine after another.

    Attributes:
        version: vLLM's.
    """

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self.log = log
        self.version = str(self._answer()["version"])

    @classmethod
    @contextlib.contextmanager
    def started(cls, python: str | None = None) -> Iterator[Self]:
        """Start it, and end it with the block.

        Args:
            python: of an environment with vLLM; by default as :func:`specdec.utils.vllm.find_vllm` looks for it.

        Raises:
            ValueError: there is none, or it ends by itself.
        """
        executable = find_vllm(python)[0]
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}
        with scratch_folder() as folder:
            log = folder / "vllm.log"
            with log.open("w") as stderr:
                process = subprocess.Popen(
                    [executable, str(INSIDE / "proposals.py")], text=True, env=environment,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
                )  # fmt: skip
            try:
                yield cls(process, log)
            finally:
                # its workers too, which are of its session
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def ask(
        self, serve: Sequence[str], prompts: Sequence[list[int]], tokens: int
    ) -> list[RecordedAnswer]:
        """Generate so many tokens greedily for every prompt, all asked at once.

        Args:
            serve: the arguments of ``vllm serve``, the target first.

        Raises:
            EngineRefusedError: vLLM refuses the arguments or the model; the message is its own.
            ValueError: vLLM ended by itself, or answered something else.
        """
        assert self.process.stdin is not None
        job = {"serve": list(serve), "prompts": [list(ids) for ids in prompts], "tokens": tokens}
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells why
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        answer = self._answer()
        if "refused" in answer:
            raise EngineRefusedError(f"vLLM {self.version} refuses: {answer['refused']}")
        return [
            RecordedAnswer(
                list(ids),
                generated["ids"],
                [RecordedPass(**record) for record in generated["passes"]],
            )
            for ids, generated in zip(prompts, answer["answers"], strict=True)
        ]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            lines = [
                text for text in self.log.read_text(errors="replace").splitlines() if text.strip()
            ]
            raise ValueError(f"vLLM ended by itself: {' | '.join(lines[-TAIL:])}") from None
        return answer
