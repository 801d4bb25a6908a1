"""Rows with a ``prompt``."""

from specdec.evaluation.layouts.layout import Asked, Layout, Values, text


class RawPrompt(Layout):
    """``prompt``: raw text, which the target continues; a line of a plain text file is such a row."""

    name = "prompt"
    columns = frozenset({"prompt"})

    def recognises(self, row: Values) -> bool:
        """By the column, if it is no list."""
        return super().recognises(row) and not isinstance(row["prompt"], list)

    def ask(self, row: Values, place: str) -> Asked:
        """The text as it is."""
        return Asked(text=text(row["prompt"], f"{place}: prompt"))


class PromptTurn(RawPrompt):
    """``prompt`` as a user turn: how ``vllm bench`` puts such rows to a chat model."""

    name = "prompt_turn"
    by_name = True

    def ask(self, row: Values, place: str) -> Asked:
        """One turn."""
        return Asked(turns=[text(row["prompt"], f"{place}: prompt")])
