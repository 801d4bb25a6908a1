"""``specdec sweep``: every arm of a study trained and measured, each once, and the card of what came of it.

The loop starts each job once what it needs is done, until all are done or cannot be.
"""

import enum
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec.studies.card import write_card
from specdec.studies.jobs import STUDY, claim, make_plan
from specdec.studies.reproduce import compare_again, jobs_again, recorded_run
from specdec.studies.schedulers import RETRIES, Engine, Local
from specdec.studies.study import read_study
from specdec.studies.worker import Ended, Job, JobFolder
from specdec.utils.config import new_run, runs_folder
from specdec.utils.files import claimed
from specdec.utils.numbers import Seed, Side
from specdec.utils.progress import progress
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import duration, how_many

log = logging.getLogger(__name__)

POLL = 1.0  # seconds between looks at what nobody tells of: another sweep's jobs


def sweep(
    study: Path,
    *,
    out: Path | None = None,
    plan_only: bool = False,
    card_only: bool = False,
    reproduce: str | None = None,
    seed: Seed | None = None,
    only: list[str] = [],  # noqa: B006  never changed
    engine: Engine = Local(),  # noqa: B008
    threads: Side = 1,
    allow_few_seeds: bool = False,
    allow_unequal: bool = False,
) -> int:
    """Train and measure every arm of a study, each once, and write the card of what came of it.

    The study is a file of axes with their levels, a design, seeds and measures. All arms are checked before the first
    begins. What is done is never run again, and what was interrupted goes on. The exit status is 0, 1 where a job
    failed, 130 or 143 where somebody ended it.

    With ``--reproduce ARM --seed N`` that arm of a card is trained and evaluated again, and every loss, the weights and
    what is accepted are compared bit by bit; the exit status is 1 where anything differs.

    Example: specdec sweep conf/study/fusion.yaml --plan_only

    Args:
        study: the study's file, or the directory of its sweep; with reproduce a card.json, or the directory that has it
        out: the sweep's directory; by default runs/studies/NAME. The same study goes on in it, with arms added too. A
            reproduction's must be new
        plan_only: check everything, print what each arm changes and what is done, run nothing
        card_only: write the card of what is there, run nothing
        reproduce: name of an arm of the card
        seed: of the arm that is reproduced, 0 if not given
        only: run the arms of these names alone
        engine: where jobs run: Local (this machine), Ray or Slurm
        threads: CPU threads of a job
        allow_few_seeds: fewer than three seeds, too few to tell an effect from chance
        allow_unequal: arms of other token budgets than the baseline's

    Raises:
        ValueError: the study is wrong; nothing has begun then, and the message has the arm's name.
    """
    if reproduce is not None:
        recorded = recorded_run(study, reproduce, seed or 0)
        directory = out or new_run("reproduce")
        with claimed(directory):
            status, _ = run(
                directory, jobs_again(recorded, directory), engine, f"{reproduce} again"
            )
            return status or compare_again(recorded, directory)
    if seed is not None:
        raise ValueError("--seed is of the arm that --reproduce names: a study lists its seeds")
    if study.is_dir():
        if card_only:
            log.info("the card is in %s", write_card(study))
            return 0
        out = out or study
        study = study / STUDY
    given = read_study(study, allow_few_seeds or card_only)
    directory = out or runs_folder() / "studies" / given.name
    claim(directory, given.name)
    if card_only:
        log.info("the card is in %s", write_card(directory))
        return 0
    plan = make_plan(given, directory, threads, allow_unequal)
    known = [arm.name for arm in plan.arms]
    if wrong := next((name for name in only if name not in known), None):
        raise ValueError(f"--only {wrong!r}: no such arm; there are: {', '.join(known)}")
    left = plan.left(only or None).values()
    if plan_only:
        plan.show([expected(directory, left, engine)])
        return 0
    for line in [*plan.summary(), expected(directory, left, engine)]:
        log.info("%s", line)
    plan.write()
    status, _ = run(directory, left, engine, f"study {given.name}")
    if status <= 1:  # it was not interrupted
        log.info("the card is in %s", write_card(directory))
    return status


def expected(study: Path, jobs: Collection[Job], engine: Engine) -> str:
    """How long the jobs that are not done will take, by those that are: of the same arm, else of the same kind."""
    took: dict[str, list[float]] = {}
    left: list[Job] = []
    for job in jobs:
        folder = JobFolder(study, job.kind, job.key)
        seconds = sum(attempt.get("seconds", 0.0) for attempt in folder.attempts())
        if not folder.is_done():
            left.append(job)
        elif seconds > 0:
            for name in (job.kind, _arm_and_kind(job)):
                took.setdefault(name, []).append(seconds)
    if not left:
        return "nothing is left to run"
    known = [job for job in left if job.kind in took]
    unknown = Counter(job.kind for job in left if job.kind not in took)
    open_ = ", ".join(f"{count} {kind}" for kind, count in unknown.items())
    if not known:
        return f"time: not known until the first jobs are done ({open_} left)"
    work = sum(statistics.mean(took.get(_arm_and_kind(job), took[job.kind])) for job in known)
    at_once = engine.at_once(known[0])
    how = (
        "summed over jobs"
        if at_once is None
        else f"{(at_once := min(at_once, len(known)))} at a time"
    )
    more = f"; not known yet: {open_}" if unknown else ""
    time = f"time: about {duration(work / (at_once or 1))} for {how_many(len(known), 'job')} left"
    return f"{time}, {how}, as those done took{more}"


