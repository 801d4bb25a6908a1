"""Under somebody else's system prompt."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition
from specdec.robustness.conditions.no_system import without_system
from specdec.robustness.setting import Setting
from specdec.robustness.texts import SYSTEM_PROMPTS


@dataclass(frozen=True)
class SystemPrompt(Condition):
    """A system prompt of :data:`specdec.robustness.texts.SYSTEM_PROMPTS`, instead of any other.

    Raw text, which has no place for one, begins with it and a blank line.
    """

    kind: ClassVar[str] = "system"
    group: ClassVar[str] = "system prompt"

    text: Literal["short", "stranger", "long", "german", "chinese"]

    @classmethod
    def usual(cls) -> tuple["SystemPrompt", ...]:
        return tuple(cls(text) for text in ("short", "stranger", "long", "german", "chinese"))

    @property
    def title(self) -> str:
        return f"system prompt: {self.text}"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        text = SYSTEM_PROMPTS[self.text]
        if prompt.text is not None:
            return setting.clean(prompt._replace(text=f"{text}\n\n{prompt.text}"))
        return setting.clean(without_system(prompt), system=text)

    def note(self, setting: Setting) -> str:
        return "raw text: put in front" if any(prompt.text for prompt in setting.prompts) else ""
