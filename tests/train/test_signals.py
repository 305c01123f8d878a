"""A first SIGTERM or Ctrl-C only asks; a second one, and those outside of training, act as ever."""

import os
import signal

import pytest

from depthgrow_jax.train.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_asks_second_acts(number):
    caught = []
    before = signal.signal(number, lambda *args: caught.append(args[0]))
    try:
        with StopRequest() as stop:
            assert not stop.asked(1)
            os.kill(os.getpid(), number)
            assert stop.asked(2) and stop.asked(3) and caught == []
            os.kill(os.getpid(), number)
            assert caught == [number]
        os.kill(os.getpid(), number)
        assert caught == [number, number]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)

    def fails():
        with StopRequest():
            assert signal.getsignal(signal.SIGTERM) != before
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()
    assert signal.getsignal(signal.SIGTERM) == before
