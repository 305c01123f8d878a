"""What a stage costs: FLOPs and memory by formula, before anything runs.

XLA's own count is no help for a scanned model: it counts the body of the scan once. The tests hold
these formulas against its count of an unrolled lowering.
"""

import math

import jax

from depthgrow_jax.model import ModelConfig, abstract_params


def layer_matmul_weights(cfg: ModelConfig) -> int:
    """Weights of one layer that take part in matmuls (biases and norms excluded).

    2 d N H + 2 d K H + (3 or 2) d F; with N H = d it is the paper's 2 d^2 + 2 d K H + 3 d F.
    """
    heads = 2 * cfg.width * cfg.head_width * (cfg.heads + cfg.num_kv_heads)
    return heads + (3 if cfg.mlp == "swiglu" else 2) * cfg.width * cfg.mlp_dim


def flops_per_token(cfg: ModelConfig, depth: int, sequence_length: int) -> int:
    """Training FLOPs (forward and backward) of one token.

    6 * (depth * (P_layer + 2 S N H) + V d): six per matmul weight, scores and mixing counted over all S
    positions, causal or not, as in Kapl et al. 2025, Table 7 (whose four numbers the formula gives).
    Left out: norms, softmax, activations, rotary embedding, loss and optimizer.
    """
    attention = 2 * sequence_length * cfg.heads * cfg.head_width
    return 6 * (depth * (layer_matmul_weights(cfg) + attention) + cfg.vocab_size * cfg.width)


def activation_bytes(cfg: ModelConfig, depth: int, batch: int, sequence_length: int) -> int:
    """Estimated bytes that a training step holds besides state and gradients.

    Per token, one layer's backward pass without rematerialisation needs about 6 streams of width D, 4 of
    N H + K H, 4 (`gelu`: 3) of F, and the attention weights twice (N S). Kept for every layer: all of that;
    with `remat` `full` only the stream that enters the layer; with `dots` the results of its projections too.
    One more layer's worth is held while that layer is differentiated. The head holds logits and their
    gradient. The tests hold this within a factor of 1.5 of XLA's buffers on CPU, in float32.
    """
    size = 2 if cfg.dtype == "bfloat16" else 4
    query, key = cfg.heads * cfg.head_width, cfg.num_kv_heads * cfg.head_width
    inner = 6 * cfg.width + 4 * (query + key) + (4 if cfg.mlp == "swiglu" else 3) * cfg.mlp_dim
    layer = size * inner + 8 * cfg.heads * sequence_length
    projections = query + 2 * key + cfg.width + (2 if cfg.mlp == "swiglu" else 1) * cfg.mlp_dim
    kept = {"none": layer, "full": size * cfg.width, "dots": size * (cfg.width + projections)}[cfg.remat]
    stack = depth * kept + layer
    head = 8 * cfg.vocab_size
    return batch * sequence_length * (stack + head)


def tree_bytes(tree) -> int:
    """Bytes of the arrays (or abstract arrays) of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def param_bytes(cfg: ModelConfig, depth: int) -> int:
    """Bytes of the parameters; their gradients take as much again."""
    return tree_bytes(abstract_params(cfg, depth))
