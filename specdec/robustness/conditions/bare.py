"""Without chat template and start token."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition, untemplated
from specdec.robustness.setting import Setting
from specdec.robustness.tokenizers import Untemplated, WithoutBos


@dataclass(frozen=True)
class Bare(Condition):
    """Neither template nor start token (https://arxiv.org/abs/2605.09992)."""

    kind: ClassVar[str] = "bare"
    group: ClassVar[str] = "template"

    @property
    def title(self) -> str:
        return "no template, no BOS"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        if prompt.text is not None:
            return setting.clean(prompt)
        return setting.clean(prompt, tokenizer=WithoutBos(Untemplated(setting.tokenizer)), thinking=None)

    def refusal(self, setting: Setting) -> str | None:
        if untemplated(setting):
            return "no prompt is written by a chat template"
        if not setting.tokenizer.bos_token:
            return "the tokenizer has no BOS token: it is no_template"
        return None
