"""Everything the quick start does, tiny: under a minute on two cores. Tests and CI use it.

python launch.py train --config=configs/smoke.py --workdir=runs/smoke
"""

from depthgrow_jax.config import base_config


def get_config():
    config = base_config()
    config.name = "smoke"
    config.depth = 6
    config.model.update(vocab_size=258, width=32, heads=2, mlp_dim=64)
    config.growth.update(block_size=2)
    config.data.update(tokenizer="bytes", max_bytes=200_000, validation_fraction=0.1)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=4, decay_steps=8)
    config.train.update(
        steps=40, batch_size=4, sequence_length=32, log_every=2, eval_every=20, eval_batches=4
    )
    config.checkpoint.every = 10
    config.arms = {
        "static": {"growth": {"operator": "none"}},
        "midas": {"growth": {"operator": "midas"}},
        "lidas": {"growth": {"operator": "lidas"}},
    }
    return config
