"""Probes of a trained run; `preset` fixes the conventions of a reference.

    python launch.py probe --run=runs/quickstart/static/seed0
    python launch.py probe --run=... --preset=csordas --config.probe.prompts.path=gsm8k/test.jsonl
    python launch.py probe --run=... --probes=geometry,ablation --config.probe.prompts.examples=64

`--preset=P` is `--config=configs/probe.py:P`. Fields: depthgrow_jax/probes/config.py.
"""

from depthgrow_jax.probe_plan import base_config
from depthgrow_jax.probes.config import PRESETS

VARIANTS = tuple(PRESETS)


def get_config(preset: str = "default"):
    return base_config(preset)
