"""SPEED-Bench, whose published files leave out the prompts that others own."""

from specdec.evaluation.layouts.layout import Asked, Values
from specdec.evaluation.layouts.turns import Turns

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


class SpeedBench(Turns):
    """SPEED-Bench (https://arxiv.org/abs/2604.09557): ``turns`` with their source."""

    name = "speed_bench"
    columns = frozenset({"turns", "category", "source", "multiturn"})

    def ask(self, row: Values, place: str) -> Asked:
        """The turns as they are."""
        asked = super().ask(row, place)
        if any(turn.startswith(PLACEHOLDER) for turn in asked.turns or []):
            raise ValueError(
                f"{place}: the published file leaves this prompt out: fetch the prompts with SPEED-Bench's own "
                "preparation script and give the file that it writes"
            )
        return asked
