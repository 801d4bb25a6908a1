"""Whole conversations."""

from typing import Any

from specdec.evaluation.layouts.layout import Asked, Layout, Values, items, text

_ROLES = ("system", "developer", "user", "assistant", "tool")


class Messages(Layout):
    """``messages``: a conversation up to the user turn that is to be answered."""

    name = "messages"
    columns = frozenset({"messages"})

    def ask(self, row: Values, place: str) -> Asked:
        """The messages as they are."""
        found = items(row["messages"], f"{place}: messages")
        messages = [_message(item, f"{place}: message {index}") for index, item in enumerate(found, start=1)]
        if messages[-1]["role"] != "user":
            raise ValueError(f"{place}: messages must end with a user turn to be answered, not {messages[-1]['role']}")
        return Asked(messages=messages)


def _message(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object with role and content, not {type(value).__name__}")
    fields = {key: item for key, item in value.items() if item is not None}
    if set(fields) != {"role", "content"}:
        raise ValueError(f"{what} must have role and content and nothing else; it has {sorted(fields)}")
    if fields["role"] not in _ROLES:
        raise ValueError(f"{what} has role {fields['role']!r}: use one of {', '.join(_ROLES)}")
    return {"role": fields["role"], "content": text(fields["content"], f"{what} content")}
