"""A prompt and its response, under the several names that these have."""

from specdec.data.layouts.layout import ID_COLUMNS, SYSTEM, Layout, Message, Values, text, with_system

ASKED = ("prompt", "question")
ANSWERED = ("response", "completion", "answer")


class PromptResponse(Layout):
    """``prompt`` or ``question`` (GSM8K), and ``response``, ``completion`` or ``answer``."""

    name = "prompt_response"
    columns = f"{' or '.join(ASKED)}, and {' or '.join(ANSWERED)}"

    def has_columns(self, row: Values) -> bool:
        """By one of each."""
        return any(key in row for key in ASKED) and any(key in row for key in ANSWERED)

    def unread(self, row: Values) -> list[str]:
        """A context, a second answer."""
        keys = {next(key for key in names if key in row) for names in (ASKED, ANSWERED)}
        return sorted(row.keys() - {*keys, "category", *SYSTEM, *ID_COLUMNS})

    def messages(self, row: Values, place: str) -> list[Message]:
        """One question, one answer."""
        said = []
        for role, names in (("user", ASKED), ("assistant", ANSWERED)):
            keys = [key for key in names if key in row]
            if len(keys) > 1:
                raise ValueError(f"{place}: {' and '.join(map(repr, keys))} may each be the {role}'s: drop all but one")
            said.append({"role": role, "content": text(row, keys[0], place)})
        return with_system(row, said, place)
