"""Tiny GGUF files, written by the `gguf` package from the weights of transformers models."""

import pathlib
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp keeps them.

    Its RoPE turns rows 2i and 2i + 1 of a head by angle i, Hugging Face's rows i and i + H/2.
    """
    width = len(rows) // heads
    order = []
    for head in range(heads):
        for i in range(width // 2):
            order += [head * width + i, head * width + i + width // 2]
    return rows[order]


def weights(model) -> dict[str, np.ndarray]:
    """llama.cpp's name -> what Hugging Face holds, rows not yet moved."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = tensor.numpy()
    return found


def metadata(model, architecture: str) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a model, by their whole names."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head,
        "vocab_size": config.vocab_size,
    }
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def write(
    path: pathlib.Path,
    model,
    architecture: str = "llama",
    *,
    types: dict[str, str] | None = None,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
) -> pathlib.Path:
    """Writes `model` as llama.cpp's converter would.

    Args:
      types: end of a tensor's name -> the name of its type in ggml; others are F32.
      keys: metadata to add or to replace; None removes.
      tensors: tensors to add or to replace, in the file's order of rows; None removes. Integers stay so.
    """
    config = model.config
    found = weights(model)
    if architecture == "llama":
        for name in found:
            for end, heads in (
                ("attn_q", config.num_attention_heads),
                ("attn_k", config.num_key_value_heads),
            ):
                if name.split(".")[-2] == end:
                    found[name] = neighbours(found[name], heads)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata(model, architecture), **(keys or {})}.items():
        _add(writer, key, value)
    for name, tensor in {**found, **(tensors or {})}.items():
        if tensor is None:
            continue
        kind = next((kind for end, kind in (types or {}).items() if name.endswith(end)), "F32")
        if tensor.dtype.kind == "i":
            writer.add_tensor(name, tensor)
            continue
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
