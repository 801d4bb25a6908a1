"""The target answers conversations in this process, many at a time."""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specdec.answering.dialogue import LENGTH, STOP, Dialogue, TurnAnswer, pack_ids
from specdec.answering.settings import AnswerSettings
from specdec.data.messages import Message
from specdec.data.template import template_of
from specdec.decoding import Generation, PlainDecoder, Request, check_length
from specdec.target import Target
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

# batches that are sorted by length together: answers come evenly, and few rows wait half done
WINDOW = 16
QUESTION: Message = {"role": "user", "content": "?"}  # where no question matters


class InProcess:
    """The target in this process.

    Raises:
        ValueError: it has no chat template, or one without a switch for ``--thinking``.
    """

    def __init__(self, target: Target, settings: AnswerSettings, batch: int) -> None:
        self.target = target
        self.settings = settings
        self.batch = batch
        if not target.tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template: give an instruction-tuned target"
            )
        self.template = template_of(target.tokenizer)
        if settings.thinking is not None:
            self.template.prompt([QUESTION], thinking=settings.thinking)
        self.decoder = self.make_decoder()

    def make_decoder(self) -> PlainDecoder:
        """Return what answers."""
        return PlainDecoder(self.target, self.settings.sampling(), batch=self.batch)

    def answers(self, dialogues: Sequence[Dialogue]) -> Iterator[TurnAnswer]:
        """Ask all that is left to ask; each dialogue has its answer. ValueError if a batch does not fit in memory."""
        blind = sum(bool(row.tools) for row in dialogues) if not self.template.form.tools else 0
        if blind:
            rows = how_many(blind, "row")
            log.warning(
                "the chat template does not write the tools of %s: the target does not see them",
                rows,
            )
        size = WINDOW * self.batch
        for first in range(0, len(dialogues), size):
            while waiting := [row for row in dialogues[first : first + size] if not row.done]:
                yield from self._next_answers(waiting)

    def _next_answers(self, waiting: Sequence[Dialogue]) -> Iterator[TurnAnswer]:
        """The next of every dialogue."""
        prompts: list[tuple[Dialogue, list[int]]] = []
        for row in waiting:
            try:
                prompts.append((row, self._prompt(row)))
            except ValueError as error:
                yield row.add(failed=str(error))
        # what does not fit shows at once
        prompts.sort(key=lambda prompt: len(prompt[1]), reverse=True)
        most = self.settings.max_new_tokens
        ends = self.target.eos_token_ids
        requests = [
            Request(ids, most, self.settings.seed_of(row.id, len(row.answers)))
            for row, ids in prompts
        ]
        try:
            for number, generation in self.generations([row for row, _ in prompts], requests):
                row, prompt = prompts[number]
                yield row.add(
                    message=self.message(generation.ids, row.tools),
                    finish=STOP if generation.ids[-1] in ends else LENGTH,
                    tokens=len(generation.ids),
                    prompt_token_ids=pack_ids(prompt),
                    token_ids=pack_ids(generation.ids),
                )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"not enough memory for {how_many(self.batch, 'prompt')} at a time: give a smaller batch_size"
            ) from error

    def generations(
        self, rows: Sequence[Dialogue], requests: Sequence[Request]
    ) -> Iterator[tuple[int, Generation]]:
        """Generate after the prompts of rows; yields numbers of requests and what was made of them."""
        return self.decoder.generate_all(requests, self.target.eos_token_ids)

    def message(self, ids: list[int], tools: list[dict[str, Any]] | None = None) -> Message:
        """What the tokens say; all as text where a call holds what no file can (NaN, half a character)."""
        message = self.template.answer(ids, tools)
        if is_json(message):
            return message
        return {
            "role": "assistant",
            "content": self.target.tokenizer.decode(ids, skip_special_tokens=False),
        }

    def _prompt(self, row: Dialogue) -> list[int]:
        ids = self.template.prompt_ids(row.messages(), row.tools, self.settings.thinking)
        check_length(self.target, ids, self.settings.max_new_tokens)
        return ids


def is_json(message: Message) -> bool:
    """Whether a message can be written as JSON in UTF-8."""
    try:
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
