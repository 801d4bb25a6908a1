"""Without the start token."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition
from specdec.robustness.setting import Setting
from specdec.robustness.tokenizers import WithoutBos


@dataclass(frozen=True)
class NoBos(Condition):
    """The start token that a prompt begins with is left out (https://arxiv.org/abs/2605.09992)."""

    kind: ClassVar[str] = "no_bos"
    group: ClassVar[str] = "template"

    @property
    def title(self) -> str:
        return "no BOS"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        return setting.clean(prompt, tokenizer=WithoutBos(setting.tokenizer))

    def unchanged(self, setting: Setting) -> str:
        return "no prompt begins with a BOS token"
