"""Without the chat template."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition
from specdec.robustness.setting import Setting
from specdec.robustness.tokenizers import Untemplated


@dataclass(frozen=True)
class NoTemplate(Condition):
    """The contents of the messages alone, a blank line between them (https://arxiv.org/abs/2605.09992).

    The start token stays where the template writes one.
    """

    kind: ClassVar[str] = "no_template"
    group: ClassVar[str] = "template"

    @property
    def title(self) -> str:
        return "no template"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        if prompt.text is not None:
            return setting.clean(prompt)
        return setting.clean(prompt, tokenizer=Untemplated(setting.tokenizer), thinking=None)

    def unchanged(self, setting: Setting) -> str:
        return "no prompt is written by a chat template"
