"""Variable assignment as training text: a static network, and one grown by LIDAS (here the same as MIDAS).

    python launch.py train --config=configs/primitives.py --workdir=runs/primitives

4 layers in blocks of 2, width 128. Four fifths of the text are documents that ask twenty questions about the
same five variables, the rest six solved examples, as an evaluation with five shots shows. To look a variable
up takes two heads that work together, and is learned late and at once: with an answer in every nine tokens
after 6 to 9 million tokens, which one is chance. After 16 million, twenty minutes an arm on one core, both
arms answer; docs/evals.md has what was tried besides.
"""

from depthgrow_jax.config import base_config

# Share of the sequences, examples of a document, questions about each, bytes: more than the run reads.
MIXTURE = {"looked_up": (0.8, 1, 20, 32_000_000), "as_asked": (0.2, 6, 1, 8_000_000)}


def get_config():
    config = base_config()
    config.name = "primitives"
    config.depth = 4
    config.model.update(vocab_size=384, width=128, heads=4, mlp_dim=384, init_std=0.05)
    config.growth.update(block_size=2, schedule="prop", alpha=1.0, steps=6000)
    config.data.update(tokenizer="bpe")
    with config.unlocked():
        config.data.mixture = {
            name: {
                "source": "primitives",
                "name": "assign_basic_0",
                "weight": weight,
                "examples": examples,
                "questions": questions,
                "max_bytes": size,
            }
            for name, (weight, examples, questions, size) in MIXTURE.items()
        }
    config.optimizer.update(learning_rate=1e-3, b2=0.98, warmup_steps=50, decay_steps=2000, schedule="wsd")
    config.train.update(
        steps=8000, batch_size=8, sequence_length=256, log_every=50, eval_every=500, eval_batches=4
    )
    config.checkpoint.every = 2000
    config.arms = {
        "static": {"growth": {"operator": "none"}},
        "lidas": {"growth": {"operator": "lidas"}},
    }
    return config
