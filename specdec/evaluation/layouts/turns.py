"""User turns: MT-bench, Spec-Bench and the field's other ``question.jsonl`` files."""

from typing import ClassVar

from specdec.evaluation.layouts.layout import Asked, Layout, Values, items, text


class Turns(Layout):
    """``turns``, one after another (https://arxiv.org/abs/2306.05685, https://arxiv.org/abs/2401.07851)."""

    name = "turns"
    columns = frozenset({"turns"})
    column: ClassVar[str] = "turns"
    """Which has them."""

    def ask(self, row: Values, place: str) -> Asked:
        """The turns as they are."""
        turns = items(row[self.column], f"{place}: {self.column}")
        return Asked(turns=[text(turn, f"{place}: a turn") for turn in turns])


class PromptTurns(Turns):
    """``prompt``, a list of user turns: MT-bench as the Hub has it (``HuggingFaceH4/mt_bench_prompts``)."""

    name = "prompt_turns"
    columns = frozenset({"prompt"})
    column = "prompt"

    def recognises(self, row: Values) -> bool:
        """By the column, if it is a list."""
        return super().recognises(row) and isinstance(row["prompt"], list)
