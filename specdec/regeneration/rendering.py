"""Questions as token ids, and generated ids as text, by the target's own tokenizer and template."""

from typing import Any

from jinja2 import TemplateError

from specdec.regeneration.asking import Asking
from specdec.regeneration.rows import Message
from specdec.regeneration.talk import STOP, Answer, Ask, Failed, Found, spoken


class Rendering:
    """What stands between questions and tokens."""

    def __init__(self, tokenizer: Any, asking: Asking) -> None:
        self.tokenizer, self.asking = tokenizer, asking
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = added | set(tokenizer.all_special_ids)

    def check(self) -> None:
        """Raise ValueError if it cannot render conversations."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template: give an instruction-tuned target, or plain text and "
                "--prompt_tokens"
            )

    def prompt(self, ask: Ask) -> list[int]:
        """What the target goes on from.

        Raises:
            ValueError: the chat template refuses the conversation.
        """
        if ask.text is not None:
            return list(self.tokenizer.encode(ask.text, add_special_tokens=True, verbose=False))
        return self._ids(self._render(ask.messages, ask.tools, prompt=True))

    def text(self, prompt: list[int], ids: list[int]) -> str:
        """Of what was generated behind a prompt: some tokenizers write the first token of a text without its space."""
        before, whole = self._decode(prompt), self._decode([*prompt, *ids])
        return whole[len(before) :] if whole.startswith(before) else self._decode(ids)

    def judge(self, ask: Ask, answer: Answer, prompt: list[int], ids: list[int]) -> Found:
        """An answer beside the tokens that it is made of, an end token included: whether it can stand as text.

        It cannot with a special token in it, unless a server has taken the text apart: it would be lost, or read as a
        user's who writes it.
        """
        said = ids[:-1] if answer.finish == STOP else ids
        special = next((token for token in said if token in self.special), None)
        if special is not None and answer.reasoning is None:
            name = self.tokenizer.convert_ids_to_tokens(special)
            return Failed(ask.row, ask.turn, f"the answer holds {name}, which the text of a message cannot")
        whole = [*prompt, *(ids if ask.text is None else said)]
        return answer._replace(read_back=self._reads_back(ask, answer, whole))

    def _reads_back(self, ask: Ask, answer: Answer, ids: list[int]) -> bool:
        """Whether training will see these tokens, prompt and answer, where it meets the answer as text."""
        if ask.text is not None:
            again = self.tokenizer.encode(ask.text + answer.text, add_special_tokens=True, verbose=False)
        else:
            try:
                again = self._ids(self._render([*ask.messages, spoken(answer)], ask.tools, prompt=False))
            except ValueError:
                return False
        return again[: len(ids)] == ids

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **self.asking.template_words()
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
