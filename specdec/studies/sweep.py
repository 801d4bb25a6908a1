"""``specdec sweep``: every arm of a study trained and measured, each once, and the results card.

The loop starts each job once what it needs is done, until all are done or cannot be.
"""

import enum
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specdec.studies.card import write_card
from specdec.studies.jobs import STUDY, StudyPlan, claim, make_plan
from specdec.studies.reproduce import compare_again, jobs_again, recorded_run
from specdec.studies.schedulers import RETRIES, Engine, Local
from specdec.studies.study import Study
from specdec.studies.study_file import read_study
from specdec.studies.sweep_progress import SweepProgress
from specdec.studies.worker import LOG, Job, JobFolder, JobResult
from specdec.utils.config import new_run, runs_folder
from specdec.utils.files import claimed
from specdec.utils.numbers import Seed, Side
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
    """Train and measure every arm of a study, each once, and write the results card.

    The study is a file of axes with their levels, a design, seeds and measures. All arms are checked before the first
    begins. Completed jobs never run again, and interrupted ones resume. The exit status is 0, 1 where a job
    failed, 130 or 143 where somebody ended it.

    With ``--reproduce ARM --seed N`` that arm of a card is trained and evaluated again, and every loss, the weights and
    what is accepted are compared bit by bit; the exit status is 1 where anything differs.

    Example: specdec sweep conf/study/fusion.yaml --plan_only

    Args:
        study: the study's file, or the directory of its sweep; with reproduce a card.json, or the directory that has it
        out: the sweep's directory; by default runs/studies/NAME. The same study resumes in it, with arms added too. A
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
        return _reproduce(study, reproduce, seed or 0, out, engine)
    if seed is not None:
        raise ValueError("--seed is of the arm that --reproduce names: a study lists its seeds")
    if card_only and study.is_dir():
        return _finish(study)
    declared, directory = _located(study, out, allow_few_seeds or card_only)
    if card_only:
        return _finish(directory)
    plan = make_plan(declared, directory, threads, allow_unequal)
    jobs = _jobs_left(plan, only)
    if plan_only:
        plan.show([expected(directory, jobs, engine)])
        return 0
    return _run_plan(plan, jobs, engine)


def _reproduce(card: Path, arm: str, seed: int, out: Path | None, engine: Engine) -> int:
    """Train and evaluate an arm of a card again, and compare; return the exit status."""
    recorded = recorded_run(card, arm, seed)
    directory = out or new_run("reproduce")
    with claimed(directory):
        status, _ = run_jobs(directory, jobs_again(recorded, directory), engine, f"{arm} again")
        return status or compare_again(recorded, directory)


def _finish(directory: Path) -> int:
    """Write the card of what there is; return the exit status."""
    log.info("the card is in %s", write_card(directory))
    return 0


def _located(study: Path, out: Path | None, allow_few_seeds: bool) -> tuple[Study, Path]:
    """Read a study, from its file or its sweep's directory, and claim the directory of the sweep."""
    path = study
    if study.is_dir():
        path = study / STUDY
        out = out or study
    declared = read_study(path, allow_few_seeds)
    directory = out or runs_folder() / "studies" / declared.name
    claim(directory, declared.name)
    return declared, directory


def _jobs_left(plan: StudyPlan, only: Sequence[str]) -> Collection[Job]:
    """Return the jobs of all arms, or of some; ValueError for a name that no arm has."""
    names = [arm.name for arm in plan.arms]
    for name in only:
        if name not in names:
            raise ValueError(f"--only {name!r}: no such arm; there are: {', '.join(names)}")
    return plan.left(only or None).values()


def _run_plan(plan: StudyPlan, jobs: Collection[Job], engine: Engine) -> int:
    """Run the jobs of a plan and write the card, unless somebody ended the sweep; return the exit status."""
    directory = plan.directory
    for line in [*plan.summary(), expected(directory, jobs, engine)]:
        log.info("%s", line)
    plan.write()
    status, _ = run_jobs(directory, jobs, engine, f"study {plan.study.name}")
    if status <= 1:  # it was not interrupted
        _finish(directory)
    return status


