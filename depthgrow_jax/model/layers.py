"""One Transformer layer, the embedding and the head, as Flax Linen modules.

Inside a layer activations are `[N, D]` with N = B*T: a projection's weight gradient is then one plain
matmul, where `[B, T, D]` makes XLA on CPU transpose strided data (measured: a quarter slower).
Dimension key: B batch, T sequence, N = B*T, D width, H head width, F MLP width.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from depthgrow_jax.model.config import ModelConfig
from depthgrow_jax.model.rotary import rotate


class StepFactors(NamedTuple):
    """What a `LayerProgram` gives one step: `gate [2]`, `norm_scale []`, `residual_scale []`."""

    gate: jax.Array
    norm_scale: jax.Array
    residual_scale: jax.Array


def _initializer(cfg: ModelConfig):
    return nn.initializers.normal(cfg.init_std) if cfg.init_std else nn.initializers.lecun_normal()


def _dense(cfg: ModelConfig, features: int, use_bias: bool, name: str) -> nn.Dense:
    return nn.Dense(
        features, use_bias=use_bias, dtype=jnp.dtype(cfg.dtype), kernel_init=_initializer(cfg), name=name
    )


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last axis, computed in float32."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, factor=None):
        """The norm of `x`, times the scalar `factor` where there is one; in the dtype of `x`."""
        y = x.astype(jnp.float32)
        if self.cfg.norm == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.cfg.norm_eps)
        width = (x.shape[-1],)
        y = y * self.param("scale", nn.initializers.ones, width).reshape((1,) * (x.ndim - 1) + width)
        if self.cfg.norm == "layer":
            y = y + self.param("bias", nn.initializers.zeros, width).reshape((1,) * (x.ndim - 1) + width)
        if factor is not None:
            y = y * factor
        return y.astype(x.dtype)


def causal_attention(
    query: Float[Array, "B T heads H"],
    key: Float[Array, "B T kv_heads H"],
    value: Float[Array, "B T kv_heads H"],
) -> Float[Array, "B T heads H"]:
    """Causal attention over blocks of queries, each of which sees the keys up to its end alone.

    One block would compute the half of the scores that the mask then hides (measured: 1.3 to 1.7 times slower
    on CPU, docs/performance.md).
    """
    length = query.shape[1]
    size = max(64, -(-length // 8))  # more than 8 blocks gain little and take longer to compile
    blocks = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        visible = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None]
        blocks.append(
            jax.nn.dot_product_attention(
                query[:, start:stop], key[:, :stop], value[:, :stop], mask=visible[None, None]
            )
        )
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


# (query [B T heads H], key and value [B T kv_heads H]) -> [B T heads H]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x_ND, shape, rotary, attend: Attend | None = None):
        """Args: attend: how queries meet keys and values; None is the attention of the config."""
        cfg, (batch, length) = self.cfg, shape
        head_width = cfg.head_width

        def heads(name, count):
            flat = _dense(cfg, count * head_width, cfg.attention_bias or cfg.qkv_bias, name)(x_ND)
            return flat.reshape(batch, length, count, head_width)

        def turned(name, count):
            x = heads(name, count)
            return rotate(Norm(cfg, name=f"{name}_norm")(x) if cfg.qk_norm else x, *rotary)

        if attend is None:
            attend = causal_attention if cfg.causal else jax.nn.dot_product_attention
        mixed = attend(turned("q", cfg.heads), turned("k", cfg.num_kv_heads), heads("v", cfg.num_kv_heads))
        mixed_ND = mixed.reshape(x_ND.shape[0], cfg.heads * head_width)
        return _dense(cfg, cfg.width, cfg.attention_bias, "o")(mixed_ND)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202) or GELU feed-forward."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x_ND):
        cfg = self.cfg
        hidden_NF = _dense(cfg, cfg.mlp_dim, cfg.mlp_bias, "up")(x_ND)
        if cfg.mlp == "swiglu":
            hidden_NF = jax.nn.silu(_dense(cfg, cfg.mlp_dim, cfg.mlp_bias, "gate")(x_ND)) * hidden_NF
        else:
            hidden_NF = jax.nn.gelu(hidden_NF, approximate=False)
        return _dense(cfg, cfg.width, cfg.mlp_bias, "down")(hidden_NF)


class Layer(nn.Module):
    """Attention, then MLP; each *adds* its contribution to the residual stream.

    The contribution of a sub-layer f is everything it changes in the stream, for every norm placement:

        pre, pre_lns   f(norm(x) * norm_scale)
        sandwich       norm'(f(norm(x)))
        post           norm(x + f(x)) - x

    so that `x + gate * contribution` is the sub-layer at gate 1 and its removal at gate 0.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_ND: Float[Array, "N D"],
        shape: tuple[int, int],
        rotary,
        factors: StepFactors,
        attend: Attend | None = None,
    ) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
        """Returns (a, m), what attention and MLP add to the stream that enters, `[N, D]` each."""
        cfg = self.cfg
        scale = factors.gate * factors.residual_scale
        if cfg.residual_scaling == "learned":
            scale = scale * self.param("residual_scale", nn.initializers.constant(cfg.residual_init), ())

        def contribution(name, sub_layer, stream, factor):
            norm = Norm(cfg, name=f"{name}_norm")
            if cfg.norm_placement == "post":
                added = norm(stream + sub_layer(stream)) - stream
            else:
                scaled = cfg.norm_placement == "pre_lns"
                added = sub_layer(norm(stream, factors.norm_scale if scaled else None))
                if cfg.norm_placement == "sandwich":
                    added = Norm(cfg, name=f"{name}_post_norm")(added)
            return added * factor.astype(added.dtype)

        attention, mlp = Attention(cfg, name="attn"), MLP(cfg, name="mlp")
        a_ND = contribution("attn", lambda h: attention(h, shape, rotary, attend), x_ND, scale[0])
        m_ND = contribution("mlp", mlp, x_ND + a_ND, scale[1])
        return a_ND, m_ND


class Embed(nn.Module):
    """Token embedding; the tied head reads the same table."""

    cfg: ModelConfig

    def setup(self):
        cfg = self.cfg
        std = cfg.init_std or cfg.width**-0.5
        self.table = self.param("table", nn.initializers.normal(std), (cfg.vocab_size, cfg.width))

    def __call__(self, tokens_BT):
        return jnp.take(self.table, tokens_BT, axis=0).astype(jnp.dtype(self.cfg.dtype))


class Head(nn.Module):
    """Final norm, then logits: `[N, D]` and (when tied) the table `[V, D]` to float32 `[N, V]`."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x_ND, table_VD):
        cfg = self.cfg
        x_ND = Norm(cfg, name="norm")(x_ND)
        if cfg.tie_embeddings:
            kernel_DV = table_VD.T
        else:
            kernel_DV = self.param("kernel", _initializer(cfg), (cfg.width, cfg.vocab_size))
        dtype = jnp.dtype(cfg.dtype)
        return jnp.matmul(x_ND, kernel_DV.astype(dtype), preferred_element_type=jnp.float32)
