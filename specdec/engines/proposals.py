"""What a real vLLM proposes: it runs in its own environment, and every pass of its drafter is recorded there."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from specdec.utils.vllm import VllmChild

INSIDE = Path(__file__).parent / "inside_vllm"


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


class ProposalEngine:
    """vLLM as a child process, which runs one engine after another.

    Attributes:
        version: vLLM's.
    """

    def __init__(self, child: VllmChild) -> None:
        self.child = child
        self.version = child.version

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[Self]:
        """Start it, and end it with the block; ValueError if there is no vLLM, or it ends by itself."""
        with VllmChild.started(INSIDE / "proposals.py") as child:
            yield cls(child)

    def ask(
        self, serve: Sequence[str], prompts: Sequence[list[int]], tokens: int
    ) -> list[RecordedAnswer]:
        """Generate this many tokens greedily for every prompt, all asked at once.

        Args:
            serve: the arguments of ``vllm serve``, the target first.

        Raises:
            ValueError: vLLM refuses the arguments or the model, or ended by itself.
        """
        job = {"serve": list(serve), "prompts": [list(ids) for ids in prompts], "tokens": tokens}
        return [
            RecordedAnswer(
                list(ids),
                generated["ids"],
                [RecordedPass(**record) for record in generated["passes"]],
            )
            for ids, generated in zip(prompts, self.child.ask(job)["answers"], strict=True)
        ]

    def int8_error(self) -> float | None:
        """Return the largest error of this vLLM's products of 8-bit integers, as a share of the largest; None on a GPU.

        On x86 processors without VNNI, oneDNN adds two products in 16 bits, which overflows.

        Raises:
            ValueError: vLLM ended by itself.
        """
        error: float | None = self.child.ask({"measure": "int8"})["int8_error"]
        return error
