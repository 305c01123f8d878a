"""A process of its own for each contender: it works when it is asked to, and answers with JSON."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any


class Contender:
    """A worker process; `arguments` are those of its command line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self) -> Any:
        """Lets it work once; what it answers."""
        assert self.process.stdin and self.process.stdout
        print("go", file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Ends the worker."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve(work: Callable[[], Any]) -> None:
    """In the worker: answers every line of stdin with what `work` returns."""
    for _ in sys.stdin:
        print(json.dumps(work()), flush=True)
