"""A tiny trained run for the tests of what reads runs; trained once in a session."""

import functools
import json
import pathlib
import runpy

from toys import write_config

from depthgrow_jax.config import parse
from depthgrow_jax.experiment import train_experiment

# 1 -> 2 layers after 2 of 6 steps, behind a gate that opens over 4 steps: it is half open at step 4.
GROWN = """config.train.update(steps=6, sequence_length=16, eval_every=2, eval_batches=2)
    config.growth.update(operator="midas", schedule="explicit", boundaries=(2,), gate="linear", gate_steps=4)
    config.checkpoint.keep = 9"""
MASKED = """config.train.update(steps=2, sequence_length=16, objective="masked", mask_rate=0.3)
    config.model.causal = False"""


@functools.cache
def trained(root: pathlib.Path, more: str = GROWN) -> pathlib.Path:
    """The directory of a run of 2 layers, trained on text below `root`."""
    place = root / f"run{abs(hash(more)) % 10**6}"
    (place / "texts").mkdir(parents=True)
    for number in range(20):
        (place / "texts" / f"{number:02d}.txt").write_text(f"text number {number} " * 20)
    write_config(place, more)
    config = runpy.run_path(str(place / "run.py"))["get_config"]()
    assert train_experiment(parse(config), str(place / "out")) == 0
    return place / "out"


def write_jsonl(path: pathlib.Path, records: list) -> pathlib.Path:
    """One record a line; text goes in as it is."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path
