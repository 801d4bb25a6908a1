import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from specdec.utils.signals import StopRequested, stop_on_signals


@pytest.fixture(autouse=True)
def default_sighup() -> Iterator[None]:
    """SIGHUP ends a process in these tests, also where pytest was started with it ignored, as by nohup."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, inherited)


def test_the_first_signal_is_noted_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals(patience=1) as signals:
        assert not signals
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals == [signal.SIGTERM]
        with pytest.raises(StopRequested) as found:
            os.kill(os.getpid(), signal.SIGINT)
    assert found.value.status == 143 and signal.getsignal(signal.SIGTERM) is before


def test_a_signal_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(StopRequested) as found, stop_on_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert found.value.status == 130 and signal.getsignal(signal.SIGINT) is before


def test_a_terminal_that_closes_ends_the_work_unless_it_was_to_be_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(StopRequested) as found, stop_on_signals(ctrl_c=False):
        os.kill(os.getpid(), signal.SIGHUP)
    assert found.value.status == 129 and signal.getsignal(signal.SIGHUP) is before
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with stop_on_signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not signals and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_who_handles_sigterm_is_told_of_sighup_too() -> None:
    told, before = list[int](), signal.getsignal(signal.SIGTERM)
    with stop_on_signals(ctrl_c=False) as signals:
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        os.kill(os.getpid(), signal.SIGHUP)
    assert told == [signal.SIGTERM] and signals == [signal.SIGHUP]
    assert signal.getsignal(signal.SIGTERM) is before


def test_beside_the_main_thread_nothing_is_handled() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), list[object]()

    def enter() -> None:
        with stop_on_signals() as signals:
            seen.append(signals)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [[]] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_ends_as_it_would_have() -> None:
    with stop_on_signals():
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
