"""GSM8K."""

from specdec.evaluation.layouts.layout import Asked, Layout, Values, text


class GSM8K(Layout):
    """GSM8K (https://arxiv.org/abs/2110.14168): the question is the user's turn, as in EAGLE's evaluation."""

    name = "gsm8k"
    columns = frozenset({"question", "answer"})
    others = frozenset()  # many sets have a question and an answer beside other columns
    category = "gsm8k"

    def ask(self, row: Values, place: str) -> Asked:
        """One turn."""
        return Asked(turns=[text(row["question"], f"{place}: question")])
