"""Without a system prompt."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition
from specdec.robustness.setting import Setting


@dataclass(frozen=True)
class NoSystem(Condition):
    """The prompts' own system messages, and ``--system``, are left out. What the template adds by itself stays."""

    kind: ClassVar[str] = "no_system"
    group: ClassVar[str] = "system prompt"

    @property
    def title(self) -> str:
        return "no system prompt"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        return setting.clean(without_system(prompt), system=None)

    def unchanged(self, setting: Setting) -> str:
        return "no prompt has a system prompt"


def without_system(prompt: Prompt) -> Prompt:
    """A prompt without its system messages."""
    if prompt.messages is None:
        return prompt
    return prompt._replace(messages=[one for one in prompt.messages if one["role"] not in ("system", "developer")])
