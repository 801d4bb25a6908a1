"""In another language."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition
from specdec.robustness.setting import Setting, said, saying
from specdec.robustness.texts import LANGUAGES


@dataclass(frozen=True)
class Language(Condition):
    """An instruction of :data:`specdec.robustness.texts.LANGUAGES` and a blank line stand before what the user says.

    They ask for an answer in that language. Prompts of suites are not translated: that would be another suite.
    """

    kind: ClassVar[str] = "language"
    group: ClassVar[str] = "language"

    code: Literal["de", "es", "fr", "ru", "zh", "ja", "ar", "hi"]

    @classmethod
    def usual(cls) -> tuple["Language", ...]:
        return tuple(cls(code) for code in ("de", "es", "fr", "ru", "zh", "ja", "ar", "hi"))

    @property
    def title(self) -> str:
        return f"instruction in {_NAMES[self.code]}"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        return setting.clean(saying(prompt, f"{LANGUAGES[self.code]}\n\n{said(prompt)}"))


_NAMES = {
    "de": "German", "es": "Spanish", "fr": "French", "ru": "Russian", "zh": "Chinese", "ja": "Japanese",
    "ar": "Arabic", "hi": "Hindi",
}  # fmt: skip
