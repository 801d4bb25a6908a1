"""By another model's chat template."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition, untemplated
from specdec.robustness.setting import Setting
from specdec.robustness.templates import FAMILIES
from specdec.robustness.tokenizers import Templated


@dataclass(frozen=True)
class OtherTemplate(Condition):
    """Conversations are written by a template in the manner of another family.

    The start token stays where the target's own template writes one.
    """

    kind: ClassVar[str] = "template"
    group: ClassVar[str] = "template"

    family: Literal["chatml", "llama3", "gemma", "alpaca"]

    @classmethod
    def usual(cls) -> tuple["OtherTemplate", ...]:
        return tuple(cls(family) for family in ("chatml", "llama3", "gemma", "alpaca"))

    @property
    def title(self) -> str:
        return f"template of {self.family}"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        if prompt.text is not None:
            return setting.clean(prompt)
        tokenizer = Templated(setting.tokenizer, FAMILIES[self.family])
        return setting.clean(prompt, tokenizer=tokenizer, thinking=None)

    def unchanged(self, setting: Setting) -> str:
        if untemplated(setting):
            return "no prompt is written by a chat template"
        return "the target's own template writes every prompt so"
