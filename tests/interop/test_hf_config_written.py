"""`config.json` as it is written: by hand-written values, by transformers, and read back."""

import dataclasses

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop import hf_config
from depthgrow_jax.model import ModelConfig, validate

transformers = pytest.importorskip("transformers", reason="configs are compared with those of transformers")

CLASSES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
}
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


CFG = ModelConfig(vocab_size=100, width=32, heads=4, kv_heads=2, mlp_dim=48, norm_eps=1e-6)


def write(cfg, **options):
    options = {"dtype": "bfloat16", "bos": None, "eos": None, **options}
    return hf_config.write(cfg, 3, 512, **options)


def test_llama_is_written_in_both_schemas():
    cfg = dataclasses.replace(CFG, rope_theta=5e5, rope_scaling="llama3", rope_factor=32.0)
    rope = {"rope_type": "llama3", **LLAMA3}
    assert write(cfg, bos=1, eos=[2, 3]) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SMALL,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 5e5,
        "rope_scaling": rope,
        "rope_parameters": {"rope_theta": 5e5, **rope},
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }


def test_scalings_are_written_as_each_version_reads_them():
    plain = write(CFG)
    assert (plain["rope_theta"], plain["rope_scaling"]) == (10000.0, None)
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    linear = write(dataclasses.replace(CFG, rope_scaling="linear", rope_factor=4.0))
    assert linear["rope_scaling"] == {"type": "linear", "factor": 4.0}
    assert linear["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


WRITABLE = {
    "plain": (CFG, "LlamaForCausalLM"),
    "untied_mha": (dataclasses.replace(CFG, tie_embeddings=False, kv_heads=0), "LlamaForCausalLM"),
    "biases": (dataclasses.replace(CFG, attention_bias=True, mlp_bias=True), "LlamaForCausalLM"),
    "both_biases": (dataclasses.replace(CFG, attention_bias=True, qkv_bias=True), "LlamaForCausalLM"),
    "wide_heads": (dataclasses.replace(CFG, head_dim=16), "LlamaForCausalLM"),
    "linear": (dataclasses.replace(CFG, rope_scaling="linear", rope_factor=2.0), "LlamaForCausalLM"),
    "llama3": (
        dataclasses.replace(CFG, rope_scaling="llama3", rope_original_length=64, rope_low_freq_factor=2.0),
        "LlamaForCausalLM",
    ),
    "qwen2": (dataclasses.replace(CFG, qkv_bias=True, head_dim=16), "Qwen2ForCausalLM"),
    "qwen3": (dataclasses.replace(CFG, qk_norm=True, head_dim=16), "Qwen3ForCausalLM"),
    "qwen3_biases": (dataclasses.replace(CFG, qk_norm=True, attention_bias=True), "Qwen3ForCausalLM"),
}


def _function(cfg: ModelConfig) -> dict:
    """The fields that decide the function, defaults resolved."""
    resolved = {"kv_heads": cfg.num_kv_heads, "head_dim": cfg.head_width}
    fields = {**dataclasses.asdict(cfg), **resolved}
    unused = ["rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length"]
    for name in unused[{"none": 0, "linear": 1, "llama3": 4}[cfg.rope_scaling] :]:
        del fields[name]
    fields["qkv_bias"] = cfg.qkv_bias or cfg.attention_bias
    return fields


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_written_is_read_back(name):
    cfg, architecture = WRITABLE[name]
    config = write(cfg)
    assert config["architectures"] == [architecture]
    back, depth, context = hf_config.read(config, "config.json")
    validate(back)
    assert (_function(back), depth, context) == (_function(cfg), 3, 512)


@pytest.mark.parametrize("name", WRITABLE)
def test_transformers_reads_what_is_written(name):
    cfg, architecture = WRITABLE[name]
    theirs = CLASSES[architecture].from_dict(write(cfg))
    assert (theirs.head_dim, theirs.num_key_value_heads) == (cfg.head_width, cfg.num_kv_heads)
    assert (theirs.rms_norm_eps, theirs.tie_word_embeddings) == (cfg.norm_eps, cfg.tie_embeddings)
    assert (theirs.bos_token_id, theirs.eos_token_id, str(theirs.dtype)) == (None, None, "torch.bfloat16")
    rope = theirs.rope_parameters
    assert rope["rope_theta"] == cfg.rope_theta
    assert rope["rope_type"] == {"none": "default"}.get(cfg.rope_scaling, cfg.rope_scaling)
    if cfg.rope_scaling != "none":
        assert rope["factor"] == cfg.rope_factor
    if cfg.rope_scaling == "llama3":
        assert rope["original_max_position_embeddings"] == cfg.rope_original_length
        assert rope["low_freq_factor"] == cfg.rope_low_freq_factor
        assert rope["high_freq_factor"] == cfg.rope_high_freq_factor


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"norm": "layer"}, "model.norm='layer'"),
        ({"norm_placement": "post"}, "model.norm_placement='post'"),
        ({"norm_placement": "sandwich"}, "model.norm_placement='sandwich'"),
        ({"norm_placement": "pre_lns"}, "model.norm_placement='pre_lns'"),
        ({"mlp": "gelu"}, "model.mlp='gelu'"),
        ({"causal": False}, "model.causal=False"),
        ({"residual_scaling": "depth"}, "model.residual_scaling='depth'"),
        ({"residual_scaling": "learned"}, "model.residual_scaling='learned'"),
        ({"qkv_bias": True, "qk_norm": True}, "model.qkv_bias=True"),
        ({"qkv_bias": True, "mlp_bias": True}, "model.mlp_bias=True"),
        ({"qk_norm": True, "mlp_bias": True}, "model.mlp_bias=True"),
        ({"width": 30, "head_dim": 8}, "model.heads=4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_not_written(fields, part):
    with pytest.raises(UserError) as caught:
        write(dataclasses.replace(CFG, **fields))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
