"""The rotary embedding in `config.json`, in the two schemas that transformers has had.

The old one is `rope_theta` beside `rope_scaling` (null where nothing is scaled); since version 5 both are in
`rope_parameters`.
"""

from collections.abc import Mapping
from typing import Any

from depthgrow_jax.interop.hf_fields import Fields
from depthgrow_jax.model import ModelConfig

_OLD, _NEW = "rope_scaling", "rope_parameters"
_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3"}
_THETA = 10000.0


def read_rope(config: Mapping[str, Any], where: str, context: int) -> dict[str, Any]:
    """The `rope_*` fields of a `ModelConfig`.

    Args:
      config: `config.json`.
      where: its name in errors.
      context: what `original_max_position_embeddings` is where llama3 scaling does not give it.

    Raises `UserError` naming a field that is malformed, of an unsupported type, or contradicts another one.
    """
    top = Fields(config, where, {"rope_theta": _THETA})
    theta = top.number("rope_theta")
    _require_whole_heads(top)
    found = {}
    for schema in (_OLD, _NEW):
        values = top.get(schema)
        top.require(values is None or isinstance(values, dict), schema, "must be an object or null")
        if values:
            found[schema] = _read_schema(config, schema, where, context)
    if not found:
        return {"rope_theta": theta, "rope_scaling": "none"}
    if len(found) == 2 and found[_OLD] != found[_NEW]:
        raise top.error(_OLD, f"contradicts {_NEW}={config[_NEW]!r}")
    rope = next(iter(found.values()))
    if "rope_theta" in config and rope["rope_theta"] != theta:
        raise top.error("rope_theta", f"contradicts rope_theta={rope['rope_theta']} of {' and '.join(found)}")
    return rope


def _read_schema(config: Mapping[str, Any], schema: str, where: str, context: int) -> dict[str, Any]:
    # transformers fills what an object lacks from the top level.
    defaults = {"rope_theta": config.get("rope_theta", _THETA), "rope_type": "default"}
    defaults["original_max_position_embeddings"] = config.get("original_max_position_embeddings", context)
    values = config[schema]
    if "type" in values:
        defaults["rope_type"] = values["type"]
    fields = Fields(values, where, defaults, prefix=f"{schema}.")
    for name, value in values.items():
        fields.require(not isinstance(value, dict), name, "must not be nested (a RoPE for each layer type)")
    kind = fields.get("rope_type")
    fields.require(
        isinstance(kind, str) and kind in _SCALINGS, "rope_type", f"must be one of {', '.join(_SCALINGS)}"
    )
    fields.require(values.get("type", kind) == kind, "type", f"contradicts rope_type={kind!r}")
    _require_whole_heads(fields)
    rope: dict[str, Any] = {"rope_theta": fields.number("rope_theta"), "rope_scaling": _SCALINGS[kind]}
    if kind != "default":
        rope["rope_factor"] = fields.number("factor")
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        fields.require(high > low, "high_freq_factor", f"must be above low_freq_factor={low}")
        original = fields.integer("original_max_position_embeddings")
        # The top level wins in transformers.
        top = config.get("original_max_position_embeddings", original)
        legal = f"contradicts original_max_position_embeddings={top!r} beside {schema}"
        fields.require(top == original, "original_max_position_embeddings", legal)
        rope["rope_low_freq_factor"], rope["rope_high_freq_factor"] = low, high
        rope["rope_original_length"] = original
    return rope


def _require_whole_heads(fields: Fields) -> None:
    # Part of a head would be left unturned.
    fields.require(
        fields.get("partial_rotary_factor") in (None, 1), "partial_rotary_factor", "must be 1 or absent"
    )


def write_rope(cfg: ModelConfig) -> dict[str, Any]:
    """The fields of both schemas."""
    parameters: dict[str, Any] = {"rope_theta": float(cfg.rope_theta), "rope_type": "default"}
    old: dict[str, Any] | None = None
    if cfg.rope_scaling == "linear":
        # Versions before 4.43 know `type` alone, and refuse a third key.
        old = {"type": "linear", "factor": float(cfg.rope_factor)}
        parameters |= {"rope_type": "linear", "factor": float(cfg.rope_factor)}
    elif cfg.rope_scaling == "llama3":
        old = {
            "rope_type": "llama3",
            "factor": float(cfg.rope_factor),
            "low_freq_factor": float(cfg.rope_low_freq_factor),
            "high_freq_factor": float(cfg.rope_high_freq_factor),
            "original_max_position_embeddings": cfg.rope_original_length,
        }
        parameters |= old
    return {"rope_theta": float(cfg.rope_theta), _OLD: old, _NEW: parameters}
