"""`config.json` of Hugging Face transformers: read into a `ModelConfig`, and written for one.

A field that is missing means what transformers 5.24 takes it to mean, which differs between architectures.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from depthgrow_jax.errors import require
from depthgrow_jax.interop.hf_fields import Fields
from depthgrow_jax.interop.hf_rope import read_rope, write_rope
from depthgrow_jax.model import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


class Description(NamedTuple):
    """An architecture.

    Attributes:
      cfg: what a layer is.
      depth: how many there are.
      context: the longest sequence, in tokens, for which `cfg` computes what the config describes.
    """

    cfg: ModelConfig
    depth: int
    context: int


_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "layer_types": None,
}
_QWEN: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# By architecture: its `model_type`, and the default of each field that it reads.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {**_COMMON, "attention_bias": False, "mlp_bias": False}),
    "MistralForCausalLM": (
        "mistral",
        {
            **_COMMON,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "Qwen2ForCausalLM": ("qwen2", _QWEN),
    "Qwen3ForCausalLM": ("qwen3", {**_QWEN, "head_dim": 128, "attention_bias": False}),
}
# Any architecture obeys these; null, or the value here, leaves the function as it is.
_ONLY: dict[str, Any] = {
    "quantization_config": None,
    "compression_config": None,
    "auto_map": None,
    "per_layer_config": None,
    "is_causal": True,
    "is_encoder_decoder": False,
}


def read(config: Mapping[str, Any], where: str) -> Description:
    """What `config.json` describes.

    Args:
      config: its content.
      where: its name in errors.

    Raises `UserError` naming a field that is malformed, impossible, or changes the function in a way that
    `ModelConfig` does not have.
    """
    architecture = _architecture(config, where)
    defaults = ARCHITECTURES[architecture][1]
    fields = Fields(config, where, defaults)
    for name, only in _ONLY.items():
        legal = "must be absent" if only is None else f"must be {str(only).lower()}"
        fields.require(fields.get(name) in (None, only), name, f"is not supported; {legal}")
    fields.require(fields.get("hidden_act") == "silu", "hidden_act", "must be silu")
    depth, context = fields.integer("num_hidden_layers"), fields.integer("max_position_embeddings")
    cfg = ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        mlp_dim=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.boolean("tie_word_embeddings"),
        attention_bias="attention_bias" in defaults and fields.boolean("attention_bias"),
        mlp_bias="mlp_bias" in defaults and fields.boolean("mlp_bias"),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        **_heads(fields),
        **read_rope(config, where, context),
    )
    return Description(cfg, depth, min(context, _window(fields, defaults, depth) or context))


def _architecture(config: Mapping[str, Any], where: str) -> str:
    fields = Fields(config, where)
    legal = f"must be one of {', '.join(ARCHITECTURES)}"
    by_type = {model_type: name for name, (model_type, _) in ARCHITECTURES.items()}
    names, model_type = fields.get("architectures"), fields.get("model_type")
    if names is None:
        fields.require(model_type is not None, "architectures", legal)
        known = isinstance(model_type, str) and model_type in by_type
        fields.require(known, "model_type", f"must be one of {', '.join(by_type)}")
        return by_type[model_type]
    known = isinstance(names, list) and len(names) == 1 and names[0] in tuple(ARCHITECTURES)
    fields.require(known, "architectures", f"{legal}, and one alone")
    # transformers goes by `model_type`.
    wanted = ARCHITECTURES[names[0]][0]
    fields.require(model_type in (None, wanted), "model_type", f"must be {wanted!r} for {names[0]}")
    return names[0]


def _heads(fields: Fields) -> dict[str, int]:
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    fields.require(heads % kv_heads == 0, "num_key_value_heads", f"must divide num_attention_heads={heads}")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        fields.require(
            width % heads == 0,
            "num_attention_heads",
            f"must divide hidden_size={width}, or head_dim must be given",
        )
        head_dim = width // heads
        fields.require(
            head_dim % 2 == 0,
            "num_attention_heads",
            f"hidden_size={width} over it must be even (rotary embedding turns pairs)",
        )
    fields.require(head_dim % 2 == 0, "head_dim", "must be even (rotary embedding turns pairs)")
    return {"width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


def _window(fields: Fields, defaults: Mapping[str, Any], depth: int) -> int | None:
    """How many tokens, itself included, a token sees in some layer; None where it sees all."""
    types = fields.get("layer_types")
    if types is not None:
        known = isinstance(types, list) and all(kind in (FULL, SLIDING) for kind in types)
        fields.require(known, "layer_types", f"must be a list of {FULL} and {SLIDING}")
        fields.require(len(types) == depth, "layer_types", f"must have num_hidden_layers={depth} entries")
    window = fields.optional_integer("sliding_window")
    used = window is not None
    if "use_sliding_window" in defaults:  # Qwen: in some layers. Llama and Mistral: in all
        used = fields.boolean("use_sliding_window") and used
        first = fields.get("max_window_layers")
        legal = isinstance(first, int) and not isinstance(first, bool) and first >= 0
        fields.require(legal, "max_window_layers", "must be an integer of at least 0")
        used = used and (first < depth if types is None else SLIDING in types)
    missing = types is not None and SLIDING in types and not used
    fields.require(not missing, "layer_types", f"{SLIDING} needs a sliding_window that is used")
    return window if used else None


def write(
    cfg: ModelConfig,
    depth: int,
    context: int,
    *,
    dtype: str,
    bos: int | None,
    eos: int | list[int] | None,
) -> dict[str, Any]:
    """A `config.json` that transformers 4 and 5 read.

    Args:
      context: `max_position_embeddings`.
      dtype: of the tensors in the files.
      bos, eos: ids of the tokens that begin and end a text; None where there are none.

    Raises `UserError` naming a `model.` field that no Llama-like architecture of transformers can hold.
    """
    architecture = _writable(cfg)
    model_type, defaults = ARCHITECTURES[architecture]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.width,
        "intermediate_size": cfg.mlp_dim,
        "num_hidden_layers": depth,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
    }
    for name in ("attention_bias", "mlp_bias"):
        if name in defaults:
            config[name] = getattr(cfg, name)
    if "use_sliding_window" in defaults:
        config |= {"use_sliding_window": False, "sliding_window": None}
    config |= write_rope(cfg)
    config |= {"attention_dropout": 0.0, "use_cache": True, "torch_dtype": dtype, "dtype": dtype}
    # Written where they are null too: Llama's own defaults are 1 and 2.
    return config | {"bos_token_id": bos, "eos_token_id": eos}


def _writable(cfg: ModelConfig) -> str:
    """The architecture that holds `cfg`."""
    for name, legal in (
        ("norm", "rms"),
        ("norm_placement", "pre"),
        ("mlp", "swiglu"),
        ("causal", True),
        ("residual_scaling", "none"),
    ):
        value = getattr(cfg, name)
        require(value == legal, f"model.{name}", value, f"transformers' Llama family has {legal} alone")
    qkv_bias = cfg.qkv_bias and not cfg.attention_bias
    if cfg.qk_norm or qkv_bias:
        architecture = "Qwen3ForCausalLM" if cfg.qk_norm else "Qwen2ForCausalLM"
        require(not (cfg.qk_norm and qkv_bias), "model.qkv_bias", True, f"{architecture} has no such biases")
        require(not cfg.mlp_bias, "model.mlp_bias", True, f"{architecture} has no such biases")
        return architecture
    require(
        cfg.width % cfg.heads == 0, "model.heads", cfg.heads, f"must divide width={cfg.width} in transformers"
    )
    return "LlamaForCausalLM"