def _arm_and_kind(job: Job) -> str:
    return f"{job.label.rpartition(' seed=')[0]}: {job.kind}"


class Phase(enum.Enum):
    """The state of a job in a sweep."""

    # also while another sweep works on it, or what is left of a killed attempt lives
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    NOT_RUN = "not run"


SETTLED = (Phase.DONE, Phase.FAILED, Phase.NOT_RUN)


@dataclass
class SweepJob:
    """A job in a sweep, and its state.

    Args:
        message: why it failed or was not run, in one line.
        lost: attempts of this sweep that ended by a signal, or with their machine.
    """

    job: Job
    folder: JobFolder
    phase: Phase = Phase.WAITING
    message: str = ""
    lost: int = 0

    def settle(self, phase: Phase, message: str = "") -> None:
        """Note that it has ended, and log it."""
        self.phase = phase
        self.message = message
        log.info("%s: %s%s", self.job.label, phase.value, f": {message}" if message else "")


def run(
    study: Path, jobs: Iterable[Job], engine: Engine, title: str = "",
    watch: Callable[[Collection[SweepJob]], None] = lambda entries: None,
) -> tuple[int, dict[str, SweepJob]]:  # fmt: skip
    """Run all jobs of a study that are not done, in the order of their needs; call it in the main thread.

    What is done is never run again, what was interrupted goes on, and what failed before is tried once more. Several
    sweeps may work on one study at a time, also from several machines that share its folder. Ctrl-C and SIGTERM stop
    the workers, which save what they have; a second one does not wait for that.

    Args:
        study: its folder; ``jobs/`` is made in it.
        jobs: those that they need included; they are started in this order where several can be.
        watch: called with all jobs about every second, and when one of them has ended.

    Returns:
        The exit status (0, 1 if a job failed, 130 after Ctrl-C, 143 after SIGTERM), and the jobs by key.

    Raises:
        ValueError: the engine cannot be had, or the study cannot be written.
    """
    entries = {job.key: SweepJob(job, JobFolder(study, job.kind, job.key)) for job in jobs}
    for entry in entries.values():
        entry.phase = Phase.DONE if entry.folder.is_done() else Phase.WAITING
    settled = sum(entry.phase is Phase.DONE for entry in entries.values())
    with (
        stop_on_signals(patience=1) as signals,
        progress(title, "job", len(entries), settled) as advance,
    ):
        try:
            engine.open(study)
            try:
                while True:
                    _start(entries, engine)
                    watch(entries.values())
                    before = settled
                    settled = sum(entry.phase in SETTLED for entry in entries.values())
                    advance(settled - before)
                    if settled == len(entries):
                        break
                    if settled > before:
                        log.info(
                            "%s", expected(study, [entry.job for entry in entries.values()], engine)
                        )
                    if signals:
                        log.warning(
                            "stopping: what runs saves and ends; once more does not wait for it"
                        )
                        break
                    for key, ended in engine.ended(POLL).items():
                        _after(entries[key], ended)
            finally:
                engine.close()
        except StopRequested:
            pass
        except SystemError as error:  # Ray makes this of it
            if not isinstance(error.__cause__, StopRequested):
                raise
    failed = any(entry.phase in (Phase.FAILED, Phase.NOT_RUN) for entry in entries.values())
    return 128 + signals[0] if signals else int(failed), entries


def _start(entries: Mapping[str, SweepJob], engine: Engine) -> None:
    """Start the jobs whose needs are done, and settle those whose needs have failed."""
    for entry in (each for each in entries.values() if each.phase is Phase.WAITING):
        needs = [entries[need] for need in entry.job.needs]
        if bad := next(
            (need for need in needs if need.phase in (Phase.FAILED, Phase.NOT_RUN)), None
        ):
            why = (
                f"needs {bad.job.label}, which failed" if bad.phase is Phase.FAILED else bad.message
            )
            entry.settle(Phase.NOT_RUN, why)
        elif all(need.phase is Phase.DONE for need in needs):
            if entry.folder.is_done():
                entry.settle(Phase.DONE)
            elif not entry.folder.is_held() and engine.has_room(entry.job):
                entry.phase = Phase.RUNNING
                log.info("%s: begins", entry.job.label)
                engine.running[entry.job.key] = engine.submit(entry.job)


def _after(entry: SweepJob, ended: Ended) -> None:
    """Settle a job by how its worker ended, or let it wait for another attempt."""
    entry.phase = Phase.WAITING
    if ended.end == "done":
        entry.settle(Phase.DONE)
    elif ended.end == "failed":
        entry.settle(Phase.FAILED, ended.message or "")
    elif ended.end != "busy":
        entry.lost += 1
        if entry.lost > RETRIES:
            entry.settle(Phase.FAILED, f"{ended.message}, {entry.lost} times in this sweep")
        else:
            log.warning("%s: %s; it is started again", entry.job.label, ended.message)
