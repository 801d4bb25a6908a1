"""What ``specdec regenerate`` is asked, and the target that answers in this process."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from specdec.data.messages import Message
from specdec.data.template import template_of
from specdec.decoding import PlainDecoder, Request, Sampling, check_length
from specdec.engines.dialogue import LENGTH, STOP, Dialogue, TurnAnswer, pack_ids
from specdec.target import Target, TargetSource
from specdec.target.source import AUTO
from specdec.utils.numbers import Count, Seed, Side, Tokens, check_numbers
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

# batches that are sorted by length together: answers come evenly, and few rows wait half done
WINDOW = 16
QUESTION: Message = {"role": "user", "content": "?"}  # where no question matters


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Which conversations are answered, by what and how, and where the answers go.

    Args:
        data: conversations as ChatData reads them
        out: the data set to write, FILE.jsonl; its record is FILE.json
        target: the model that answers in this process
        engine: the target in this process, or what serves it at --url
        limit: use the first rows only
        layout: of all conversations; by default each row's columns decide
        broken: whether a malformed conversation ends the run or is left out
        max_new_tokens: new tokens per answer
        temperature: 0 for greedy decoding
        top_p: 1 for all tokens
        top_k: 0 for all tokens
        seed: with a row's id and the turn it makes the seed of every answer
        thinking: whether the target thinks, by the switch of its chat template; by default the template's own choice
        truncated: whether rows are written whose last answer ran out of tokens
        device: of --engine transformers
        batch_size: prompts at a time, of --engine transformers
        url: an OpenAI-compatible server, as http://127.0.0.1:8000
        model: its name at --url; by default the first served
        concurrency: requests to a server at a time
    """

    data: list[str]
    out: Path
    target: TargetSource = field(default_factory=TargetSource)
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    limit: Count | None = None
    layout: str | None = None
    broken: Literal["refuse", "drop"] = "refuse"
    max_new_tokens: Tokens = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: Seed = 0
    thinking: bool | None = None
    truncated: Literal["drop", "keep"] = "drop"
    device: str = AUTO
    batch_size: Side = 32
    url: str | None = None
    model: str | None = None
    concurrency: Side = 64

    def __post_init__(self) -> None:
        if (self.url is None) != (self.engine == "transformers"):
            raise ValueError(
                "--engine vllm and openai need the --url of a running server; transformers takes none"
            )
        check_numbers(type(self), vars(self))
        self.sampling()

    def sampling(self) -> Sampling:
        """The distribution that tokens are drawn from."""
        return Sampling(self.temperature, self.top_p, self.top_k)

    def seed_of(self, row: str, turn: int) -> int:
        """Return the seed of one answer: 48 bits, which every reader of JSON keeps."""
        return int.from_bytes(
            hashlib.blake2b(f"{self.seed} {turn} {row}".encode(), digest_size=6).digest()
        )


class InProcess:
    """The target in this process.

    Raises:
        ValueError: it has no chat template, or one without a switch for ``--thinking``.
    """

    def __init__(self, target: Target, config: RegenerateConfig) -> None:
        self.target = target
        self.config = config
        self.batch = config.batch_size
        if not target.tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template: give an instruction-tuned target"
            )
        self.template = template_of(target.tokenizer)
        if config.thinking is not None:
            self.template.prompt([QUESTION], thinking=config.thinking)
        self.decoder = PlainDecoder(target, config.sampling(), batch=self.batch)

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
        most = self.config.max_new_tokens
        ends = self.target.eos_token_ids
        requests = [
            Request(ids, most, self.config.seed_of(row.id, len(row.answers)))
            for row, ids in prompts
        ]
        try:
            for number, generation in self.decoder.generate_all(requests, ends):
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
                f"not enough memory for {how_many(self.batch, 'prompt')} at a time: give a smaller --batch_size"
            ) from error

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
        ids = self.template.prompt_ids(row.messages(), row.tools, self.config.thinking)
        check_length(self.target, ids, self.config.max_new_tokens)
        return ids


def is_json(message: Message) -> bool:
    """Whether a message can be written as JSON in UTF-8."""
    try:
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
