"""Where streamed features saturate: producers that only wait and send, on a cluster of this machine's processes.

The states are those of an 8B target's width, random. A producer waits as long as its speed says and then sends a row;
queue, object store, checksums and the trainer's side are what training uses. The trainer takes batches as fast as it
can, or waits as long as its step takes. Measured: tokens a second and the most memory of the object store, also while
producers are killed.

``python benchmarks/stream.py --out FILE.md``
"""

import argparse
import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# the folder of `benchmarks`, which is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from specdec.data import Document, TokenData
from specdec.features import Streamed, streamed
from specdec.features.producers import NAMESPACE, Producer
from specdec.target import Target, TargetSource
from specdec.utils.cluster import join

LAYERS = (1, 2, 3)
SPEED = "SPECDEC_SIMULATED_TOKENS_A_SECOND"  # of a producer


class Engine:
    """Waits, and yields the same random states for every row."""

    name = "waits"

    def __init__(self, hidden: int, tokens: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.aux_TNH = torch.randn(tokens, len(LAYERS), hidden, generator=draw).bfloat16()

    def states(self, rows: Any) -> Iterator[Any]:
        """Of every row, after its time."""
        for row in rows:
            time.sleep(row.tokens / float(os.environ[SPEED]))
            yield row, self.aux_TNH[: row.tokens], self.aux_TNH[: row.tokens, 0]


class Waiting(Producer):
    """A producer whose target takes its time and no work."""

    def about(self) -> tuple[dict[str, Any], str]:
        """The target that it was told."""
        return dict(self.contract.target), Engine.name

    def _loaded(self) -> Any:
        if self._running is None:
            self._running = Engine(self.contract.hidden_size, self._given[0])  # type: ignore[assignment]
        return self._running

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()


class Rows(TokenData):
    """Random rows, each one document."""

    def __init__(self, count: int, seq_len: int, batch_size: int) -> None:
        super().__init__(seq_len, batch_size)
        self.count = count

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """As many as asked for, and one to validate on."""
        draw = torch.Generator().manual_seed(0)
        made = [
            torch.randint(0, 512, (self.seq_len,), generator=draw) for _ in range(self.count + 1)
        ]
        found = [Document(ids_T, torch.ones_like(ids_T, dtype=torch.bool)) for ids_T in made]
        return found[1:], found[:1]


def target_of(hidden: int) -> Target:
    """Of that width, and next to no weights."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=16, num_hidden_layers=4, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    # so that nobody compares its states
    target = Target(LlamaForCausalLM(config).bfloat16(), whole=False)
    target.origin = TargetSource("simulated")
    return target


def run(
    target: Target, seconds: float, tokens: int, producers: int, speed: float, step: float, ahead: int, dtype: str,
    kill: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Stream for so many seconds.

    Args:
        speed: tokens a second of a producer.
        step: seconds that the trainer takes for a batch of two rows.
        kill: seconds between two deaths; 0 for none.
    """
    data = Rows(4000, tokens, 2)
    data.prepare(None)
    os.environ[SPEED] = str(speed)
    ray = join(None, NAMESPACE, num_cpus=64)
    size = ray.cluster_resources()["object_store_memory"]
    try:
        spec = Streamed(producers=producers, ahead=ahead, dtype=dtype)
        source: Any = spec.open(target, data, LAYERS, False)
        data.reader = source
        stop, most, deaths = threading.Event(), [0.0], [0]

        def look() -> None:
            since = time.monotonic()
            while not stop.wait(0.1):
                most[0] = max(
                    most[0], size - ray.available_resources().get("object_store_memory", size)
                )
                if kill and time.monotonic() - since > kill:
                    since, deaths[0] = time.monotonic(), deaths[0] + 1
                    victim = source._kept[deaths[0] % producers]
                    with contextlib.suppress(ray.exceptions.RayError):  # it is not back yet
                        os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)

        watcher = threading.Thread(target=look)
        watcher.start()
        arrived: list[float] = []  # when the trainer had each batch
        for number, batch in enumerate(loader := iter(data.train_dataloader())):
            source(target, batch, LAYERS, False)
            if number > ahead:  # the window has been full
                arrived.append(time.perf_counter())
                if arrived[-1] - arrived[0] > seconds:
                    break
            time.sleep(step)
        loader.close()  # type: ignore[attr-defined]
        # Rows come in bursts, a producer's loan at a time: the rate is the slope through all arrivals.
        rate = statistics.linear_regression(arrived, range(len(arrived))).slope
        stop.set()
        watcher.join()
        counts = ray.get(source._queue.counts.remote())
        source.close()
    finally:
        ray.shutdown()
    return {
        "tokens_per_second": rate * 2 * tokens, "store": most[0], "deaths": deaths[0], "again": counts["again"],
        "credit": (1 + ahead) * 2 * tokens * source.contract.token_bytes, "bytes": source.contract.token_bytes,
    }  # fmt: skip


