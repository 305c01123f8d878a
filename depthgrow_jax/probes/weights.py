"""Similarity of stored layers, from the parameters alone. L stored layers, G blocks, D width, r rank.

Flat cosines are what Kapl et al. (arXiv 2512.08819) plot between blocks. They are about 1/sqrt(n) for
unrelated layers of n weights and blind to permuted heads or neurons. So every number comes with what chance
would give, and beside them stand overlaps of the subspaces that layers read and write (principal angles:
Golub & Van Loan, section 6.4.3).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from depthgrow_jax.errors import require
from depthgrow_jax.model import ModelConfig, Params, depth_of
from depthgrow_jax.probes.config import SimilarityConfig
from depthgrow_jax.probes.inputs import Subject
from depthgrow_jax.probes.result import Result, Score, constant, layer_axis
from depthgrow_jax.probes.settings import Settings, conventions
from depthgrow_jax.stats import interval

MATRICES = {"attention": ("attn", ("q", "k", "v", "o")), "mlp": ("mlp", ("up", "gate", "down"))}
SUBSPACES = ("read_overlap.attention", "read_overlap.mlp", "write_overlap.attention", "write_overlap.mlp")
NORMAL_95 = 1.959964
_HIGHEST = jax.lax.Precision.HIGHEST


def check(cfg: ModelConfig, config: SimilarityConfig, depth: int, block_size: int) -> int:
    """Dimensions of a subspace.

    Raises `UserError` for more than some matrix has, and for blocks that do not divide the depth.
    """
    sizes = [size for size in range(1, depth + 1) if depth % size == 0]
    divides = f"must divide depth {depth}; legal: {sizes}"
    require(block_size in sizes, "probe.similarity.block_size", block_size, divides)
    most = min(cfg.width, cfg.heads * cfg.head_width, cfg.mlp_dim)
    rank = config.rank or max(1, cfg.width // 8)
    require(rank <= most, "probe.similarity.rank", rank, f"must be at most {most}, the rank of the matrices")
    return rank


def weights(subject: Subject, settings: Settings, config: SimilarityConfig, *, block_size: int) -> Result:
    """Cosines, subspace overlaps, norms and stable ranks of the stored layers.

    Quantities, none with examples:
      block_cosine `[G, G]`: cosine of all MLP matrices of a block, concatenated.
      layer_cosine.attention, layer_cosine.mlp `[L, L]`: the same of single layers.
      (each).null_low, (each).null_high: 95% interval of that cosine if the entries of every matrix are
        permuted at random.
      read_overlap.*, write_overlap.* `[L, L]`: |U_i^T U_j|_F^2 / r, U being the top r singular directions, in
        the stream, of what a sub-layer reads with (q, k, v; up, gate) or writes with (o; down).
      (each).null_mean, null_low, null_high: r / D and the 95% interval, for random Gaussian matrices.
      norm.attention, norm.mlp `[L]`: Frobenius, all matrices of the sub-layer.
      stable_rank.attention, stable_rank.mlp `[L]`: |W|_F^2 / sigma_max^2 of o and of down.

    Args:
      config: rank (0: an eighth of the width), draws and seed of the random subspaces.
      block_size: consecutive stored layers of a block.

    Raises:
      UserError: a block size that does not divide the depth, or a rank that some matrix does not have.
    """
    cfg, depth = subject.cfg, depth_of(subject.params)
    rank = check(cfg, config, depth, block_size)

    layers, blocks = layer_axis(depth), layer_axis(depth // block_size)
    axes = {"stored_layer": layers, "stored_layer_to": layers, "block": blocks, "block_to": blocks}
    pair = ("stored_layer", "stored_layer_to")
    products, overlaps, stable_ranks = jax.device_get(_measure(cfg, subject.params["layers"], rank))

    cosines = {
        "block_cosine": (("block", "block_to"), _cosines(products["mlp"], block_size)),
        "layer_cosine.attention": (pair, _cosines(products["attention"], 1)),
        "layer_cosine.mlp": (pair, _cosines(products["mlp"], 1)),
    }
    quantities = {}
    for name, (names, (cosine, mean, deviation)) in cosines.items():
        quantities[name] = constant(names, "cosine", cosine)
        quantities[f"{name}.null_low"] = constant(names, "cosine", mean - NORMAL_95 * deviation)
        quantities[f"{name}.null_high"] = constant(names, "cosine", mean + NORMAL_95 * deviation)
    null_low, null_high = interval(_random_overlaps(cfg.width, rank, config.draws, config.seed))
    for name, values in zip(SUBSPACES, overlaps, strict=True):
        quantities[name] = constant(pair, "share of dimensions", values)
        for label, value in (("mean", rank / cfg.width), ("low", null_low), ("high", null_high)):
            quantities[f"{name}.null_{label}"] = constant((), "share of dimensions", np.asarray(value))
    for part, values in zip(MATRICES, stable_ranks, strict=True):
        squared = np.einsum("mii->i", np.asarray(products[part][0], np.float64))
        quantities[f"norm.{part}"] = constant(("stored_layer",), "Frobenius norm", np.sqrt(squared))
        quantities[f"stable_rank.{part}"] = constant(("stored_layer",), "dimensions", values)

    words = {
        "weights": "cosines and norms: raw, no biases; subspaces and stable ranks: with the gain (and the "
        "centring of layer norm) of the norm before a reading, after a writing matrix",
        "block": f"{block_size} consecutive stored layers",
        "subspace": f"top {config.rank or 'eighth of the'} singular directions",
        "null": "95%: cosines, entries permuted within each matrix; overlaps, uniformly random subspaces",
    }
    scores = {} if block_size == depth else {"adjacent_block_cosine": _adjacent(*cosines["block_cosine"][1])}
    return Result(
        "weights", subject.steps, axes, quantities, conventions(settings, cfg) | words, 0, 0, scores
    )


def _effective(cfg: ModelConfig, layer: Params) -> tuple[list[Array], list[Array]]:
    """What one layer reads with and writes with, attention then MLP: `[D, F]` each, norms folded in."""

    def scaled(x_DF, norm):
        return x_DF * layer[norm]["scale"][:, None]

    def centred(x_DF):
        return x_DF - jnp.mean(x_DF, axis=0, keepdims=True) if cfg.norm == "layer" else x_DF

    reads, writes = [], []
    for part in ("attn", "mlp"):
        kernels = {name: layer[part][name]["kernel"] for name in layer[part]}
        out = "o" if part == "attn" else "down"
        read = jnp.concatenate([kernel for name, kernel in kernels.items() if name != out], axis=1)
        write = kernels[out].T
        if cfg.norm_placement != "post":
            read = centred(scaled(read, f"{part}_norm"))
        if cfg.norm_placement == "sandwich":
            write = scaled(centred(write), f"{part}_post_norm")
        reads.append(read)
        writes.append(write)
    return reads, writes


@functools.partial(jax.jit, static_argnames=("cfg", "rank"))
def _measure(cfg: ModelConfig, layers: Params, rank: int):
    """Everything that reads the matrices.

    Returns:
      products: part -> (inner products of layers `[M, L, L]`, sums of entries `[M, L]`, number of entries
        `[M]`) of its M matrices.
      overlaps: `[4, L, L]` in the order of `SUBSPACES`.
      stable ranks: `[2, L]` of o and down.
    """
    products = {}
    for part, (group, names) in MATRICES.items():
        kernels = [layers[group][name]["kernel"] for name in names if name in layers[group]]
        flat = [kernel.reshape(kernel.shape[0], -1).astype(jnp.float32) for kernel in kernels]
        products[part] = (
            jnp.stack([jnp.matmul(x, x.T, precision=_HIGHEST) for x in flat]),
            jnp.stack([jnp.sum(x, axis=1) for x in flat]),
            jnp.asarray([float(x.shape[1]) for x in flat]),
        )

    def decompose(layer):
        reads, writes = _effective(cfg, layer)
        grams = jnp.stack([jnp.matmul(x, x.T, precision=_HIGHEST) for x in (*reads, *writes)])
        values, vectors = jnp.linalg.eigh(grams)
        trace, largest = jnp.trace(grams[2:], axis1=1, axis2=2), values[2:, -1]
        return vectors[:, :, -rank:], jnp.where(largest > 0, trace / jnp.where(largest > 0, largest, 1), 0)

    bases, stable_ranks = jax.lax.map(decompose, layers)
    return products, jax.vmap(_overlaps, in_axes=1)(bases), stable_ranks.T


def _overlaps(bases: Float[Array, "n D r"]) -> Float[Array, "n n"]:
    """|U_i^T U_j|_F^2 / r, the mean squared cosine of the principal angles."""
    count, width, rank = bases.shape
    together = jnp.moveaxis(bases, 0, 1).reshape(width, count * rank)

    def against_all(basis):
        inner = jnp.matmul(basis.T, together, precision=_HIGHEST)
        return jnp.sum(jnp.square(inner).reshape(rank, count, rank), axis=(0, 2)) / rank

    return jax.lax.map(against_all, bases)


def _cosines(products, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cosine of blocks of `size` layers, and its mean and deviation under permutation, `[G, G]` each.

    For fixed x and y of n entries and a random permutation p, x . p(y) has mean sum(x) sum(y) / n and
    variance ss(x) ss(y) / (n - 1), ss being sums of squares about the mean, and is normal in the limit
    (Hoeffding 1951). So no matrix needs to be permuted.
    """
    inner, sums, number = (np.asarray(x, np.float64) for x in products)
    blocks = inner.shape[1] // size

    def fold(x_MLL):
        """Sums over matrices and over layers at the same place in their blocks."""
        return np.einsum("miaja->ij", x_MLL.reshape(len(x_MLL), blocks, size, blocks, size))

    means = sums / number[:, None]
    spread = np.einsum("mii->mi", inner) - sums * means
    squared = np.diag(fold(inner))
    scale = np.sqrt(squared[:, None] * squared[None])
    scale = np.where(scale > 0, scale, 1.0)
    mean = fold(sums[:, :, None] * means[:, None])
    variance = fold(spread[:, :, None] * spread[:, None] / (number - 1)[:, None, None])
    return fold(inner) / scale, mean / scale, np.sqrt(np.maximum(variance, 0.0)) / scale


def _adjacent(cosine: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> Score:
    """Mean over neighbours; permuted neighbours are uncorrelated, so their variances add."""
    value, centre = np.diag(cosine, 1).mean(), np.diag(mean, 1).mean()
    half = NORMAL_95 * np.sqrt(np.square(np.diag(deviation, 1)).sum()) / (len(cosine) - 1)
    nan = float("nan")
    definition = "mean cosine of the MLP matrices of neighbouring blocks; null: entries permuted"
    return Score(
        float(value), nan, nan, float(value), nan, nan, definition, float(centre - half), float(centre + half)
    )


def _random_overlaps(width: int, rank: int, draws: int, seed: int) -> np.ndarray:
    """Overlaps of all pairs of `draws + 1` random subspaces.

    The leading singular directions of a Gaussian matrix of any shape span a uniformly random subspace, as do
    `rank` Gaussian vectors.
    """
    random = np.random.default_rng(seed).standard_normal((draws + 1, width, rank))
    bases = np.linalg.qr(random).Q
    first, second = np.triu_indices(draws + 1, 1)
    return np.asarray(
        [np.square(bases[i].T @ bases[j]).sum() / rank for i, j in zip(first, second, strict=True)]
    )
