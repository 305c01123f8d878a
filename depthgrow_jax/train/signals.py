"""Asking a run to stop: SIGTERM (a scheduler) or Ctrl-C (a person)."""

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Context manager in which SIGTERM and SIGINT only set a flag, which the loop reads between steps.

    A second signal acts as it would have without it. With several processes JAX's preemption service decides
    at which step all of them stop.
    """

    def __init__(self):
        self._asked = False
        self._previous = {}

    def __enter__(self):
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number, frame):
        self._asked = True
        os.write(2, b"\nstopping after this step; once more stops at once, without saving\n")
        self._restore()

    def _restore(self):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __exit__(self, *error):
        self._restore()

    def asked(self, step: int) -> bool:
        """Whether the run should save and stop after `step` steps; the same answer in every process."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked
