import os
import signal

import pytest

from specdec.utils.signals import StopRequested, stop_on_signals


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