# producers, tokens a second of each, seconds of a step, batches ahead, dtype, seconds between deaths
CASES = (
    (1, 2000, 0.0, 4, "bfloat16", 0.0), (2, 2000, 0.0, 4, "bfloat16", 0.0), (4, 2000, 0.0, 4, "bfloat16", 0.0),
    (8, 2000, 0.0, 4, "bfloat16", 0.0), (4, 1e9, 0.0, 4, "bfloat16", 0.0), (4, 1e9, 0.0, 4, "float8_e4m3fn", 0.0),
    (8, 2000, 1.0, 4, "bfloat16", 0.0), (8, 2000, 1.0, 1, "bfloat16", 0.0), (4, 2000, 0.0, 4, "bfloat16", 4.0),
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=24.0, help="of each case (24)")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of a row, two of which are a batch (2048)"
    )
    parser.add_argument("--hidden", type=int, default=4096, help="the target's width (4096)")
    parser.add_argument(
        "--out", type=Path, help="a report, .md; raw figures go to the .json beside it"
    )
    parser.add_argument("--force", action="store_true", help="write over one that is there")
    options = parser.parse_args(argv)
    harness.check_out(options.out, options.force)
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    from benchmarks import stream  # under the name that the workers import

    streamed.Producer = stream.Waiting  # type: ignore[misc]
    about, target, found, rows = harness.machine(1), target_of(options.hidden), [], []
    for case in CASES:
        producers, speed, step, ahead, dtype, kill = case
        one = run(
            target, options.seconds, options.tokens, producers, speed, step, ahead, dtype, kill
        )
        found.append(
            dict(zip(("producers", "speed", "step", "ahead", "dtype", "kill"), case, strict=True))
            | one
        )
        trainer = f"{2 * options.tokens / step:,.0f}" if step else "any"
        rows.append((
            str(producers), f"{speed:,.0f}" if speed < 1e9 else "any", trainer, str(ahead), dtype, str(one["deaths"]),
            f"{one['tokens_per_second']:,.0f}", f"{one['tokens_per_second'] * one['bytes'] / 1e6:,.0f}",
            f"{one['store'] / 1e6:,.0f}", f"{one['credit'] / 1e6:,.0f}", str(one["again"]),
        ))  # fmt: skip
        harness.tell(" ".join(rows[-1]))
    heads = (
        "producers", "tokens/s of each", "trainer takes tokens/s", "ahead", "states", "deaths", "tokens/s", "MB/s",
        "object store, MB at most", "credit, MB", "rows begun again",
    )  # fmt: skip
    lines = [
        "# Streamed features, where they saturate", "",
        f"Simulated producers on one machine: rows of {options.tokens} tokens, hidden {options.hidden}, {len(LAYERS)} "
        f"boundaries and the final state; two rows a batch, one trainer, {options.seconds:g} s a case after the "
        "window is full; rates are the slope through the batches' arrivals. A producer waits as its speed says, then "
        "sends random states; queue, object store, CRC-32 at both ends and the trainer's copy are those of training. "
        "*credit*: bytes of the batch under way and of those ahead.",
        "", *harness.conditions(about, {"torch": torch.__version__}), "", *harness.table(heads, rows),
    ]  # fmt: skip
    harness.keep(options.out, lines, {"cases": found, "about": about})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
