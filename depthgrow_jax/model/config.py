"""What a network is, apart from its depth.

Depth is deliberately absent: it is the length of the leading axis of `params["layers"]`, so one
`ModelConfig` describes a run's network at every stage of growth.
"""

import dataclasses
from typing import Any

from depthgrow_jax.errors import require, require_choice

NORMS = ("rms", "layer")
NORM_PLACEMENTS = ("pre", "pre_lns", "post", "sandwich")
MLPS = ("swiglu", "gelu")
RESIDUAL_SCALINGS = ("none", "depth", "learned")
ROPE_SCALINGS = ("none", "linear", "llama3")
REMATS = ("none", "full", "dots")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one layer, the embedding and the head.

    Attributes:
      vocab_size: V.
      width: D, the width of the residual stream.
      heads: N, query heads.
      kv_heads: K, key/value heads (grouped-query attention); 0 means `heads`.
      head_dim: H; 0 means `width // heads`.
      mlp_dim: F.
      mlp: `swiglu` (three matrices) or `gelu` (two).
      causal: causal attention, or bidirectional.
      norm: `rms` (RMSNorm) or `layer` (LayerNorm, with a bias).
      norm_eps: added to the variance.
      norm_placement: `pre`; `pre_lns` (LayerNorm-Scaling: the pre-norm output of layer l, counted
        from 1, times 1/sqrt(l)); `post` (norm after the residual addition); `sandwich` (norm
        before and after each sub-layer).
      residual_scaling: what multiplies every contribution to the stream: `none`; `depth`
        (1 / L**residual_exponent, CompleteP); `learned` (one scalar a layer, ReZero).
      residual_exponent: the exponent of `depth`.
      residual_init: initial value of the `learned` scalar.
      tie_embeddings: the head is the transposed embedding table.
      attention_bias, mlp_bias: biases on all projections of attention, of the MLP.
      qkv_bias: biases on the query, key and value projections alone (Qwen2).
      qk_norm: a norm over each head of queries and keys, before they are turned (Qwen3).
      rope_theta: base of the rotary frequencies.
      rope_scaling: `none`, `linear` or `llama3`; the other `rope_*` fields are its parameters.
      init_std: standard deviation of every initial matrix; 0 means 1/sqrt(fan-in).
      dtype: compute dtype. Parameters, norms, softmax and losses are float32.
      remat: recompute a layer in the backward pass: `none`, `full`, or `dots` (keep matmul results).
      scan_unroll: layers per iteration of the scan; a speed knob, the result is the same.
    """

    vocab_size: int = 4096
    width: int = 128
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 0
    mlp_dim: int = 384
    mlp: str = "swiglu"
    causal: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_placement: str = "pre"
    residual_scaling: str = "none"
    residual_exponent: float = 1.0
    residual_init: float = 0.0
    tie_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 8192
    init_std: float = 0.0
    dtype: str = "float32"
    remat: str = "none"
    scan_unroll: int = 1

    @property
    def num_kv_heads(self) -> int:
        """K with its default resolved."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """H with its default resolved."""
        return self.head_dim or self.width // self.heads


PRESETS: dict[str, tuple[int, dict[str, Any]]] = {
    "smollm_135m": (30, {"width": 576, "heads": 9, "kv_heads": 3, "mlp_dim": 1536}),
    "smollm_360m": (32, {"width": 960, "heads": 15, "kv_heads": 5, "mlp_dim": 2560}),
    "smollm_1b7": (24, {"width": 2048, "heads": 32, "kv_heads": 32, "mlp_dim": 8192}),
}


def preset(name: str, **overrides) -> tuple[int, ModelConfig]:
    """Depth and `ModelConfig` of a SmolLM size (vocabulary 49,152, tied embeddings).

    Raises `UserError` for a name that is not in `PRESETS`.
    """
    require_choice("preset", name, PRESETS)
    depth, fields = PRESETS[name]
    vocabulary: dict[str, Any] = {"vocab_size": 49152, "init_std": 0.02}
    return depth, ModelConfig(**(vocabulary | fields | overrides))


def validate(cfg: ModelConfig) -> None:
    """Refuses an impossible architecture. Raises `UserError` naming the field."""
    for field in ("vocab_size", "width", "heads", "mlp_dim", "scan_unroll", "rope_original_length"):
        require(getattr(cfg, field) >= 1, f"model.{field}", getattr(cfg, field), "must be at least 1")
    for field in ("kv_heads", "head_dim"):
        require(
            getattr(cfg, field) >= 0, f"model.{field}", getattr(cfg, field), "must be 0 (default) or more"
        )
    for field, choices in (
        ("mlp", MLPS),
        ("norm", NORMS),
        ("norm_placement", NORM_PLACEMENTS),
        ("residual_scaling", RESIDUAL_SCALINGS),
        ("rope_scaling", ROPE_SCALINGS),
        ("remat", REMATS),
        ("dtype", DTYPES),
    ):
        require_choice(f"model.{field}", getattr(cfg, field), choices)
    divisors = [k for k in range(1, cfg.heads + 1) if cfg.heads % k == 0]
    require(
        cfg.heads % cfg.num_kv_heads == 0,
        "model.kv_heads",
        cfg.kv_heads,
        f"must divide heads={cfg.heads}; legal: {divisors}",
    )
    require(
        bool(cfg.head_dim) or cfg.width % cfg.heads == 0,
        "model.heads",
        cfg.heads,
        f"must divide width={cfg.width}, or head_dim must be given",
    )
    require(
        cfg.head_width % 2 == 0,
        "model.head_dim",
        cfg.head_width,
        "must be even (rotary embedding turns pairs)",
    )
    for field in ("norm_eps", "rope_theta", "rope_factor", "rope_low_freq_factor"):
        require(getattr(cfg, field) > 0, f"model.{field}", getattr(cfg, field), "must be above 0")
    require(
        cfg.rope_high_freq_factor > cfg.rope_low_freq_factor,
        "model.rope_high_freq_factor",
        cfg.rope_high_freq_factor,
        f"must be above rope_low_freq_factor={cfg.rope_low_freq_factor}",
    )
    require(cfg.init_std >= 0, "model.init_std", cfg.init_std, "must be 0 (1/sqrt(fan-in)) or more")
