"""An impossible architecture is refused before anything is allocated, in one line with the legal values."""

import dataclasses

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import ModelConfig, validate

BASE = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_heads": 3}, "model.kv_heads=3: must divide heads=4; legal: [1, 2, 4]"),
        ({"kv_heads": 8}, "model.kv_heads=8: must divide heads=4; legal: [1, 2, 4]"),
        ({"kv_heads": -1}, "model.kv_heads=-1"),
        ({"heads": 5, "kv_heads": 0}, "model.heads=5: must divide width=32, or head_dim must be given"),
        ({"head_dim": 5}, "model.head_dim=5: must be even"),
        ({"width": 36, "heads": 12, "kv_heads": 0}, "model.head_dim=3: must be even"),
        ({"width": 0}, "model.width=0: must be at least 1"),
        ({"vocab_size": 0}, "model.vocab_size=0"),
        ({"mlp_dim": -4}, "model.mlp_dim=-4"),
        ({"scan_unroll": 0}, "model.scan_unroll=0"),
        ({"mlp": "relu"}, "model.mlp='relu': must be one of swiglu, gelu"),
        ({"norm": "batch"}, "model.norm='batch': must be one of rms, layer"),
        (
            {"norm_placement": "mid"},
            "model.norm_placement='mid': must be one of pre, pre_lns, post, sandwich",
        ),
        ({"residual_scaling": "half"}, "model.residual_scaling='half': must be one of none, depth, learned"),
        ({"rope_scaling": "yarn"}, "model.rope_scaling='yarn': must be one of none, linear, llama3"),
        ({"remat": "some"}, "model.remat='some': must be one of none, full, dots"),
        ({"dtype": "float16"}, "model.dtype='float16': must be one of float32, bfloat16"),
        ({"rope_theta": 0.0}, "model.rope_theta=0.0: must be above 0"),
        ({"norm_eps": -1e-5}, "model.norm_eps=-1e-05: must be above 0"),
        ({"rope_high_freq_factor": 1.0}, "model.rope_high_freq_factor=1.0: must be above"),
        ({"init_std": -0.1}, "model.init_std=-0.1"),
    ],
)
def test_bad_field_is_named_with_its_value_and_what_is_legal(changes, expected):
    with pytest.raises(UserError) as caught:
        validate(dataclasses.replace(BASE, **changes))
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_defaults_are_resolved():
    validate(BASE)
    assert (BASE.num_kv_heads, BASE.head_width) == (2, 8)
    free = dataclasses.replace(BASE, heads=5, kv_heads=0, head_dim=6)
    validate(free)
    assert (free.num_kv_heads, free.head_width) == (5, 6)
