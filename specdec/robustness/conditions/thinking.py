"""With the other thinking flag."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition, untemplated
from specdec.robustness.setting import Setting


@dataclass(frozen=True)
class Thinking(Condition):
    """The chat template's ``enable_thinking`` is set."""

    kind: ClassVar[str] = "thinking"
    group: ClassVar[str] = "thinking"

    on: bool

    @classmethod
    def usual(cls) -> tuple["Thinking", ...]:
        return (cls(True), cls(False))

    @property
    def title(self) -> str:
        return f"thinking {'on' if self.on else 'off'}"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        return setting.clean(prompt, thinking=None if prompt.text is not None else self.on)

    def unchanged(self, setting: Setting) -> str:
        if untemplated(setting):
            return "no prompt is written by a chat template"
        return "the template does not read the flag, or this is what it does without it"
