"""HumanEval (https://arxiv.org/abs/2107.03374): the beginning of a function, put to the target in three ways."""

from specdec.evaluation.layouts.layout import Asked, Layout, Values, text

INSTRUCTION = "Complete the code I provided."


class HumanEval(Layout):
    """A user turn with EAGLE's instruction right before the code."""

    name = "humaneval"
    columns = frozenset({"task_id", "prompt", "entry_point"})
    category = "humaneval"

    def ask(self, row: Values, place: str) -> Asked:
        """One turn."""
        return Asked(turns=[INSTRUCTION + text(row["prompt"], f"{place}: prompt")])


class HumanEvalVerbatim(HumanEval):
    """A user turn of nothing but the code, as SpecForge has it."""

    name = "humaneval_verbatim"
    by_name = True

    def ask(self, row: Values, place: str) -> Asked:
        """One turn."""
        return Asked(turns=[text(row["prompt"], f"{place}: prompt")])


class HumanEvalRaw(HumanEval):
    """Raw text, which a target without a chat template continues."""

    name = "humaneval_raw"
    by_name = True

    def ask(self, row: Values, place: str) -> Asked:
        """The text as it is."""
        return Asked(text=text(row["prompt"], f"{place}: prompt"))
