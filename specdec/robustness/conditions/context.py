"""Behind a long context."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.robustness.conditions.condition import Condition
from specdec.robustness.setting import Setting, said, saying

SEAM = 8  # tokens that the blank line and the places where texts meet may take
SHARE = 0.5  # of the tokens asked for: with less room it is another condition


@dataclass(frozen=True)
class Context(Condition):
    """So many tokens of unrelated text and a blank line stand before what the user says.

    They are counted by themselves, by the target's tokenizer. A document that holds the prompt itself is not used for
    it. Where not all of them fit beside the longest prompt and its answer, as many as fit are taken, for every prompt.

    Args:
        tokens: of the text.
    """

    kind: ClassVar[str] = "context"
    group: ClassVar[str] = "context"

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"context: tokens must be at least 1, not {self.tokens}")

    @classmethod
    def usual(cls) -> tuple["Context", ...]:
        return tuple(cls(tokens) for tokens in (512, 1024, 2048, 4096, 8192, 16384))

    @property
    def title(self) -> str:
        return f"{self.tokens:,} tokens of context"

    def conversation(self, prompt: Prompt, setting: Setting) -> Conversation:
        words = said(prompt)
        filler = setting.filler(self.taken(setting), without=words.strip())
        return setting.clean(saying(prompt, f"{filler}\n\n{words}"))

    def taken(self, setting: Setting) -> int:
        """Tokens that are put in front."""
        longest = max(map(len, setting.asked.values()))
        return min(self.tokens, setting.positions - longest - setting.max_new_tokens - SEAM)

    def refusal(self, setting: Setting) -> str | None:
        if self.tokens > setting.positions:
            return f"the target has {setting.positions} positions"
        if self.taken(setting) < SHARE * self.tokens:
            return f"of the target's {setting.positions} positions, prompts and answers leave {self.taken(setting)}"
        return None

    def note(self, setting: Setting) -> str:
        taken = self.taken(setting)
        return f"{taken} tokens, which is what fits" if taken < self.tokens else ""
