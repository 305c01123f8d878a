"""Tiny random models of Hugging Face transformers, saved as `save_pretrained` saves them."""

import json
import pathlib
from typing import Any

import numpy as np
import torch
import transformers

# A session of two threads is faster at this size than one of many, and sums in the same order everywhere.
torch.set_num_threads(1)

VOCABULARY = 97
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 8}),
}
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make(
    directory: str | pathlib.Path,
    kind: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: int | str | None = None,
    **config_overrides,
) -> transformers.PreTrainedModel:
    """A random model, saved in `directory` and returned in float32 for evaluation.

    No parameter is 0 or 1 by chance: norms lie in 0.5..1.5, biases in -0.5..0.5.

    Args:
      kind: one of `KINDS`.
      dtype: of the file. The returned model holds the rounded values.
      max_shard_size: bytes, or as `save_pretrained` takes it ("20KB"); None writes one file.
      config_overrides: fields of the transformers config, over `BASE`.
    """
    config_class, model_class, fields = KINDS[kind]
    model = model_class(config_class(**{**BASE, **fields, **config_overrides}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            if name.endswith("norm.weight"):
                parameter.copy_(1 + noise)
            elif name.endswith("bias"):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 12**0.5 * parameter.shape[-1] ** -0.5)
    model = model.to(getattr(torch, dtype))
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(directory, **shards)
    return model.float().eval()


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits `[B, T, V]` of ids `[B, T]`."""
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(np.asarray(tokens, np.int64)), use_cache=False).logits.numpy()


def edit_config(directory: pathlib.Path, **fields) -> None:
    """Changes fields of `config.json`; the value `...` removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
