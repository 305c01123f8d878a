"""How a network uses its depth: one function per probe, one shape of answer.

A probe takes a network (`Subject`), prompts and settings, and returns a `Result`. Probes know nothing of
runs, files or plots; `depthgrow_jax/probing.py` runs them on a run's checkpoint.
"""

from depthgrow_jax.probes.blocks import border_agreement
from depthgrow_jax.probes.comparison import differences, overlay
from depthgrow_jax.probes.config import PRESETS, PROBES, ProbeConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, windows
from depthgrow_jax.probes.result import Axis, Quantity, Result, Score
from depthgrow_jax.probes.settings import Settings

__all__ = [
    "PRESETS",
    "PROBES",
    "Axis",
    "ProbeConfig",
    "Prompts",
    "Quantity",
    "Result",
    "Score",
    "Settings",
    "Subject",
    "border_agreement",
    "differences",
    "overlay",
    "windows",
]
