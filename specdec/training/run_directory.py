"""The directory of one run, which no other run has while it lasts."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Self

from specdec.compose import run_names
from specdec.files import explain
from specdec.training.callbacks import RunRecord

CLAIM = ".claimed"  # lies in the directory from its choice to the end of the run


class RunDirectory:
    """Chooses a run's directory, holds it, and leaves nothing in it if the run fails before it trained.

    A claim is a file that one process alone can make. A context manager: at its end the claim is given back.

    Args:
        shared: the directory may hold something already, and the caller answers for it: it is neither claimed nor
            cleaned up.
    """

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.path: Path | None = None
        self.record: RunRecord | None = None  # knows whether there is something to keep
        self._held = self._made = False  # by this process

    def choose(self, out: str | None, resumed: str | None = None, first: bool = True) -> Path:
        """The run's directory, claimed unless it goes on with a run that lies there.

        Args:
            out: the directory; None: a new one, named after the present time.
            resumed: the checkpoint with which the run begins.
            first: whether this process is the first of its job; the others write nothing and claim nothing.

        Raises:
            ValueError: the directory holds something, another run has it, or it cannot be written.
        """
        if out is None:
            names = run_names("fit")
            self.path = next(name for name in names if self._claim(name)) if first else next(names)
            return self.path
        self.path = Path(out)
        resumes = resumed is not None and self.path.resolve() in Path(resumed).resolve().parents
        if not first or (_holds_something(self.path) and (self.shared or resumes)):
            return self.path
        if not self._claim(self.path):
            last = self.path / "checkpoints" / "last.ckpt"
            if (self.path / CLAIM).exists() and not last.exists():
                raise ValueError(
                    f"{self.path} is claimed by another run, or by one that was killed: choose another --out, or, if "
                    "nothing runs there, remove it"
                )
            raise ValueError(
                f"{self.path} exists already and is never overwritten: choose another --out, or resume it with "
                f"--ckpt_path {last}"
            )
        return self.path

    def _claim(self, path: Path) -> bool:
        """Whether it is this run's now; if not, nothing in it has changed."""
        made = False
        try:
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()
                made = True
            if _holds_something(path):  # before anything is written into what is someone else's
                return False
            (path / CLAIM).touch(exist_ok=False)
        except OSError as error:
            if isinstance(error, FileExistsError | FileNotFoundError):
                return False  # another run was faster, or gave it up just now
            if made:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise explain(error, path) from error
        if [entry.name for entry in path.iterdir()] != [CLAIM]:  # a whole run came and went, or trains, since we looked
            (path / CLAIM).unlink()
            return False
        self.path, self._held, self._made = path, True, made
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Give the claim back; after a failure before anything was trained, remove what came under it."""
        if not self._held:
            return
        assert self.path is not None
        failed = kind is not None and (self.record is None or not self.record.trained)
        if failed and self.path.exists():
            for path in self.path.iterdir():  # all of it is this run's: nothing else was here when it was claimed
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != CLAIM:
                    path.unlink(missing_ok=True)
        (self.path / CLAIM).unlink(missing_ok=True)  # last: from here on it may be another run's
        self._held = False
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
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
