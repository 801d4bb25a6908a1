"""Works on one job: ``python -m specdec.sweep.worker FOLDER`` in the folder where the study was started.

A worker is a keeper (:mod:`specdec.keeper`), the attempt under it (:mod:`specdec.sweep.attempt`) and the command under
that. Whichever of them, or whoever started them, is killed: the others end, and what they have started with them.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec import keeper
from specdec.files import explain
from specdec.signals import Asked, asked_to_end
from specdec.sweep.attempt import BUSY
from specdec.sweep.state import Folder

GRACE = 30.0  # seconds for a command to end by itself: fit ends its optimizer step and saves
PATIENCE = 10.0  # seconds more, until what was killed is gone
POLL = 0.5


@dataclass(frozen=True)
class Way:
    """How the commands of jobs are run.

    Args:
        cwd: the folder in which they run, on every machine.
        module: what ``python -m`` is given.
        grace: seconds to end by themselves when they are stopped.
    """

    cwd: Path
    module: str = "specdec"
    grace: float = GRACE


class Worker:
    """Processes that work on a job, of which this one holds the thread: if it ends, they do.

    Args:
        folder: of the job; what they say goes to its log.
        environment: variables besides this process's own.

    Raises:
        ValueError: the log cannot be written.
    """

    def __init__(self, folder: Path, way: Way, environment: Mapping[str, str] | None = None) -> None:
        self.way = way
        attempt = [str(folder.resolve()), way.module, str(way.grace)]
        try:
            with Folder(folder).log.open("ab") as log:
                self._keeper = subprocess.Popen(
                    [
                        *(sys.executable, "-I", keeper.__file__, str(way.grace)),
                        *(sys.executable, "-m", "specdec.sweep.attempt", *attempt),
                    ],
                    cwd=way.cwd,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C goes to us alone
                    env=os.environ | dict(environment or {}),
                )
        except OSError as error:
            raise explain(error, error.filename or folder) from error

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit status of the attempt, 128 and the signal's number if one ended it; None if that takes longer."""
        try:
            status = self._keeper.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return status if status >= 0 else 128 - status

    def stop(self) -> None:
        """Ask them to end, and do not wait for it; nothing happens if they have ended."""
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.close()


def work(folder: Path, way: Way, environment: Mapping[str, str] | None = None) -> int:
    """Work on a job to its end; whatever ends this call ends the work. The exit status of the attempt."""
    worker = Worker(folder, way, environment)
    try:
        while (status := worker.wait(POLL)) is None:
            pass
        return status
    finally:
        worker.stop()
        worker.wait(way.grace + PATIENCE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the status as of :func:`specdec.sweep.attempt.main`."""
    parser = argparse.ArgumentParser(prog="python -m specdec.sweep.worker", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the job: STUDY/jobs/KEY")
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds to end by itself when it is stopped")
    args = parser.parse_args(argv)
    try:
        with asked_to_end():
            Folder(args.folder).job()
            status = work(args.folder, Way(Path.cwd(), grace=args.grace))
    except Asked as asked:
        return asked.status
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    state = Folder(args.folder).state()
    words = "somebody else has it" if status == BUSY else "done already" if state is None else state.state
    sys.stderr.write(f"{args.folder}: {words}{f': {state.message}' if state and state.message else ''}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
