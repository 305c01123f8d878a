"""`config.json`: what is read, and what is refused by name."""

import dataclasses
from typing import Any

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop import hf_config
from depthgrow_jax.model import ModelConfig

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


def read(kind="Llama", **fields):
    architecture = f"{kind}ForCausalLM"
    config = {"architectures": [architecture], **SMALL, **fields}
    return hf_config.read(config, "config.json")


def refusal(kind="Llama", **fields) -> str:
    with pytest.raises(UserError) as caught:
        read(kind, **fields)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("architecture", CLASSES)
def test_missing_fields_are_those_of_transformers(architecture):
    config_class = CLASSES[architecture]
    model_type, defaults = hf_config.ARCHITECTURES[architecture]
    declared = {field.name: field.default for field in dataclasses.fields(config_class)}
    assert model_type == config_class.model_type
    assert defaults == {name: declared.get(name) for name in defaults}
    theirs = config_class()
    cfg, depth, context = hf_config.read({"architectures": [architecture]}, "config.json")
    assert (cfg.rope_theta, cfg.rope_scaling) == (theirs.rope_parameters["rope_theta"], "none")
    assert (cfg.num_kv_heads, depth) == (theirs.num_key_value_heads, theirs.num_hidden_layers)
    window = theirs.sliding_window if architecture == "MistralForCausalLM" else None
    assert context == min(theirs.max_position_embeddings, window or 10**9)


def test_fields_of_llama():
    cfg, depth, context = read(
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=500000,
    )
    assert (depth, context) == (3, 512)
    assert cfg == ModelConfig(
        vocab_size=100,
        width=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_dim=48,
        norm_eps=1e-5,
        tie_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=500000.0,
    )


def test_architectures_differ_in_biases_norms_and_head_width():
    by_kind = {kind: read(kind).cfg for kind in ("Llama", "Mistral", "Qwen2", "Qwen3")}
    assert [cfg.qkv_bias for cfg in by_kind.values()] == [False, False, True, False]
    assert [cfg.qk_norm for cfg in by_kind.values()] == [False, False, False, True]
    assert [cfg.head_width for cfg in by_kind.values()] == [8, 8, 8, 128]
    assert read("Qwen3", attention_bias=True).cfg.attention_bias
    # Fields that transformers does not read in these architectures.
    assert read("Mistral", attention_bias=True, mlp_bias=True).cfg == by_kind["Mistral"]
    assert read("Qwen2", attention_bias=True, mlp_bias=True).cfg == by_kind["Qwen2"]


@pytest.mark.parametrize("null", ["num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters"])
def test_null_is_a_value_where_transformers_writes_it(null):
    fields: dict[str, Any] = {null: None}
    cfg = read(**fields).cfg
    assert (cfg.num_kv_heads, cfg.head_width) == (4 if null == "num_key_value_heads" else 2, 8)


def test_model_type_stands_in_for_architectures():
    config = {**SMALL, "model_type": "qwen3", "head_dim": 8}
    assert hf_config.read(config, "config.json") == read("Qwen3", head_dim=8)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures=['GPT2LMHeadModel']", "MistralForCausalLM"]),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, ["architectures=", "alone"]),
        ({"architectures": []}, ["architectures=[]", "LlamaForCausalLM"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures='LlamaForCausalLM'"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["architectures="]),
        ({"architectures": None}, ["architectures=None", "Qwen2ForCausalLM"]),
        ({"architectures": None, "model_type": "gemma2"}, ["model_type='gemma2'", "qwen3"]),
        ({"model_type": "mistral"}, ["model_type='mistral'", "llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config={'quant_method': 'gptq'}"]),
        ({"auto_map": {"AutoModel": "x.Y"}}, ["auto_map="]),
        ({"per_layer_config": {"0": {}}}, ["per_layer_config="]),
        ({"is_causal": False}, ["is_causal=False", "true"]),
        ({"vocab_size": "100"}, ["vocab_size='100'", "integer"]),
        ({"hidden_size": -32}, ["hidden_size=-32"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
        ({"intermediate_size": 48.0}, ["intermediate_size=48.0"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers=True"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings=None"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps='1e-5'"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1", "true or false"]),
        ({"attention_bias": None}, ["attention_bias=None"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "divide num_attention_heads=4"]),
        ({"hidden_size": 34}, ["num_attention_heads=4", "hidden_size=34"]),
        ({"hidden_size": 36}, ["num_attention_heads=4", "even"]),
        ({"head_dim": 7}, ["head_dim=7", "even"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"rope_theta": 0}, ["rope_theta=0"]),
        ({"layer_types": ["full_attention"]}, ["layer_types=", "num_hidden_layers=3"]),
        ({"layer_types": ["chunked_attention"] * 3}, ["layer_types=", "sliding_attention"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["layer_types=", "sliding_window"]),
        ({"sliding_window": 0}, ["sliding_window=0"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items())[:50] if isinstance(value, dict) else "",
)
def test_refused_by_name(fields, parts):
    message = refusal(**fields)
    assert all(part in message for part in parts), message


def test_qwen_alone_reads_its_window_fields():
    assert "max_window_layers=-1" in refusal("Qwen2", use_sliding_window=True, max_window_layers=-1)
    assert "use_sliding_window=None" in refusal("Qwen2", use_sliding_window=None)
    sliding = ["full_attention", "full_attention", "sliding_attention"]
    assert "layer_types" in refusal("Qwen3", layer_types=sliding)


@pytest.mark.parametrize(
    ("kind", "fields", "context"),
    [
        ("Llama", {}, 512),
        ("Mistral", {"sliding_window": None}, 512),
        ("Mistral", {"sliding_window": 4096}, 512),
        ("Mistral", {"sliding_window": 128}, 128),
        ("Mistral", {"max_position_embeddings": 32768}, 4096),
        ("Mistral", {"sliding_window": 128, "layer_types": ["full_attention"] * 3}, 128),
        ("Mistral", {"sliding_window": 128, "use_sliding_window": False}, 128),
        ("Qwen2", {"sliding_window": 128}, 512),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, 512),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, 128),
        ("Qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, 512),
        ("Qwen3", {"sliding_window": 128, "use_sliding_window": True}, 512),
        (
            "Qwen3",
            {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"] * 3},
            512,
        ),
        (
            "Qwen3",
            {
                "sliding_window": 128,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 2 + ["sliding_attention"],
            },
            128,
        ),
    ],
)
def test_a_window_that_is_used_limits_the_context(kind, fields, context):
    assert read(kind, **fields).context == context
