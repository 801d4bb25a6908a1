import os
import signal

import pytest

from specdec.utils.signals import Asked, asked_to_end, noted


def test_the_first_signal_is_noted_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with noted() as note:
        assert note.number is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert note.number == signal.SIGTERM
        with pytest.raises(Asked) as found:
            os.kill(os.getpid(), signal.SIGINT)
    assert found.value.status == 143 and signal.getsignal(signal.SIGTERM) is before


def test_a_signal_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Asked) as found, asked_to_end():
        os.kill(os.getpid(), signal.SIGINT)
    assert found.value.status == 130 and signal.getsignal(signal.SIGINT) is before
