"""What a person sees: a bar with step, stage, depth, loss, tokens/s, ETA on a terminal; lines elsewhere."""

import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest
from toys import EVERYTHING, merged, tiny_config, tiny_run

from depthgrow_jax.train.progress import Progress

STATE = {"stage": "2/3", "depth": 16, "loss": 3.14159, "tokens_per_second": 12345.6, "seconds_left": 3725.0}
WANTED = "step 40/80 loss 3.1416 ETA 1:02:05 12,346 tokens/s stage 2/3 depth 16"


@pytest.fixture
def terminal():
    """(stream that is a terminal, function that reads what it was sent)."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 110, 0, 0))
    stream = os.fdopen(child, "w")

    def read() -> str:
        stream.flush()
        os.set_blocking(parent, False)
        pieces = []
        while True:
            try:
                piece = os.read(parent, 65536)
            except (BlockingIOError, OSError):
                break
            if not piece:
                break
            pieces.append(piece)
        return b"".join(pieces).decode()

    yield stream, read
    stream.close()
    os.close(parent)


def test_bar_on_a_terminal(terminal):
    stream, read = terminal
    progress = Progress("midas", 80, stream=stream)
    progress.update(40, **STATE)
    progress.line("grows to depth 18 after step 41")
    progress.close()
    shown = read()
    assert re.search(re.escape(f"midas: {WANTED} |") + "█+", shown)
    assert "\r" in shown and "midas: grows to depth 18 after step 41" in shown


def test_lines_elsewhere():
    stream = io.StringIO()
    progress = Progress("midas", 80, stream=stream, interval=0.0)
    progress.update(40, **STATE)
    progress.line("validation loss 3.0")
    progress.close()
    assert stream.getvalue() == f"midas: {WANTED}\nmidas: validation loss 3.0\n"


def test_lines_are_few_and_the_last_step_is_one():
    stream = io.StringIO()
    progress = Progress("midas", 80, stream=stream, interval=1e9)
    for step in (38, 39, 40, 80):
        progress.update(step, **STATE)
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["38/80", "80/80"]


def test_silent_processes_show_nothing(terminal):
    stream, read = terminal
    progress = Progress("midas", 80, stream=stream, silent=True)
    progress.update(40, **STATE)
    progress.line("anything")
    progress.close()
    assert read() == ""


def test_a_run_reports_its_stages_and_growth(tmp_path, capsys):
    tiny_run(tmp_path / "run", tiny_config(**merged(EVERYTHING, {"train": {"log_every": 1}}))).train()
    shown = capsys.readouterr().err
    assert re.search(r"tiny: step 12/12 loss \d\.\d{4} ETA 0:00 [\d,]+ tokens/s stage 3/3 depth 3\n", shown)
    assert "tiny: grows to depth 2 after step 4\n" in shown and "tiny: grows to depth 3 after step 8" in shown
    assert re.search(r"tiny: step 6 validation loss \d\.\d{4}\n", shown)
