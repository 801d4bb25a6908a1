"""Training on streamed features: the numbers of training on the fly, whatever dies meanwhile.

This file is also the program of a job on two machines.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from specdec.cli import main
from specdec.data.loader import PAD_DOCUMENT
from specdec.drafter import load_drafter
from specdec.engines.extract import stored_rows
from specdec.features import OnTheFly, Streamed, streamed
from specdec.features.producers import MAX_IN_FLIGHT
from specdec.features.store import FeatureStore
from specdec.target import Target
from specdec.utils import cluster
from tests.features.made import LAYERS, Texts
from tests.features.test_source import train
from tests.short_run import short_run
from tests.tiny import tiny_target
from tests.two_processes import REPOSITORY, launch

pytestmark = pytest.mark.timeout(400)
STEPS = 60


def fit(out: Path, target: Path, text: Path, *more: str) -> list[str]:
    """The command of a run in two processes."""
    given = short_run(
        target, text, trainer__max_steps=STEPS, trainer__devices=2, trainer__strategy="ddp",
        trainer__limit_val_batches=0, trainer__log_every_n_steps=1, checkpoint__every_n_train_steps=10,
        checkpoint__save_top_k=-1, acceptance__max_new_tokens=2, acceptance__count=1, out=out,
    )  # fmt: skip
    return [sys.executable, "-m", "specdec", "fit", *given, *more]


def started(command: list[str], home: Path) -> "subprocess.Popen[str]":
    environment = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def ran(command: list[str], home: Path) -> str:
    with started(command, home) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(timeout=300) == 0, said[-3000:]
    return said


def below(parent: int) -> Iterator[tuple[int, str]]:
    """Processes that descend from one, and their commands."""
    parents, commands = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
    for pid, command in commands.items():
        above = pid
        while (above := parents.get(above, 0)) not in (0, parent):
            pass
        if above == parent:
            yield pid, command


@pytest.mark.slow
def test_losses_are_those_of_the_fly_whatever_dies(
    target_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    """Two producers and two processes of DDP; a producer, the queue and the trainer get SIGKILL."""
    fly, out = tmp_path / "fly", tmp_path / "streamed"
    ran(
        fit(
            fly, target_directory, text_file, "--model.features=OnTheFly", "--model.features.rows=1"
        ),
        tmp_path,
    )
    more = ("--model.features=Streamed", "--model.features.producers=2")
    streamed = fit(out, target_directory, text_file, *more)
    with started(streamed, tmp_path) as process:
        assert process.stderr is not None
        for victim, step in (
            ("ray::Producer", 10),
            ("ray::RowQueue", 20),
            (f"{sys.executable} -m specdec", 40),
        ):
            while (
                process.poll() is None and not (out / "checkpoints" / f"step-{step}.ckpt").exists()
            ):
                time.sleep(0.005)
            assert process.poll() is None, process.stderr.read()[-3000:]
            found = dict(below(process.pid))
            victims = [pid for pid, command in found.items() if command.startswith(victim)]
            assert victims, found
            os.kill(victims[0], signal.SIGKILL)
        process.kill()  # of two processes the first, which started the cluster
        assert process.wait(timeout=60) == -signal.SIGKILL
    until = time.monotonic() + 60
    workers = [
        pid
        for pid, command in found.items()
        if command.startswith(("ray::Producer", "ray::RowQueue"))
    ]
    # the cluster ends with its process
    while left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, [found[pid] for pid in left]
        time.sleep(0.1)
    assert not (out / "DONE.json").exists()
    said = ran([*streamed, "--ckpt_path=auto"], tmp_path)
    assert "streamed " in said
    assert (out / "losses.txt").read_text() == (fly / "losses.txt").read_text()
    assert len((out / "losses.txt").read_text().splitlines()) >= STEPS
    one, two = (load_drafter(path / "drafter").state_dict() for path in (fly, out))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_parts_of_a_target_train_on_what_is_streamed(
    target_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has no layers; the numbers are those of the whole target, and the drafter is of it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fly, one = train(target_directory, "eagle1", OnTheFly(rows=1))
    streamed, other = train(target_directory, "eagle1", Streamed(), parts=True)
    assert streamed == fly and fly[0] != fly[-1]
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.drafter.parameters(), other.drafter.parameters(), strict=True)
    )
    assert (
        other.drafter.config.target == one.drafter.config.target
        and one.drafter.config.target["fingerprint"]
    )


@pytest.mark.slow
def test_what_is_streamed_is_stored_too(
    target_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    """Training stores the rows that it draws, and specdec cache the others: the cache that it makes alone."""
    run = short_run(target_directory, text_file, trainer__max_steps=3, trainer__limit_val_batches=0,
                    trainer__log_every_n_steps=1)  # fmt: skip
    options = [
        word
        for word in run
        if "trainer" not in word and word not in ("cpu", "false", "3", "0", "1")
    ]
    tee, alone = tmp_path / "tee", tmp_path / "alone"
    streamed = ["--model.features=Streamed", f"--model.features.tee={tee}", "--acceptance.count=1"]
    assert main(["fit", *run, *streamed, f"--out={tmp_path / 'run'}"]) == 0
    assert not (tee / "index.json").exists() and (tee / "shard-00000.safetensors").exists()
    stored = (tee / "shard-00000.safetensors").stat().st_mtime_ns
    assert main(["cache", *options, f"--out={alone}"]) == 0
    assert main(["cache", *options, f"--out={tee}"]) == 0
    assert (tee / "shard-00000.safetensors").stat().st_mtime_ns == stored
    one, other = FeatureStore(tee, {}), FeatureStore(alone, {})
    assert one.contract == other.contract and one._places.keys() == other._places.keys()
    assert {place.crc32 for place in one._places.values()} == {
        place.crc32 for place in other._places.values()
    }


@pytest.mark.slow
def test_a_slow_trainer_stalls_a_producer(target: Target, target_directory: Path) -> None:
    """It has done what was asked for, a window of batches, and waits; the memory is that window's."""
    data, ahead = Texts(), 2
    data.prepare(None)
    target = Target.load(target_directory)
    source: Any = Streamed(ahead=ahead, dtype="float8_e4m3fn").open(target, data, LAYERS, False)
    data.reader = source

    def count(of: str) -> int:
        return source._ray.get(source._queue.counts.remote())[of]

    def done() -> int:
        return count("done") - 1  # one was compared with the target

    try:
        batches = iter(data.train_dataloader())
        for number in range(1, 4):
            batch = next(batches)
            window = (number + ahead) * data.batch_size
            until = time.monotonic() + 30
            while done() < window and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.5)
            assert done() == window
            assert len(source._prefetched) == 1 + ahead
            held = sum(
                column.nbytes for one in source._prefetched.values() for column in one.result()
            )
            tokens = (1 + ahead) * data.batch_size * data.seq_len
            assert held == tokens * source.contract.token_bytes
            found, own = (
                source(target, batch, LAYERS, False),
                OnTheFly(1)(target, batch, LAYERS, False),
            )
            real = batch.documents_BT >= 0
            off = (found.aux_BTNH - own.aux_BTNH)[real].norm() / own.aux_BTNH[real].norm()
            assert 0.005 < off < 0.05  # three bits
        batches.close()  # type: ignore[attr-defined]
        assert not source._prefetched
        # rows that are forgotten before a producer takes them are not made
        producers = [
            pid for pid, command in below(os.getpid()) if command.startswith("ray::Producer")
        ]
        for pid in producers:
            os.kill(pid, signal.SIGSTOP)
        begun, data.reader = done() + MAX_IN_FLIGHT, None
        few = [batch for _, batch in zip(range(4), data.train_dataloader(), strict=False)]
        for one in few:
            source.prefetch(one)
        while count("waiting") < 4 * data.batch_size - MAX_IN_FLIGHT:
            time.sleep(0.05)
        for one in few:
            source.cancel(one)
        time.sleep(1.5)  # the queue hears of it before a producer asks for more
        for pid in producers:
            os.kill(pid, signal.SIGCONT)
        time.sleep(2)
        assert count("waiting") == 0
        # the thread ends the batch that it has begun
        assert begun <= done() < begun + data.batch_size
        source.close()
        padding = batch._replace(documents_BT=torch.full_like(batch.documents_BT, PAD_DOCUMENT))
        # starts the producers anew, as where a process of several has no row
        source.prefetch(padding)
        assert source._queue is not None
        again = source(target, batch, LAYERS, False)
        assert torch.equal(again.aux_BTNH[real], found.aux_BTNH[real])
    finally:
        source.close()
    assert len([*stored_rows(data)]) > window and not source._ray.is_initialized()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"producers": 0}, "model.features.producers must be at least 1"),
        (
            {"dtype": "int8"},
            "model.features.dtype=int8: choose target or one of float64, float32, ",
        ),
        ({"vllm_args": {"a": 1}}, "model.features.vllm_args needs model.features.engine=vllm"),
        ({"gpus": 1.0}, "model.features.gpus needs model.features.address: .*ray start --head"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Streamed(**given)


@pytest.mark.slow
def test_a_tee_into_another_cache_is_refused_before_the_first_row(
    whole: Path, target_directory: Path
) -> None:
    data, before = Texts(), {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    data.prepare(None)
    with pytest.raises(ValueError, match=r"model\.features\.tee: .*whole"):
        Streamed(tee=str(whole)).open(Target.load(target_directory), data, [1, 2], False)
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before


@pytest.mark.slow
def test_a_source_that_is_refused_leaves_no_cluster(
    target_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(*_: Any) -> None:
        raise ValueError("another target")

    monkeypatch.setattr(streamed, "spot_check", other)
    # as in a container
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    data = Texts()
    data.prepare(None)
    with pytest.raises(ValueError, match="another target"):
        Streamed().open(Target.load(target_directory), data, LAYERS, False)
    assert not sys.modules["ray"].is_initialized()
    assert "/dev/shm has 67 MB free" in caplog.text and "--shm-size" in caplog.text


@pytest.mark.slow
def test_two_machines_need_a_cluster_of_their_own(tmp_path: Path) -> None:
    launch("tests.features.test_streamed", tmp_path)
    for rank in range(2):
        assert (
            "node0 and node1" in (said := (tmp_path / f"{rank}.txt").read_text())
            and "ray start --head" in said
        )


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    host = f"node{distributed.get_rank()}"
    socket.gethostname = lambda: host
    try:
        (data := Texts()).prepare(None)
        Streamed().open(tiny_target(), data, [1], False)
    except ValueError as error:
        Path(sys.argv[1], f"{distributed.get_rank()}.txt").write_text(str(error))
    distributed.destroy_process_group()
