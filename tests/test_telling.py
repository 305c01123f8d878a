"""How much of a long task is done: every ten seconds where there is no terminal, and of which task."""

import time

import pytest

from depthgrow_jax.evaluating import _watch
from depthgrow_jax.telling import watch


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock finds it six seconds on."""
    times = iter(range(0, 10_000, 6))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))


def test_a_line_when_ten_seconds_have_passed(clock, capsys):
    assert list(watch("reading", 5, iter("abcde"))) == list("abcde")
    # Looked at 6, 12 (a line, at 18), 24, 30 (a line, at 36), 42 seconds.
    assert capsys.readouterr().err.splitlines() == ["reading: 1/5", "reading: 3/5"]


def test_an_evaluation_names_the_task(clock, capsys):
    assert list(_watch("lambada")("scoring", 3, iter("abc"))) == list("abc")
    assert capsys.readouterr().err.splitlines() == ["lambada: scoring: 1/3"]
