"""The rotary embedding in `config.json`: both schemas, and what is refused by name."""

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop import hf_config

transformers = pytest.importorskip("transformers", reason="configs are compared with those of transformers")

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


def read(**fields):
    config = {"architectures": ["LlamaForCausalLM"], **SMALL, **fields}
    return hf_config.read(config, "config.json")


def refusal(**fields) -> str:
    with pytest.raises(UserError) as caught:
        read(**fields)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3},
        },
        {
            "rope_theta": 5e5,
            "original_max_position_embeddings": 8192,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        },
    ],
)
def test_llama3_scaling_in_every_schema(fields):
    cfg = read(**fields).cfg
    assert (cfg.rope_theta, cfg.rope_scaling, cfg.rope_factor) == (5e5, "llama3", 32.0)
    assert (cfg.rope_low_freq_factor, cfg.rope_high_freq_factor, cfg.rope_original_length) == (1.0, 4.0, 8192)


def test_linear_scaling_and_none_in_every_schema():
    for fields in (
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4}},
    ):
        cfg = read(**fields).cfg
        assert (cfg.rope_theta, cfg.rope_scaling, cfg.rope_factor) == (10000.0, "linear", 4.0)
    for fields in (
        {"rope_scaling": None, "rope_theta": 5e5},
        {"rope_scaling": {"type": "default"}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}},
    ):
        cfg = read(**fields).cfg
        assert (cfg.rope_theta, cfg.rope_scaling) == (5e5, "none")


def test_llama3_takes_its_length_from_the_context_as_transformers_does():
    rope = {"rope_type": "llama3", **LLAMA3}
    del rope["original_max_position_embeddings"]
    theirs = transformers.LlamaConfig(**SMALL, rope_parameters=dict(rope))
    assert theirs.rope_parameters["original_max_position_embeddings"] == 512
    assert read(rope_parameters=rope).cfg.rope_original_length == 512


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type='yarn'", "llama3"]),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            ["rope_parameters.rope_type='dynamic'"],
        ),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, ["rope_scaling.type='mrope'"]),
        ({"rope_scaling": "linear"}, ["rope_scaling='linear'", "object"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor=None"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["rope_scaling.factor='2'"]),
        ({"rope_scaling": {"rope_type": ["linear"]}}, ["rope_scaling.rope_type=['linear']"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            ["rope_parameters.full_attention=", "nested"],
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            ["rope_parameters.partial_rotary_factor=0.25"],
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": "10000"}},
            ["rope_parameters.rope_theta="],
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, ["rope_theta=10000.0", "500000.0"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            ["rope_scaling=", "contradicts rope_parameters="],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ["rope_scaling.high_freq_factor=1.0", "low_freq_factor=1.0"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192.5}},
            ["rope_scaling.original_max_position_embeddings=8192.5"],
        ),
        (
            {
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            },
            ["rope_scaling.original_max_position_embeddings=8192", "4096"],
        ),
    ],
    ids=range(15),
)
def test_rope_refused_by_name(fields, parts):
    message = refusal(**fields)
    assert all(part in message for part in parts), message
