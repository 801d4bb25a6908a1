"""The directory of one run, which no other run has while it lasts."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Self

from specdec.compose import run_names
from specdec.files import explain
from specdec.training.callbacks import RunRecord
from specdec.training.claim import CLAIM, PATIENCE, Claim, holder, is_held


class RunDirectory:
    """Chooses a run's directory, holds it, and leaves nothing in it if the run fails before it trained.

    A context manager: at its end the claim is given back.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.record: RunRecord | None = None  # knows whether there is something to keep
        self._claim: Claim | None = None
        self._made = self._resumed = False  # by this process

    def choose(self, out: str | None, resumes: bool = False, first: bool = True) -> Path:
        """The run's directory, claimed.

        Args:
            out: the directory; None: a new one, named after the present time.
            resumes: the run goes on with what lies there, if anything does. What killed saves left of it is removed.
            first: whether this process is the first of its job; the others write nothing and claim nothing.

        Raises:
            ValueError: the directory holds something, another run has it, or it cannot be written.
        """
        if out is None:
            names = run_names("fit")
            self.path = next(name for name in names if self._claimed(name)) if first else next(names)
            return self.path
        self.path = Path(out)
        if not first:
            return self.path
        if resumes and self.path.is_dir() and _holds_something(self.path):
            self._resume(self.path)
        elif not self._claimed(self.path):
            if is_held(self.path):
                raise _taken(self.path)
            raise ValueError(
                f"{self.path} exists already and is never overwritten: choose another --out, or go on with it by "
                "--ckpt_path auto"
            )
        return self.path

    def _resume(self, path: Path) -> None:
        try:
            self._claim = Claim.take(path, PATIENCE)
        except OSError as error:
            raise explain(error, path) from error
        if self._claim is None:
            raise _taken(path)
        self._resumed = True
        for place in (path, path / "checkpoints"):
            for temporary in place.glob(".tmp-*"):  # nothing else has such a name
                _remove(temporary)

    def _claimed(self, path: Path) -> bool:
        """Whether it is this run's now; if not, nothing in it has changed."""
        made = False
        try:
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()
                made = True
        except OSError as error:
            raise explain(error, path) from error
        try:
            if _holds_something(path):  # before anything is written into what is someone else's
                return False
            claim = Claim.take(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                return False  # another run gave it up just now
            if made:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise explain(error, path) from error
        if claim is None:
            return False  # another run was faster
        if _holds_something(path):  # a whole run came and went, or trains, since we looked
            claim.release()
            return False
        self.path, self._claim, self._made = path, claim, made
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Give the claim back; after a failure before anything was trained, remove what came under it."""
        if self._claim is None:
            return
        assert self.path is not None
        trained = self.record is not None and self.record.trained
        # where Lightning forks the processes that train, the record here knows nothing of them
        kept = self._resumed or trained or any((self.path / "checkpoints").glob("*.ckpt"))
        failed = kind is not None and not kept
        if failed and self.path.exists():
            for path in self.path.iterdir():  # all of it is this run's: nothing else was here when it was claimed
                if path.name != CLAIM:
                    _remove(path)
        self._claim.release()
        self._claim = None
        if failed and self._made:
            with contextlib.suppress(OSError):  # it is
                self.path.rmdir()


def is_first(devices: object, num_nodes: int) -> bool:
    """Whether this process is the only one of its job or rank 0, before Lightning has joined them.

    Launchers say it in the environment: torchrun, Lightning's own (which runs the command once more for every further
    process), SLURM's and JSM's. A run on one device is one process, whatever launched it.
    """
    if str(devices) == "1" and num_nodes == 1:
        return True
    local = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    return int(local) == int(os.environ.get("NODE_RANK", 0)) == 0


RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # in the order in which Lightning asks


def _holds_something(path: Path) -> bool:
    """Beside a claim, whose lock says whether anybody has it."""
    return path.exists() and (not path.is_dir() or any(entry.name != CLAIM for entry in path.iterdir()))


def _taken(path: Path) -> ValueError:
    return ValueError(f"{path} is claimed by another run ({holder(path)}): wait for its end, or choose another --out")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
