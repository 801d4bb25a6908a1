"""What a condition is."""

from dataclasses import dataclass, fields
from typing import ClassVar, Self

from specdec.decoding import Sampling
from specdec.drafter import Drafter
from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.setting import Setting


@dataclass(frozen=True)
class Condition:
    """Base: one thing that is other than in the clean run. What is not overridden is as it is there.

    A condition is one class in one file, named in ``conditions/__init__.py``; its fields are its parameters.

    Raises:
        ValueError: a parameter is out of its range.
    """

    kind: ClassVar[str]
    """Its name on the command line."""
    group: ClassVar[str]
    """Under which it stands in tables and figures."""
    rewrites: ClassVar[bool] = True
    """Whether it changes what the target is asked. A prompt that it leaves as it was is not counted."""

    @classmethod
    def usual(cls) -> tuple[Self, ...]:
        """Those that are measured if none is named."""
        return (cls(),)

    @property
    def name(self) -> str:
        """As on the command line: ``context:tokens=512``."""
        values = ",".join(f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))
        return f"{self.kind}:{values}" if values else self.kind

    @property
    def title(self) -> str:
        """For tables and figures."""
        raise TypeError(f"{type(self).__name__} must have a title")

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        """What the target is asked.

        Raises:
            ValueError: this prompt cannot be asked so.
        """
        return setting.clean(prompt)

    def sampling(self, sampling: Sampling) -> Sampling:
        """How tokens are drawn."""
        return sampling

    def drafter(self, drafter: Drafter, seed: int) -> Drafter:
        """Who drafts."""
        return drafter

    def refusal(self, setting: Setting) -> str | None:
        """Why it cannot be measured at all."""
        return None

    def unchanged(self, setting: Setting) -> str:
        """Why it leaves every prompt as it was, where it does."""
        return "it changes no prompt"

    def note(self, setting: Setting) -> str:
        """What the reader of a result has to know beside the title."""
        return ""


def untemplated(setting: Setting) -> bool:
    """Whether no prompt is written by a chat template."""
    return all(prompt.text is not None for prompt in setting.prompts)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return repr(value).removesuffix(".0")  # all digits: results are found again by the name
    return str(value).lower() if isinstance(value, bool) else str(value)
