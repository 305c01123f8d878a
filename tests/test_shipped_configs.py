"""Every experiment in `configs/` parses, plans, and builds its state for every depth, with nothing allocated.

A config whose `get_config` takes an argument lists its values in a module-level tuple `VARIANTS`.
"""

import functools
import importlib
import inspect
import pathlib

import jax
import pytest

from depthgrow_jax.config import parse
from depthgrow_jax.experiment import plan_experiment, plan_of
from depthgrow_jax.train.optimizer import make_optimizer
from depthgrow_jax.train.state import abstract_state

ROOT = pathlib.Path(__file__).resolve().parents[1]


def shipped() -> list[tuple[str, str | None]]:
    found = []
    for path in sorted((ROOT / "configs").glob("*.py")):
        # Tested elsewhere: configs of other commands, and those that need a pretrained model.
        if path.stem in ("__init__", "probe", "eval", "grow_pretrained", "finetune_primitives"):
            continue
        module = importlib.import_module(f"configs.{path.stem}")
        takes_one = bool(inspect.signature(module.get_config).parameters)
        assert takes_one == hasattr(module, "VARIANTS"), path
        found += [(path.stem, variant) for variant in (module.VARIANTS if takes_one else (None,))]
    return found


@functools.cache
def state_of(model, optimizer, depth, ema):
    """The same for many arms."""
    return abstract_state(model, make_optimizer(optimizer), depth, ema=ema)


@pytest.mark.parametrize(("name", "variant"), shipped())
def test_parses_plans_and_builds_its_state(name, variant):
    module = importlib.import_module(f"configs.{name}")
    config = module.get_config() if variant is None else module.get_config(variant)
    experiment = parse(config)
    assert "launch.py" in module.__doc__
    for cfg in experiment.runs.values():
        plan = plan_of(cfg)
        assert plan["stages"][-1]["depth"] == cfg.depth and plan["stages"][-1]["last_step"] == cfg.train.steps
        for row in plan["stages"]:
            state = state_of(cfg.model, cfg.optimizer, row["depth"], cfg.train.ema_decay > 0)
            stacked = jax.tree.leaves(state.params["layers"])
            assert {leaf.shape[0] for leaf in stacked} == {row["depth"]}
            assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == row["params"]
    assert "saving" in plan_experiment(experiment)


def test_there_are_configs():
    assert {name for name, _ in shipped()} >= {"smoke", "quickstart"}
