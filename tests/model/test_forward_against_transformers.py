"""Weights of a `transformers` Llama, put where they belong, give its logits: the layout is Llama's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.model import ModelConfig, apply, init

torch = pytest.importorskip("torch", reason="parity with Llama needs torch (requirements-dev.txt)")
transformers = pytest.importorskip("transformers", reason="parity with Llama needs transformers")


def _llama(kv_heads, head_dim, tied, rope):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # Ones would hide a norm in the wrong place.
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def _params_from(model, tied):
    weights = {name: w.detach().numpy() for name, w in model.state_dict().items()}

    def stacked(name, transpose=True):
        layers = [weights[f"model.layers.{i}.{name}.weight"] for i in range(3)]
        return np.stack([w.T if transpose else w for w in layers])

    layers = {
        "attn": {n: {"kernel": stacked(f"self_attn.{n}_proj")} for n in "qkvo"},
        "mlp": {n: {"kernel": stacked(f"mlp.{n}_proj")} for n in ("gate", "up", "down")},
        "attn_norm": {"scale": stacked("input_layernorm", transpose=False)},
        "mlp_norm": {"scale": stacked("post_attention_layernorm", transpose=False)},
    }
    head = {"norm": {"scale": weights["model.norm.weight"]}}
    if not tied:
        head["kernel"] = weights["lm_head.weight"].T
    return {"embed": {"table": weights["model.embed_tokens.weight"]}, "layers": layers, "head": head}


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "tied", "rope"),
    [
        (2, 8, True, {"rope_type": "default", "rope_theta": 10000.0}),
        (1, 16, False, {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}),
        (
            4,
            16,
            True,
            {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
    ids=["gqa_tied", "mqa_untied_wide_heads_linear", "mha_llama3"],
)
def test_logits_equal_those_of_llama(kv_heads, head_dim, tied, rope):
    model = _llama(kv_heads, head_dim, tied, rope)
    cfg = ModelConfig(
        vocab_size=64,
        width=32,
        heads=4,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_dim=48,
        tie_embeddings=tied,
        rope_theta=rope["rope_theta"],
        rope_scaling={"default": "none"}.get(rope["rope_type"], rope["rope_type"]),
        rope_factor=rope.get("factor", 1.0),
        rope_original_length=64,
    )
    params = _params_from(model, tied)
    fresh = jax.eval_shape(lambda: init(cfg, jax.random.key(0), 3))
    assert jax.tree.map(lambda p: p.shape, params) == jax.tree.map(lambda p: p.shape, fresh)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 32))
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)).logits.numpy()
    assert wanted.std() > 0.1
    got = jax.jit(lambda p: apply(cfg, p, jnp.asarray(tokens)).logits)(params)
    assert np.abs(got - wanted).max() < 2e-5
