"""Names that come once."""


class Names:
    """Gives each name as it is the first time, and numbered when it comes again (``id#2``)."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._times: dict[str, int] = {}

    def distinct(self, name: str) -> str:
        """A name that was not given before."""
        out = name
        while out in self._used:
            self._times[name] = self._times.get(name, 1) + 1
            out = f"{name}#{self._times[name]}"
        self._used.add(out)
        return out
