"""The architecture that the metadata of a GGUF file describe.

Keys and defaults are those of llama.cpp. What this project cannot compute is refused by name, and so is every
key of the architecture that is not known here: it may change the function.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.gguf_header import Header, read_tensor
from depthgrow_jax.model import ModelConfig
from depthgrow_jax.model.rotary import inverse_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FREQS = "rope_freqs.weight"
_DEFAULT_THETA = 10000.0
_MOST = 2**24  # No size of a model comes near; arrays of such sizes are made before tensors are looked at.
_BIAS = re.compile(r"blk\.\d+\.(\w+)\.bias")
# Read by `describe`.
_KNOWN = {"vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"}
_KNOWN |= {f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")}
_KNOWN |= {"attention.layer_norm_rms_epsilon", "attention.sliding_window"}
_KNOWN |= {
    f"rope.{name}"
    for name in ("dimension_count", "freq_base", "scaling.type", "scaling.factor", "scale_linear")
}
# Of no influence on the function: history, and parameters of the scaling `yarn` alone.
_KNOWN |= {"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
# Switches that are known, by the value at which they do nothing.
_OFF = {
    "attention.causal": True,
    "attention.scale": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1,
    "embedding_scale": 1,
    "residual_scale": 1,
    "pooling_type": 0,
    "rope.scaling.attn_factor": 1,
    "use_parallel_residual": False,
}


class Description(NamedTuple):
    """`handled`: tensors of the file that are described by `cfg` and are no weights."""

    architecture: str
    cfg: ModelConfig
    depth: int
    context: int
    handled: frozenset[str]


class _Keys:
    """Typed access to the metadata of one architecture; errors name the file, the key and the value."""

    def __init__(self, header: Header, architecture: str):
        self._header, self._architecture = header, architecture

    def refuse(self, key: str, value: Any, legal: str) -> UserError:
        return UserError(f"{self._header.path}: {self._architecture}.{key}={value!r}: {legal}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self._header.metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise UserError(f"{self._header.path}: metadata key {self._architecture}.{key} is missing")
        return value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= _MOST:
            raise self.refuse(key, value, f"must be a whole number of {least} to {_MOST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.refuse(key, value, "must be a number above 0")
        return float(value)


def describe(header: Header) -> Description:
    """Raises `UserError` naming the file and the key for what is missing, impossible or not supported."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        legal = "must be one of " + ", ".join(ARCHITECTURES)
        raise UserError(f"{header.path}: general.architecture={architecture!r}: {legal}")
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise UserError(
            f"{header.path}: split.count={parts!r}: must be a whole model; merge the files into one"
        )
    keys = _Keys(header, architecture)
    _refuse_unknown(keys, metadata, architecture)

    width, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    kv_heads = keys.whole("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.refuse("attention.head_count_kv", kv_heads, f"must divide attention.head_count={heads}")
    if width % heads and f"{architecture}.attention.key_length" not in metadata:
        raise keys.refuse("attention.head_count", heads, f"must divide embedding_length={width}")
    head_dim = keys.whole("attention.key_length", width // heads, least=2)
    if head_dim % 2:
        raise keys.refuse("attention.key_length", head_dim, "must be even (rotary embedding turns pairs)")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := keys.whole(key, head_dim)) != head_dim:
            raise keys.refuse(key, value, f"must be the width of a head, {head_dim}")

    biased = {match[1] for name in header.tensors if (match := _BIAS.fullmatch(name))}
    scaling, factor = _rope_scaling(keys)
    cfg = ModelConfig(
        vocab_size=_vocab_size(header, keys),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_dim=keys.whole("feed_forward_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in header.tensors,
        attention_bias="attn_output" in biased,
        qkv_bias="attn_output" not in biased and not biased.isdisjoint(("attn_q", "attn_k", "attn_v")),
        mlp_bias=not biased.isdisjoint(("ffn_gate", "ffn_up", "ffn_down")),
        qk_norm=architecture == "qwen3",
        rope_theta=keys.number("rope.freq_base", _DEFAULT_THETA),
        rope_scaling=scaling,
        rope_factor=factor,
    )
    handled = frozenset[str]()
    # llama.cpp reads these factors for this architecture alone.
    if architecture == "llama" and _ROPE_FREQS in header.tensors:
        cfg, handled = _with_factors(header, cfg), frozenset([_ROPE_FREQS])
    context = keys.whole("context_length")
    window = keys.whole("attention.sliding_window", 0, least=0)
    return Description(
        architecture, cfg, keys.whole("block_count"), min(context, window) if window else context, handled
    )


def _refuse_unknown(keys: _Keys, metadata: dict[str, Any], architecture: str) -> None:
    for name, value in metadata.items():
        key = name.removeprefix(architecture + ".")
        if key == name or key in _KNOWN:
            continue
        if key not in _OFF:
            raise keys.refuse(key, value, "is not supported")
        if value != _OFF[key]:
            raise keys.refuse(key, value, f"is not supported; must be {_OFF[key]}")


def _vocab_size(header: Header, keys: _Keys) -> int:
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise UserError(f"{header.path}: tensor token_embd.weight is missing")
    return keys.whole("vocab_size", table.shape[0])


def _rope_scaling(keys: _Keys) -> tuple[str, float]:
    """`rope_scaling` and `rope_factor`; llama.cpp takes a factor without a type as `linear`."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise keys.refuse("rope.scaling.type", kind, "must be one of none, linear")
    # 0 is llama.cpp's spelling of no factor, `scale_linear` the older name.
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) or 1.0
    if type(factor) not in (int, float) or not 0 < factor < float("inf"):
        raise keys.refuse("rope.scaling.factor", factor, "must be a number above 0")
    if kind == "none" or factor == 1:
        return "none", ModelConfig.rope_factor
    return "linear", float(factor)


def _with_factors(header: Header, cfg: ModelConfig) -> ModelConfig:
    """`cfg` with the scaling `llama3` that gives the divisors of `rope_freqs.weight`.

    llama.cpp keeps the divisor of every frequency and not the parameters, so only these are recognised: any
    factor (the largest divisor), low and high frequency factors 1 and 4, original length 8192.
    """
    where = f"{header.path}: tensor {_ROPE_FREQS}"
    info = header.tensors[_ROPE_FREQS]
    if info.shape != (cfg.head_width // 2,):
        raise UserError(f"{where} has shape {list(info.shape)}, must be {[cfg.head_width // 2]}")
    if info.type.name != "F32":
        raise UserError(f"{where} is of type {info.type.name}, must be F32")
    divisors = read_tensor(header.path, info)
    factor = float(str(divisors.max()))
    if cfg.rope_scaling != "none" or not 1 <= factor < float("inf"):
        raise UserError(f"{where} scales the rotary frequencies in a way that is not supported")
    scaled = dataclasses.replace(cfg, rope_scaling="llama3", rope_factor=factor)
    wanted = inverse_frequencies(cfg) / inverse_frequencies(scaled)
    if not np.allclose(divisors, wanted, rtol=1e-5, atol=0):
        raise UserError(
            f"{where} is not the scaling llama3 with low_freq_factor 1, high_freq_factor 4 and original "
            "length 8192; others are not supported"
        )
    return scaled
