"""A stand-in for the optional package reasoning-gym: what it does, without its sixty packages."""

import sys
import types

import pytest


class Sums:
    """Item i of seed s is drawn from s + i, as in reasoning-gym."""

    def __init__(self, name, size, seed):
        if name not in ("sums", "few", "empty"):
            raise ValueError(f"Dataset '{name}' not registered")
        self.name, self.size, self.seed = name, size, seed
        self.different = 20 if name == "few" else 10**12

    def __iter__(self):
        for index in range(self.size):
            a = (self.seed + index) % self.different
            answer = None if self.name == "empty" else str(a + 1)
            yield {"question": f" {a} + 1 = ?\n", "answer": answer, "metadata": {}}


@pytest.fixture
def gym(monkeypatch):
    """`import reasoning_gym` finds the generators `sums`, `few` (twenty) and `empty` (no answers)."""
    module = types.ModuleType("reasoning_gym")
    registered = types.SimpleNamespace(DATASETS={"sums": None, "few": None, "empty": None})
    module.__dict__.update(create_dataset=Sums, factory=registered)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
