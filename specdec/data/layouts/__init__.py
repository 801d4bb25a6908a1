"""The layouts of chat rows that are known, and which of them a row has."""

from specdec.data.layouts.alpaca import Alpaca
from specdec.data.layouts.layout import ID_COLUMNS, Layout, Message, Values, parsed
from specdec.data.layouts.messages import Messages
from specdec.data.layouts.prompt_response import PromptResponse
from specdec.data.layouts.sharegpt import ShareGPT
from specdec.data.layouts.ultrachat import UltraChat

LAYOUTS: tuple[Layout, ...] = (Messages(), ShareGPT(), UltraChat(), Alpaca(), PromptResponse())

__all__ = ["ID_COLUMNS", "LAYOUTS", "Layout", "Message", "Values", "named", "parsed", "recognise"]


def named(name: str) -> Layout:
    """A layout by its name.

    Raises:
        ValueError: it is unknown.
    """
    by_name = {layout.name: layout for layout in LAYOUTS}
    if name not in by_name:
        raise ValueError(f"layout is {name!r}: choose one of {', '.join(by_name)}")
    return by_name[name]


def recognise(row: Values, place: str, chosen: Layout | None = None) -> Layout:
    """The layout that was chosen, or the one that the row's columns tell.

    Raises:
        ValueError: the chosen one needs other columns; or none fits, several do, or one would leave a column unread
            that may be a part of what is said.
    """
    found = ", ".join(sorted(row)) or "none"
    if chosen is not None:
        if not chosen.has_columns(row):
            raise ValueError(f"{place}: layout {chosen.name} needs {chosen.columns}; the row's columns are {found}")
        return chosen
    fitting = [layout for layout in LAYOUTS if layout.has_columns(row)]
    if len(fitting) > 1:
        names = ", ".join(layout.name for layout in fitting)
        raise ValueError(f"{place}: its columns ({found}) fit more than one layout ({names}): choose one with layout")
    if not fitting:
        known = "; ".join(f"{layout.name}: {layout.columns}" for layout in LAYOUTS)
        raise ValueError(f"{place}: its columns ({found}) are of no known layout ({known})")
    unread = fitting[0].unread(row)
    if unread:
        raise ValueError(
            f"{place}: {', '.join(unread)} may be a part of what is said, and {fitting[0].name} does not read it: "
            f"drop it, or choose layout {fitting[0].name}"
        )
    return fitting[0]
