"""What of a drafter is measured, where, and how deep."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Of one measurement.

    Args:
        depths: draft tokens of a chain; may exceed the depth that the drafter was trained at.
        anchors: chains for each prompt, at most.
        sink_tokens: positions from the text's first one on that count as the sink.
        recent: committed tokens before a chain that count as recent.

    Raises:
        ValueError: a number is out of range.
    """

    depths: int = 8
    anchors: int = 16
    sink_tokens: int = 1
    recent: int = 16

    def __post_init__(self) -> None:
        if min(self.depths, self.anchors, self.sink_tokens, self.recent) < 1:
            raise ValueError(
                f"depths {self.depths}, anchors {self.anchors}, sink_tokens {self.sink_tokens} and recent "
                f"{self.recent} must be at least 1"
            )

    def check_length(self, max_new_tokens: int) -> None:
        """Raise ValueError if no answer can be long enough for a chain."""
        if max_new_tokens <= self.depths:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens}: chains of {self.depths} tokens need answers of at least "
                f"{self.depths + 1}"
            )
