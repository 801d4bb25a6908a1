"""Alpaca."""

from specdec.evaluation.layouts.layout import Asked, Layout, Values, text


class Alpaca(Layout):
    """Stanford Alpaca: the instruction and, after a blank line, its input, if it has one; no further words."""

    name = "alpaca"
    columns = frozenset({"instruction", "output"})
    others = frozenset({"input", "text"})
    category = "alpaca"

    def ask(self, row: Values, place: str) -> Asked:
        """One turn."""
        turn = text(row["instruction"], f"{place}: instruction")
        if row.get("input", "") != "":
            turn += "\n\n" + text(row["input"], f"{place}: input")
        return Asked(turns=[turn])
