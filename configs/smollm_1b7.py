"""The 1.7B model of Kapl et al. 2025 (arXiv 2512.08819, appendix A), to the letter where it is stated.

    python launch.py plan --config=configs/smollm_1b7.py:lidas

24 layers, width 2048, 32 heads, MLP 8192, 200,000 steps of 2^21 tokens; the rest as in `smollm_360m.py`.
Cost, by `plan`: static 4,813,222 PFLOPs, grown 3,736,608. The paper's machine for the static run: 128
A100-40GB, 4.5 days; parameters and optimizer state want `--config.mesh.fsdp=8` or more.
"""

from configs.smollm_360m import VARIANTS, paper_recipe

__all__ = ["VARIANTS", "get_config"]


def get_config(variant: str = "lidas"):
    return paper_recipe("smollm_1b7", variant, learning_rate=5e-4, batch_size=1024)
