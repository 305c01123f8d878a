"""The quick start: static, MIDAS and LIDAS to the same depth, on the text of Python's own library.

    python launch.py train --config=configs/quickstart.py --workdir=runs/quickstart

8 layers in blocks of 2, width 128, a byte-level BPE of 2,048 tokens trained on the spot. No download. Stopped
anywhere, the same command goes on.
"""

from depthgrow_jax.config import base_config


def get_config():
    config = base_config()
    config.name = "quickstart"
    config.depth = 8
    config.model.update(vocab_size=2048, width=128, heads=4, mlp_dim=384)
    # The paper's proportions: grow during the first 85% of the steps, decay during the last 15%.
    config.growth.update(block_size=2, schedule="prop", alpha=1.0, steps=425)
    config.data.update(source="stdlib", tokenizer="bpe", validation_fraction=0.05)
    config.optimizer.update(learning_rate=4e-3, warmup_steps=20, decay_steps=75, schedule="wsd")
    config.train.update(
        steps=500, batch_size=16, sequence_length=128, log_every=5, eval_every=50, eval_batches=16
    )
    config.checkpoint.every = 50
    config.arms = {
        "static": {"growth": {"operator": "none"}},
        "midas": {"growth": {"operator": "midas"}},
        "lidas": {"growth": {"operator": "lidas"}},
    }
    return config
