"""Tensors by their Hugging Face names, and the leaves of the stacked parameters that they fill.

Hugging Face keeps a projection as `[out, in]`, one tensor a layer; here it is `[in, out]`, all layers
stacked. Shapes: L layers, D width, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import ModelConfig, Params, abstract_params, depth_of

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_NORMS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
_PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
_PROJECTIONS |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Leaf(NamedTuple):
    """Where a tensor belongs: a path of keys in the parameters, and its layer (None outside the stack)."""

    path: tuple[str, ...]
    layer: int | None

    @property
    def transposed(self) -> bool:
        """Whether the tensor is the leaf's transpose."""
        return self.path[-1] == "kernel"


def _layer_names(cfg: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Names below `model.layers.N.`, with the path below `params["layers"]` of each."""
    layers = abstract_params(cfg, 1)["layers"]
    names = {}
    for keys, _ in jax.tree_util.tree_leaves_with_path(layers):
        path = tuple(key.key for key in keys)
        if path[-2] in _NORMS and path[-1] == "scale":
            names[f"{_NORMS[path[-2]]}.weight"] = path
        elif path[-2:-1] and path[-2] in _PROJECTIONS:
            module = "self_attn" if path[0] == "attn" else "mlp"
            kind = "weight" if path[-1] == "kernel" else "bias"
            names[f"{module}.{_PROJECTIONS[path[-2]]}.{kind}"] = path
        else:
            raise ValueError(f"no Hugging Face name for layers.{'.'.join(path)}")
    return names


def leaves(cfg: ModelConfig, depth: int) -> dict[str, Leaf]:
    """Every tensor of a Llama-like model of `depth` layers, by name.

    Raises `ValueError` for an architecture with parameters that have no name there.
    """
    found = {EMBEDDING: Leaf(("embed", "table"), None), FINAL_NORM: Leaf(("head", "norm", "scale"), None)}
    if not cfg.tie_embeddings:
        found[HEAD] = Leaf(("head", "kernel"), None)
    names = _layer_names(cfg)
    for layer in range(depth):
        for name, path in names.items():
            found[f"model.layers.{layer}.{name}"] = Leaf(("layers", *path), layer)
    return found


def is_derived(name: str) -> bool:
    """Whether a tensor follows from the config, and is not read: old checkpoints store rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq")


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def shapes(cfg: ModelConfig, depth: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by name."""
    abstract = abstract_params(cfg, depth)
    found = {}
    for name, leaf in leaves(cfg, depth).items():
        shape = _get(abstract, leaf.path).shape
        shape = shape if leaf.layer is None else shape[1:]
        found[name] = shape[::-1] if leaf.transposed else shape
    return found


def stack(cfg: ModelConfig, depth: int, tensors: Iterable[tuple[str, np.ndarray]], where: str) -> Params:
    """Float32 parameters, in numpy, filled tensor by tensor.

    Args:
      tensors: (name, array) in any order. A head that is given for tied embeddings must equal the table.
      where: named in errors.

    Raises `UserError` naming a tensor that is missing, unknown, given twice, of another shape or not finite.
    """
    wanted, expected = leaves(cfg, depth), shapes(cfg, depth)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), abstract_params(cfg, depth))
    seen: set[str] = set()
    tied_head = None
    for name, tensor in tensors:
        if is_derived(name):
            continue
        if name == HEAD and cfg.tie_embeddings:
            tied_head = tensor
            continue
        if name not in wanted:
            raise UserError(f"{where}: tensor {name} belongs to no {depth}-layer model of this config")
        if name in seen:
            raise UserError(f"{where}: tensor {name} is there twice")
        if tuple(tensor.shape) != expected[name]:
            raise UserError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, must be {list(expected[name])}"
            )
        seen.add(name)
        leaf = wanted[name]
        place = _get(params, leaf.path)
        place = place if leaf.layer is None else place[leaf.layer]
        place[...] = tensor.T if leaf.transposed else tensor
        if not np.isfinite(place).all():
            raise UserError(f"{where}: tensor {name} holds values that are not finite")
        del tensor  # or it would live on beside the next one
    missing = [name for name in wanted if name not in seen]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{where}: tensor {missing[0]} is missing{more}")
    if tied_head is not None and not np.array_equal(tied_head.astype(np.float32), params["embed"]["table"]):
        raise UserError(f"{where}: tensor {HEAD} differs from {EMBEDDING}, though the config ties them")
    return params


def unstack(cfg: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """(name, contiguous float32 array) of every tensor, in the order of `leaves`. Inverse of `stack`.

    Raises `ValueError` as `leaves`.
    """
    for name, leaf in leaves(cfg, depth_of(params)).items():
        value = _get(params, leaf.path)
        tensor = np.asarray(value if leaf.layer is None else value[leaf.layer])
        yield name, np.ascontiguousarray(tensor.T if leaf.transposed else tensor)