def expected(study: Path, jobs: Collection[Job], engine: Engine) -> str:
    """Say how long the jobs that are not done will take, going by those that are: of the same arm, else of one kind."""
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
    unknown_kinds = Counter(job.kind for job in left if job.kind not in took)
    unknown = ", ".join(f"{count} {kind}" for kind, count in unknown_kinds.items())
    if not known:
        return f"time: not known until the first jobs are done ({unknown} left)"
    seconds = sum(statistics.mean(took.get(_arm_and_kind(job), took[job.kind])) for job in known)
    how = "summed over jobs"
    if (at_once := engine.at_once(known[0])) is not None:
        at_once = min(at_once, len(known))
        seconds /= at_once or 1
        how = f"{at_once} at a time"
    time = f"time: about {duration(seconds)} for {how_many(len(known), 'job')} left"
    not_known = f"; not known yet: {unknown}" if unknown else ""
    return f"{time}, {how}, as those done took{not_known}"


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


def run_jobs(
    study: Path, jobs: Iterable[Job], engine: Engine, title: str = "",
    watch: Callable[[Collection[SweepJob]], None] = lambda entries: None,
) -> tuple[int, dict[str, SweepJob]]:  # fmt: skip
    """Run all jobs of a study that are not done, in the order of their needs; call it in the main thread.

    Completed jobs never run again, interrupted ones resume, and failed ones are tried once more. Several
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
    settled = sum(entry.phase in SETTLED for entry in entries.values())
    left = expected(study, [entry.job for entry in entries.values()], engine)
    console = Console(stderr=True)
    with stop_on_signals(patience=1) as signals, SweepProgress(console) as shown:
        try:
            engine.open(study)
            try:
                for done in _settled(entries, engine, watch):
                    if settled < done < len(entries):
                        left = expected(study, [entry.job for entry in entries.values()], engine)
                        log.info("%s", left)
                    settled = done
                    headline = f"{title}: {done} of {how_many(len(entries), 'job')} done; {left}"
                    shown.show(headline, _running_logs(entries))
                    if signals and done < len(entries):
                        log.warning(
                            "stopping: what runs saves and ends; once more does not wait for it"
                        )
                        break
            finally:
                engine.close()
        except StopRequested:
            pass
        except SystemError as error:  # Ray makes this of it
            if not isinstance(error.__cause__, StopRequested):
                raise
    if signals:
        return 128 + signals[0], entries
    failed = any(entry.phase in (Phase.FAILED, Phase.NOT_RUN) for entry in entries.values())
    return int(failed), entries


def _running_logs(entries: Mapping[str, SweepJob]) -> dict[str, Path]:
    """Return the log files of the jobs that this sweep runs, by label."""
    return {
        entry.job.label: entry.folder.path / LOG
        for entry in entries.values()
        if entry.phase is Phase.RUNNING
    }


def _settled(
    entries: Mapping[str, SweepJob], engine: Engine, watch: Callable[[Collection[SweepJob]], None]
) -> Iterator[int]:
    """Start jobs and wait for workers, and yield how many jobs are settled, until all are."""
    settled = -1
    while settled < len(entries):
        _start(entries, engine)
        watch(entries.values())
        settled = sum(entry.phase in SETTLED for entry in entries.values())
        yield settled
        if settled < len(entries):
            for key, result in engine.ended(POLL).items():
                _after(entries[key], result)


def _start(entries: Mapping[str, SweepJob], engine: Engine) -> None:
    """Start the jobs whose needs are done, and settle those whose needs have failed."""
    for entry in entries.values():
        if entry.phase is not Phase.WAITING:
            continue
        needs = [entries[key] for key in entry.job.needs]
        lost = [need for need in needs if need.phase in (Phase.FAILED, Phase.NOT_RUN)]
        if lost:
            why = lost[0].message
            if lost[0].phase is Phase.FAILED:
                why = f"needs {lost[0].job.label}, which failed"
            entry.settle(Phase.NOT_RUN, why)
        elif all(need.phase is Phase.DONE for need in needs):
            if entry.folder.is_done():
                entry.settle(Phase.DONE)
            elif not entry.folder.is_held() and engine.has_room(entry.job):
                entry.phase = Phase.RUNNING
                log.info("%s: begins", entry.job.label)
                engine.running[entry.job.key] = engine.submit(entry.job)


def _after(entry: SweepJob, result: JobResult) -> None:
    """Settle a job by how its worker ended, or let it wait for another attempt."""
    entry.phase = Phase.WAITING
    if result.end == "done":
        entry.settle(Phase.DONE)
    elif result.end == "failed":
        entry.settle(Phase.FAILED, result.message or "")
    elif result.end != "busy":
        entry.lost += 1
        if entry.lost > RETRIES:
            entry.settle(Phase.FAILED, f"{result.message}, {entry.lost} times in this sweep")
        else:
            log.warning("%s: %s; it is started again", entry.job.label, result.message)
