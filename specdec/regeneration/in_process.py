"""The target in this process, asked in batches of prompts of alike lengths."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from specdec.decoding import check_length
from specdec.regeneration.asking import Asking
from specdec.regeneration.generating import Generator
from specdec.regeneration.rendering import Rendering
from specdec.regeneration.talk import LENGTH, STOP, Answer, Ask, Failed, Found, Talk
from specdec.target import Target

WINDOW = 16  # batches that are sorted by length together: answers come evenly, and few rows wait half done


class _Prompt(NamedTuple):
    talk: Talk
    ask: Ask
    ids: list[int]


class InProcess:
    """The engine.

    Args:
        batch: prompts at a time.

    Raises:
        ValueError: the target has no tokenizer, or the batch is smaller than one.
    """

    def __init__(self, target: Target, asking: Asking, batch: int) -> None:
        if batch < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch}")
        self.target, self.asking, self.batch = target, asking, batch
        self.rendering = Rendering(target.tokenizer, asking)
        self.generator = Generator(target, asking.sampling(), asking.max_new_tokens)

    def answers(self, talks: Sequence[Talk]) -> Iterator[Found]:
        """Ask everything that is left to ask; every answer has been given to its talk.

        Raises:
            ValueError: there is not enough memory for a batch, or no chat template for a conversation.
        """
        if any(talk.row.text is None for talk in talks):
            self.rendering.check()
        size = WINDOW * self.batch
        for first in range(0, len(talks), size):
            window = talks[first : first + size]
            while waiting := [talk for talk in window if not talk.done]:
                prompts: list[_Prompt] = []
                for talk in waiting:
                    found = self._prompt(talk)
                    if isinstance(found, Failed):
                        talk.add(found)
                        yield found
                    else:
                        prompts.append(found)
                prompts.sort(key=lambda prompt: len(prompt.ids), reverse=True)  # what does not fit shows at once
                for start in range(0, len(prompts), self.batch):
                    yield from self._answer(prompts[start : start + self.batch])

    def _prompt(self, talk: Talk) -> _Prompt | Failed:
        ask = talk.next()
        try:
            ids = self.rendering.prompt(ask)
            check_length(self.target, ids, self.asking.max_new_tokens)
        except ValueError as error:
            return Failed(ask.row, ask.turn, str(error))
        return _Prompt(talk, ask, ids)

    def _answer(self, prompts: Sequence[_Prompt]) -> Iterator[Found]:
        seeds = [self.asking.seed_of(prompt.ask.row, prompt.ask.turn) for prompt in prompts]
        for prompt, ids in zip(prompts, self.generator.generate([one.ids for one in prompts], seeds), strict=True):
            found = self._found(prompt, ids)
            prompt.talk.add(found)
            yield found

    def _found(self, prompt: _Prompt, ids: list[int]) -> Found:
        ask = prompt.ask
        ended = ids[-1] in self.generator.ends
        text = self.rendering.text(prompt.ids, ids[:-1] if ended else ids)
        answer = Answer(ask.row, ask.turn, text, STOP if ended else LENGTH, len(ids), len(prompt.ids))
        return self.rendering.judge(ask, answer, prompt.ids, ids)
