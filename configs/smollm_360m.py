"""The 360M model of Kapl et al. 2025 (arXiv 2512.08819, appendix A), to the letter where it is stated.

    python launch.py plan  --config=configs/smollm_360m.py:lidas
    python launch.py train --config=configs/smollm_360m.py:lidas --workdir=DIR

32 layers, width 960, 15 query and 5 key/value heads, MLP 2560, vocabulary 49,152 (cosmo2), tied
embeddings, context 2048, 200,000 steps of 2^20 tokens; growth in blocks of 4 by PROP-1 over the first
170,000 steps. The grown arms use exactly the hyper-parameters of the static one. Not stated in the paper,
and therefore our choice: Adam's moments and epsilon, the initialisation (0.02), bfloat16 compute.

Cost, by `plan`: static 613,527 PFLOPs, grown 476,148. The paper's machine for the static run: 64
A100-40GB, 1.5 days.

The corpora (written by `datasets.save_to_disk`) and `cosmo2/tokenizer.json` are looked for below
`$DEPTHGROW_DATA`. A run reads its documents into memory once, so at this scale give every component its
`max_bytes`, or a machine that holds them.
"""

from depthgrow_jax.config import base_config

VARIANTS = ("static", "midas", "lidas", "midas_plus", "lns", "lns_midas", "lns_lidas")

# SmolLM-Corpus v1 (share of the training sequences, directory).
MIXTURE = {
    "fineweb_edu": (0.70, "fineweb-edu-dedup"),
    "cosmopedia": (0.15, "cosmopedia-v2"),
    "python_edu": (0.09, "python-edu"),
    "open_web_math": (0.06, "open-web-math"),
}


def paper_recipe(preset: str, variant: str, *, learning_rate: float, batch_size: int):
    """The recipe that both sizes share. Raises `ValueError` for an unknown variant."""
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r}: must be one of {', '.join(VARIANTS)}")
    config = base_config(preset)
    config.name = f"{preset}_{variant}"
    config.model.update(dtype="bfloat16", remat="full", rope_theta=10000.0)
    config.data.tokenizer = "cosmo2/tokenizer.json"
    config.data.validation_fraction = 0.001
    with config.unlocked():
        config.data.mixture = {
            name: {"source": "hf", "path": path, "weight": weight} for name, (weight, path) in MIXTURE.items()
        }
    config.train.update(
        steps=200_000,
        batch_size=batch_size,
        sequence_length=2048,
        log_every=50,
        eval_every=2000,
        eval_batches=16,
    )
    config.optimizer.update(
        name="adamw",
        learning_rate=learning_rate,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule="wsd",
        warmup_steps=2000,
        decay_steps=30_000,
    )
    config.checkpoint.every = 2000

    if variant.startswith("lns"):
        config.model.norm_placement = "pre_lns"
    operator = next((name for name in ("midas", "lidas") if name in variant), "none")
    config.growth.update(operator=operator, block_size=4, schedule="prop", alpha=1.0, steps=170_000)
    if variant == "midas_plus":
        # Not of the paper: new layers fade in over as many steps as the warm-up (docs/method.md).
        config.growth.update(gate="linear", gate_start=0.0, gate_steps=2000)
    return config


def get_config(variant: str = "lidas"):
    return paper_recipe("smollm_360m", variant, learning_rate=3e-3, batch_size=512)
