"""What a person sees while a run trains: a bar on a terminal, lines elsewhere."""

import sys
import time

from tqdm import tqdm


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Progress:
    """Progress of one run. On anything but a terminal it prints a line at most every `interval` seconds."""

    def __init__(
        self, label: str, total_steps: int, *, stream=None, interval: float = 10.0, silent: bool = False
    ):
        """Opens the display; `silent` shows nothing (all processes but the first)."""
        self._stream = stream or sys.stderr
        self._label, self._total, self._interval, self._silent = label, total_steps, interval, silent
        self._last = -float("inf")
        self._bar = None
        if self._stream.isatty() and not silent:
            self._bar = tqdm(
                total=total_steps,
                file=self._stream,
                bar_format="{desc} |{bar}|",
                dynamic_ncols=True,
            )
            self._bar.set_description_str(label)

    def update(
        self, step: int, *, stage: str, depth: int, loss: float, tokens_per_second: float, seconds_left: float
    ) -> None:
        """Shows the state after `step` steps."""
        text = (
            f"step {step}/{self._total} loss {loss:.4f} ETA {_duration(seconds_left)} "
            f"{tokens_per_second:,.0f} tokens/s stage {stage} depth {depth}"
        )
        if self._bar is not None:
            self._bar.n = step
            # The text first: a narrow terminal cuts the bar, not the numbers.
            self._bar.set_description_str(f"{self._label}: {text}")
        elif time.monotonic() - self._last >= self._interval or step == self._total:
            self._last = time.monotonic()
            self.line(text)

    def line(self, text: str) -> None:
        """Prints a line of its own."""
        if self._silent:
            return
        if self._bar is not None:
            self._bar.write(f"{self._label}: {text}", file=self._stream)
        else:
            print(f"{self._label}: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.close()
