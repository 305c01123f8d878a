"""Tiny corpora with contents that tests can compute by hand."""

import hashlib
import json

import pytest

from depthgrow_jax.data import DataConfig
from depthgrow_jax.errors import UserError


@pytest.fixture
def fails():
    """Calls a function that must raise `UserError`; returns its message, which must be one line."""

    def call(function, *args, **kwargs) -> str:
        with pytest.raises(UserError) as caught:
            function(*args, **kwargs)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return call


@pytest.fixture
def write_jsonl(tmp_path):
    """Writes texts as `{"text": ...}` lines; returns the path."""

    def write(name: str, texts) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def files_config(tmp_path, write_jsonl):
    """A config of one `.jsonl` with the given texts, byte tokens and a cache below `tmp_path`."""

    def build(texts, **changes) -> DataConfig:
        fields = {
            "source": "files",
            "path": write_jsonl("corpus.jsonl", texts),
            "tokenizer": "bytes",
            "validation_fraction": 0.2,
            "cache_dir": str(tmp_path / "cache"),
        }
        return DataConfig(**(fields | changes))

    return build


def position(text: str) -> float:
    """Where a document's hash lies in [0, 1): below `validation_fraction` it is held out."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256


@pytest.fixture
def landing():
    """Extends a text until its hash lies in [low, high)."""

    def extend(text: str, low: float, high: float) -> str:
        return next(t for t in (f"{text} {i}" for i in range(10_000)) if low <= position(t) < high)

    return extend


@pytest.fixture
def is_held_out():
    """Says whether a text's hash lies below a fraction."""
    return lambda text, fraction: position(text) < fraction
