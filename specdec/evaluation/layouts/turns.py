"""User turns: MT-bench, Spec-Bench and the field's other ``question.jsonl`` files."""

from specdec.evaluation.layouts.layout import Asked, Layout, Values, items, text


class Turns(Layout):
    """``turns``, one after another (https://arxiv.org/abs/2306.05685, https://arxiv.org/abs/2401.07851)."""

    name = "turns"
    columns = frozenset({"turns"})

    def ask(self, row: Values, place: str) -> Asked:
        """The turns as they are."""
        return Asked(turns=[text(turn, f"{place}: a turn") for turn in items(row["turns"], f"{place}: turns")])
