"""SIGKILLs over runs of one kind, beside the run that nothing disturbs."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faulting.scene import Scene, Variant, arguments
from benchmarks.faulting.trial import Key, Trial, kill, read_losses, start, wait_for
from specdec.files import sha256
from specdec.training.resuming import newest
from specdec.training.seals import contents, verify

TOP = 2  # checkpoint.save_top_k of the runs
WEIGHTS = Path("drafter") / "model.safetensors"


class Undisturbed(NamedTuple):
    """What a run is that nobody kills."""

    losses: dict[Key, str]
    weights: str


class Killed(NamedTuple):
    """What became of the runs of one kind."""

    variant: str
    where: str
    """``at steps`` or ``in saves``."""
    kills: int
    runs: int
    losses: int
    """Compared: every batch's, on every rank, those run again included."""
    differing: int
    weights_equal: bool
    unreadable: int
    """Restarts that found no whole checkpoint where one had been, or a file under a final name that is not whole."""
    leftovers: int
    """Temporary files after the end of the runs, in their directories and in ``$TMPDIR``."""
    most_checkpoints: int
    """After the end of a run; ``save_top_k`` and the last one are 3."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return self._asdict()

    @property
    def holds(self) -> bool:
        """Whether nothing was lost or changed."""
        bad = self.differing or self.unreadable or self.leftovers or self.most_checkpoints > TOP + 1
        return self.kills > 0 and self.weights_equal and not bad


class Campaign:
    """The runs of one kind.

    Args:
        temporary: ``$TMPDIR`` of the runs.
        told: called after every kill.
    """

    def __init__(
        self, scene: Scene, variant: Variant, folder: Path, temporary: Path, steps: int, every: int,
        told: Callable[[int], None] = lambda more: None,
    ) -> None:  # fmt: skip
        self.variant, self.folder, self.temporary, self.told = variant, folder, temporary, told
        self.args = tuple(arguments(scene, variant, steps, every))
        self.every = every
        folder.mkdir(parents=True)
        temporary.mkdir(parents=True, exist_ok=True)
        self.undisturbed = self._undisturbed()

    def _undisturbed(self) -> Undisturbed:
        out = self.folder / "whole"
        self._finish(out)
        return Undisturbed(dict(read_losses(out)), sha256(out / WEIGHTS))

    def _finish(self, out: Path) -> None:
        process = start(Trial(self.args, out, self.temporary, 0, self.variant.processes))
        process.join()
        if process.exitcode != 0:
            raise self._failed(process.exitcode, out)

    def _failed(self, status: int | None, out: Path) -> RuntimeError:
        text = out.with_name(f"{out.name}.log").read_text()
        return RuntimeError(f"{self.variant.name}: status {status}: {text[-3000:]}")

    def at_steps(self, kills: int, seed: int = 0) -> Killed:
        """Kill at random moments of training: after a random number of batches and milliseconds."""
        draw = random.Random(seed)

        def strike(out: Path) -> bool:
            process = start(Trial(self.args, out, self.temporary, 0, self.variant.processes))
            more = draw.randint(1, 2 * self.every * self.variant.processes)
            if not wait_for(process, out, len(read_losses(out)) + more):
                process.join()
                return False
            time.sleep(draw.random() * 0.05)
            alive = process.is_alive()
            kill(process)
            return alive and process.exitcode != 0

        return self._strike(kills, "at steps", strike)

    def in_saves(self, kills: int, acts: int, seed: int = 0) -> Killed:
        """Kill at a random act on the file system within a save, from the first write to the last removal.

        Args:
            acts: of the file system that are counted, at most; a save of a tiny drafter has about 50.
        """
        draw = random.Random(seed)

        def strike(out: Path) -> bool:
            process = start(Trial(self.args, out, self.temporary, draw.randint(1, acts), self.variant.processes))
            process.join()
            if process.exitcode not in (0, -signal.SIGKILL):
                raise self._failed(process.exitcode, out)
            return process.exitcode != 0

        return self._strike(kills, "in saves", strike)

    def _strike(self, kills: int, where: str, strike: Callable[[Path], bool]) -> Killed:
        begin, done, run, unreadable = time.monotonic(), 0, 0, 0
        outs = []
        while done < kills:
            out = self.folder / f"{where.replace(' ', '-')}-{run}"
            outs.append(out)
            run += 1
            while done < kills and not (out / "DONE.json").exists():
                had = any((out / "checkpoints").glob("*.ckpt"))
                if not strike(out):
                    break
                done += 1
                unreadable += _unreadable(out, had)
                self.told(1)
            self._finish(out)
        lines = [line for out in outs for line in read_losses(out)]
        whole = self.undisturbed
        missing = sum(len(set(whole.losses) - {key for key, _ in read_losses(out)}) for out in outs)
        return Killed(
            self.variant.name, where, done, run, len(lines),
            missing + sum(whole.losses.get(key) != loss for key, loss in lines),
            all(sha256(out / WEIGHTS) == whole.weights for out in outs),
            unreadable,
            sum(len(list(out.rglob(".tmp-*"))) + (out / ".claimed").exists() for out in outs) + _files(self.temporary),
            max(len(list((out / "checkpoints").glob("*.ckpt"))) for out in outs),
            round(time.monotonic() - begin, 1),
        )  # fmt: skip


def _unreadable(out: Path, had: bool) -> int:
    """What a kill left that is not as it should be."""
    bad = 0
    for path in (out / "checkpoints").glob("*.ckpt"):
        try:
            verify(path)
        except ValueError:
            bad += 1
    found = newest(out / "checkpoints")
    if found is None:
        return bad + had
    return bad + (contents(found)["global_step"] < 1)


def _files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))
