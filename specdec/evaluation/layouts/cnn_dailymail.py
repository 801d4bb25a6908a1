"""CNN/DailyMail."""

from specdec.evaluation.layouts.layout import Asked, Layout, Values, text

INSTRUCTION = "Summarize: "


class CNNDailyMail(Layout):
    """CNN/DailyMail (https://arxiv.org/abs/1704.04368), in the words of Spec-Bench: ``Summarize:`` and the article."""

    name = "cnn_dailymail"
    columns = frozenset({"article", "highlights"})
    others = frozenset()
    category = "cnn_dailymail"

    def ask(self, row: Values, place: str) -> Asked:
        """One turn."""
        return Asked(turns=[INSTRUCTION + text(row["article"], f"{place}: article")])
