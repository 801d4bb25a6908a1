"""What a bench does: ask servers at every concurrency, and start them first where there are none."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from specdec.evaluation.bars import bars
from specdec.evaluation.prompts import Prompt
from specdec.serving.arguments import log_told, running
from specdec.serving.bench.asking import Asking
from specdec.serving.bench.endpoint import Endpoint
from specdec.serving.bench.load import Level, requests, run_level
from specdec.serving.bench.summary import against, told
from specdec.serving.drafted import drafted
from specdec.serving.known import warn_of_draws
from specdec.serving.launch import Launch


class Work(NamedTuple):
    """What is asked of each server."""

    prompts: list[Prompt]
    concurrency: list[int]
    max_new_tokens: int
    temperature: float
    ignore_eos: bool

    def asking(self, model: str) -> Asking:
        """Of a model by its name."""
        return Asking(model, self.max_new_tokens, self.temperature, self.ignore_eos)


class Served(NamedTuple):
    """What a server did, and who it was."""

    url: str
    model: str
    levels: list[Level]


def started(launch: Launch, drafter: str, work: Work) -> tuple[Served, Served]:
    """Serve with the drafter, measure, and the same without it.

    Raises:
        ValueError: the drafter cannot be served, or a server does not come up or does not answer.
    """
    with log_told(), tempfile.TemporaryDirectory(prefix="specdec-bench-") as scratch:
        made = drafted(drafter, launch.target, Path(scratch) / "drafter")
        found = []
        for name, one in (("served", made), ("baseline", None)):
            said = Path(scratch) / f"{name}.log"
            with running(launch, one, said) as server:
                if one and work.temperature > 0:
                    warn_of_draws(said)
                found.append(measure(server.url, name, work))
    return found[0], found[1]


def measure(url: str, name: str, work: Work) -> Served:
    """Ask a server everything, at every concurrency.

    Raises:
        ValueError: it cannot be reached, or does not answer a prompt.
    """
    endpoint = Endpoint(url)
    model = endpoint.model()
    with bars() as bar:
        advance = bar(f"{name}, requests", sum(len(requests(work.prompts, users)) for users in work.concurrency))
        levels = [
            run_level(endpoint, work.asking(model), work.prompts, users, lambda answer: advance(1))
            for users in work.concurrency
        ]
    return Served(url, model, levels)


def results(served: Served, baseline: Served | None, work: Work) -> dict[str, Any]:
    """Levels and servers as ``bench.json`` has them."""
    others = baseline.levels if baseline else [None] * len(served.levels)
    return {
        "levels": [
            {
                "concurrency": one.concurrency,
                "served": told(one),
                "baseline": told(other) if other else None,
                "ratio": against(one, other, same_text=work.temperature == 0) if other else None,
            }
            for one, other in zip(served.levels, others, strict=True)
        ],
        "servers": {
            name: {"url": one.url, "model": one.model}
            for name, one in (("served", served), ("baseline", baseline))
            if one
        },
    }
