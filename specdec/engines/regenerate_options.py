"""What ``specdec regenerate`` is asked."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specdec.answering.settings import AnswerSettings
from specdec.target import TargetSource
from specdec.target.source import AUTO
from specdec.utils.numbers import Count, Side, check_numbers


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig(AnswerSettings):
    """Which conversations are answered, by what and how, and where the answers go.

    Args:
        data: conversations as ChatData reads them
        out: the data set to write, FILE.jsonl; its record is FILE.json
        target: the model that answers in this process
        engine: the target in this process, or what serves it at --url
        limit: use the first rows only
        layout: of all conversations; by default each row's columns decide
        broken: whether a malformed conversation ends the run or is left out
        device: of --engine transformers
        batch_size: prompts at a time, of --engine transformers
        url: an OpenAI-compatible server, as http://127.0.0.1:8000
        model: its name at --url; by default the first served
        concurrency: requests to a server at a time
    """

    data: list[str]
    out: Path
    target: TargetSource = field(default_factory=TargetSource)
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    limit: Count | None = None
    layout: str | None = None
    broken: Literal["refuse", "drop"] = "refuse"
    device: str = AUTO
    batch_size: Side = 32
    url: str | None = None
    model: str | None = None
    concurrency: Side = 64

    def __post_init__(self) -> None:
        if (self.url is None) != (self.engine == "transformers"):
            raise ValueError(
                "--engine vllm and openai need the --url of a running server; transformers takes none"
            )
        check_numbers(type(self), vars(self))
        self.sampling()
