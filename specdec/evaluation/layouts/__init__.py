"""The layouts of prompt rows that are known, and which of them a row has."""

from collections.abc import Sequence

from specdec.evaluation.layouts.alpaca import Alpaca
from specdec.evaluation.layouts.cnn_dailymail import CNNDailyMail
from specdec.evaluation.layouts.gsm8k import GSM8K
from specdec.evaluation.layouts.human_eval import HumanEval, HumanEvalRaw, HumanEvalVerbatim
from specdec.evaluation.layouts.layout import ID_COLUMNS, Asked, BlankError, Layout, Values, text
from specdec.evaluation.layouts.messages import Messages
from specdec.evaluation.layouts.prompt import PromptTurn, RawPrompt
from specdec.evaluation.layouts.speed_bench import SpeedBench
from specdec.evaluation.layouts.turns import PromptTurns, Turns

LAYOUTS: tuple[Layout, ...] = (
    Turns(),
    Messages(),
    RawPrompt(),
    PromptTurn(),
    PromptTurns(),
    SpeedBench(),
    HumanEval(),
    HumanEvalVerbatim(),
    HumanEvalRaw(),
    GSM8K(),
    Alpaca(),
    CNNDailyMail(),
)

__all__ = ["ID_COLUMNS", "LAYOUTS", "Asked", "BlankError", "Layout", "Values", "named", "recognise", "text"]


def named(names: Sequence[str]) -> list[Layout]:
    """Layouts by their names.

    Raises:
        ValueError: a name is unknown.
    """
    by_name = {layout.name: layout for layout in LAYOUTS}
    for name in names:
        if name not in by_name:
            raise ValueError(f"layouts: there is no {name!r}; known: {', '.join(by_name)}")
    return [by_name[name] for name in names]


def recognise(row: Values, place: str, preferred: Sequence[Layout] = ()) -> Layout:
    """The first preferred layout whose columns the row has, else the one that its columns tell.

    Where the columns of one layout are all in those of another that fits too, the other is the row's.

    Raises:
        ValueError: none fits, or several do.
    """
    for layout in preferred:
        if layout.has_columns(row):
            return layout
    fitting = [layout for layout in LAYOUTS if layout.recognises(row)]
    closest = [one for one in fitting if not any(one.columns < other.columns for other in fitting)]
    if len(closest) == 1:
        return closest[0]
    found = ", ".join(sorted(row)) or "none"
    if closest:
        raise ValueError(
            f"{place}: its columns ({found}) fit more than one layout ({', '.join(one.name for one in closest)}): "
            "choose one with --layouts, or drop the other's columns"
        )
    known = "; ".join(f"{one.name}: {', '.join(sorted(one.columns))}" for one in LAYOUTS if not one.by_name)
    raise ValueError(f"{place}: its columns ({found}) are of no known layout ({known}); --layouts reads it as one")
