"""Variable assignment as training text: static, MIDAS and LIDAS to the same depth.

    python launch.py train --config=configs/primitives.py --workdir=runs/primitives

6 layers in blocks of 2, width 128, bytes. A document is six solved examples, five of them for an evaluation's
shots: at most 370 bytes at depth 0, 490 at depth 1, so that a sequence of 512 holds what an evaluation shows.
"""

from depthgrow_jax.config import base_config

# Share of the training sequences, and bytes: more of either than the run reads.
MIXTURE = {"assign_basic_0": (0.8, 4_000_000), "assign_basic_1": (0.2, 1_000_000)}


def get_config():
    config = base_config()
    config.name = "primitives"
    config.depth = 6
    config.model.update(vocab_size=258, width=128, heads=4, mlp_dim=384)
    config.growth.update(block_size=2, schedule="prop", alpha=1.0, steps=850)
    config.data.update(tokenizer="bytes")
    with config.unlocked():
        config.data.mixture = {
            name: {"source": "primitives", "name": name, "weight": weight, "max_bytes": size}
            for name, (weight, size) in MIXTURE.items()
        }
    config.optimizer.update(learning_rate=3e-3, warmup_steps=50, decay_steps=150, schedule="wsd")
    config.train.update(
        steps=1000, batch_size=8, sequence_length=512, log_every=10, eval_every=100, eval_batches=4
    )
    config.checkpoint.every = 250
    config.arms = {
        "static": {"growth": {"operator": "none"}},
        "midas": {"growth": {"operator": "midas"}},
        "lidas": {"growth": {"operator": "lidas"}},
    }
    return config
