"""GGUF files: the logits of the model they were written from; one line for whatever is wrong with them."""

import importlib
import struct
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.gguf_files import open_gguf
from depthgrow_jax.model import apply

torch = pytest.importorskip(
    "torch", reason="the weights of GGUF tests come from torch (requirements-dev.txt)"
)
transformers = pytest.importorskip("transformers", reason="GGUF is compared with transformers")
gguf = pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")

import tiny_gguf  # noqa: E402
import tiny_hf  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _tokens(model, length=40):
    return np.random.default_rng(0).integers(0, model.config.vocab_size, (2, length))


def _logits(pretrained, tokens):
    return np.asarray(
        jax.jit(lambda p: apply(pretrained.cfg, p, jnp.asarray(tokens)).logits)(pretrained.params())
    )


def _assert_same_logits(pretrained, model, length=40):
    tokens = _tokens(model, length)
    wanted = tiny_hf.logits(model, tokens)
    assert wanted.std() > 0.1
    assert np.abs(_logits(pretrained, tokens) - wanted).max() < 2e-5 * max(1, np.abs(wanted).max())


def _written(tmp_path, kind="llama", architecture=None, overrides=None, **options):
    model = tiny_hf.make(tmp_path / "hf", kind, **(overrides or {}))
    path = tiny_gguf.write(tmp_path / "tiny.gguf", model, architecture or kind, **options)
    return model, path


def _refusal(path):
    with pytest.raises(UserError) as caught:
        open_gguf(f"gguf:{path}")
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message.replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    ],
    ids=["gqa_tied", "mqa_untied_wide_heads", "biases", "qwen2", "qwen3"],
)
def test_logits_equal_those_of_the_model_that_was_written(tmp_path, kind, overrides):
    model, path = _written(tmp_path, kind, overrides=overrides)
    pretrained = open_gguf(f"gguf:{path}")
    assert (pretrained.depth, pretrained.context, pretrained.vocabulary) == (2, 512, None)
    assert pretrained.cfg.tie_embeddings == model.config.tie_word_embeddings
    _assert_same_logits(pretrained, model)


def test_linear_scaling(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    model, path = _written(tmp_path, overrides={"rope_parameters": rope}, keys=scaling)
    _assert_same_logits(open_gguf(f"gguf:{path}"), model, length=100)


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path):
    overrides = {"rope_parameters": LLAMA3, "head_dim": 16}
    model = tiny_hf.make(tmp_path / "hf", "llama", **overrides)
    plain = LLAMA3["rope_theta"] ** (-np.arange(8) / 8)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors[0] == pytest.approx(1) and 1.1 < divisors[4] < 7.9 and divisors[7] == pytest.approx(8)
    path = tiny_gguf.write(tmp_path / "a.gguf", model, tensors={"rope_freqs.weight": divisors})
    pretrained = open_gguf(f"gguf:{path}")
    assert (pretrained.cfg.rope_scaling, pretrained.cfg.rope_factor) == ("llama3", 8.0)
    _assert_same_logits(pretrained, model, length=300)
    divisors[4] *= 1.01
    other = tiny_gguf.write(tmp_path / "b.gguf", model, tensors={"rope_freqs.weight": divisors})
    assert "tensor rope_freqs.weight is not the scaling llama3" in _refusal(other)


def _by_hand(raw, kind):
    """Values of blocks as the format defines them: `[..., 32]` a block."""
    halves = raw[..., :4].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":  # scale, 32 signed bytes
        return halves[..., :1] * raw[..., 2:].view(np.int8).astype(np.float32)
    nibbles = np.concatenate([raw[..., 4:] & 15, raw[..., 4:] >> 4], -1).astype(np.float32)
    return (
        halves[..., :1] * nibbles + halves[..., 1:]
    )  # Q4_1: scale, minimum, low nibbles, then the high ones


@pytest.mark.parametrize(("kind", "size"), [("Q8_0", 34), ("Q4_1", 20)])
def test_quantised_tensors_are_read_as_their_format_defines(tmp_path, kind, size):
    model, path = _written(
        tmp_path, types={"ffn_gate.weight": kind, "attn_k.weight": kind, "token_embd.weight": "F16"}
    )
    found = dict(open_gguf(f"gguf:{path}").tensors())
    plain = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    number = gguf.GGMLQuantizationType[kind]

    def expected(rows):
        blocks = gguf.quants.quantize(rows, number).reshape(len(rows), -1, size)
        return _by_hand(blocks, kind).reshape(rows.shape)

    gate = "model.layers.1.mlp.gate_proj.weight"
    np.testing.assert_array_equal(found[gate], expected(plain[gate]))
    assert 0 < np.abs(found[gate] - plain[gate]).max() < 0.1
    key = "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(
        found[key], expected(plain[key])
    )  # A block is a row: moved rows are quantised alike.
    table = "model.embed_tokens.weight"
    np.testing.assert_array_equal(found[table], plain[table].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_reads_the_same_file_alike(tmp_path, kind):
    types = {"ffn_gate.weight": "Q8_0", "attn_q.weight": "Q4_1", "attn_k.weight": "F16"}
    _, path = _written(tmp_path, kind, types=types)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    _assert_same_logits(open_gguf(f"gguf:{path}"), theirs.eval())


def test_float32_metadata_become_the_decimals_that_were_meant(tmp_path):
    _, path = _written(tmp_path, overrides={"rms_norm_eps": 1e-6}, keys={"llama.rope.freq_base": 123456.7})
    cfg = open_gguf(f"gguf:{path}").cfg
    assert (cfg.norm_eps, cfg.rope_theta) == (1e-6, 123456.7)
    assert float(np.float32(1e-6)) != 1e-6


def test_absent_keys_take_the_defaults_of_llama_cpp(tmp_path):
    absent = ["attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base"]
    absent += ["rope.dimension_count", "vocab_size"]
    _, path = _written(
        tmp_path, overrides={"num_key_value_heads": 4}, keys={f"llama.{key}": None for key in absent}
    )
    cfg = open_gguf(f"gguf:{path}").cfg
    assert (cfg.kv_heads, cfg.head_dim, cfg.rope_theta, cfg.vocab_size) == (4, 8, 10000.0, 97)
    assert cfg.rope_scaling == "none"


def test_a_sliding_window_limits_the_context(tmp_path):
    _, path = _written(tmp_path, keys={"llama.attention.sliding_window": 100})
    assert open_gguf(f"gguf:{path}").context == 100
    _, path = _written(tmp_path, keys={"llama.attention.sliding_window": 10**6})
    assert open_gguf(f"gguf:{path}").context == 512


def test_the_fingerprint_changes_with_a_weight(tmp_path):
    _, path = _written(tmp_path)
    first = open_gguf(f"gguf:{path}").fingerprint
    assert open_gguf(f"gguf:{path}").fingerprint == first
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    assert open_gguf(f"gguf:{path}").fingerprint != first


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "gemma2"}, None),
        ({"llama.block_count": None}, "FILE: metadata key llama.block_count is missing"),
        ({"llama.block_count": 0}, "FILE: llama.block_count=0: must be a whole number of 1 to 16777216"),
        ({"llama.block_count": 3}, "FILE: tensor blk.2.attn_norm.weight is missing"),
        ({"llama.block_count": 16000000}, "FILE: tensor blk.15999999.attn_norm.weight is missing"),
        ({"llama.feed_forward_length": 4000000000}, "llama.feed_forward_length=4000000000: must be a whole"),
        (
            {"llama.block_count": 1},
            "FILE: tensor blk.1.attn_q.weight belongs to no llama model of 1 layers",
        ),
        (
            {"llama.attention.head_count": 3},
            "llama.attention.head_count_kv=2: must divide attention.head_count=3",
        ),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count=[4, 4]: must be a whole number"),
        (
            {"llama.attention.layer_norm_rms_epsilon": "x"},
            "layer_norm_rms_epsilon='x': must be a number above 0",
        ),
        (
            {"llama.attention.key_length": 16},
            "llama.attention.value_length=8: must be the width of a head, 16",
        ),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count=4: must be the width of a head, 8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn': must be one of none, linear"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor=0.5: is not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count=8: is not supported; must be 0"),
        ({"llama.logit_scale": 0.25}, "llama.logit_scale=0.25: is not supported"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping=30.0: is not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal=False: is not supported; must be True"),
        ({"llama.vocab_size": 96}, "FILE: tensor token_embd.weight has shape [97, 32], must be [96, 32]"),
        ({"split.count": 3}, "split.count=3: must be a whole model"),
    ],
)
def test_metadata_that_are_refused(tmp_path, keys, message):
    architecture = keys.get("general.architecture", "llama")
    keys = {name: value for name, value in keys.items() if name != "general.architecture"}
    _, path = _written(tmp_path, architecture=architecture, keys=keys)
    message = message or "FILE: general.architecture='gemma2': must be one of llama, qwen2, qwen3"
    assert message in _refusal(path)


def test_a_known_switch_that_is_off_is_accepted(tmp_path):
    _, path = _written(tmp_path, keys={"llama.expert_count": 0, "llama.attention.causal": True})
    assert open_gguf(f"gguf:{path}").depth == 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, "FILE: tensor blk.1.ffn_up.weight is missing"),
        ({"token_embd.weight": None}, "FILE: tensor token_embd.weight is missing"),
        (
            {"blk.0.ffn_up.weight": np.zeros((47, 32), np.float32)},
            "blk.0.ffn_up.weight has shape [47, 32], must be [48",
        ),
        (
            {"blk.0.attn_qkv.weight": np.zeros((64, 32), np.float32)},
            "tensor blk.0.attn_qkv.weight belongs to no llama",
        ),
        ({"blk.0.attn_q.bias": np.zeros(32, np.float32)}, "tensor blk.0.attn_k.bias is missing and 4 more"),
        (
            {"output_norm.weight": np.ones(32, np.int32)},
            "output_norm.weight is of type I32, which the package gguf",
        ),
    ],
)
def test_tensors_that_are_refused(tmp_path, tensors, message):
    _, path = _written(tmp_path, tensors=tensors)
    assert message in _refusal(path)


def test_rope_freqs_belong_to_llama_alone(tmp_path):
    _, path = _written(tmp_path, "qwen2", tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    assert "tensor rope_freqs.weight belongs to no qwen2 model" in _refusal(path)


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    for content in (b"", b"GG", b"PK\x03\x04 a zip file"):
        path.write_bytes(content)
        assert "FILE: is not a GGUF file" in _refusal(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [(b"\x01\0\0\0", "of version 1; must be 2 or 3"), (b"\0\0\0\x03", "is a big-endian GGUF")],
)
def test_other_versions(tmp_path, version, message):
    _, path = _written(tmp_path)
    path.write_bytes(b"GGUF" + version + path.read_bytes()[8:])
    assert message in _refusal(path)


def test_a_file_that_was_cut_short(tmp_path):
    _, path = _written(tmp_path)
    whole = path.read_bytes()
    last = gguf.GGUFReader(path).tensors[-1].name
    path.write_bytes(whole[:-1])
    assert f"FILE: cut short: tensor {last} ends at byte {len(whole)}, the file at byte" in _refusal(path)
    key = whole.index(b"llama.block_count")
    path.write_bytes(whole[: key + len("llama.block_count") + 6])
    assert "FILE: cut short in metadata key llama.block_count" in _refusal(path)
    entry = whole.index(b"blk.0.attn_q.weight")
    path.write_bytes(whole[: entry + 25])
    assert "FILE: cut short in the table of tensors, entry " in _refusal(path)
    for length in range(4, entry, 97):
        path.write_bytes(whole[:length])
        assert "cut short" in _refusal(path)


def test_an_unknown_type_of_tensor(tmp_path):
    _, path = _written(tmp_path)
    content = bytearray(path.read_bytes())
    place = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    assert struct.unpack_from("<I", content, place) == (0,)
    struct.pack_into("<I", content, place, 99)
    path.write_bytes(content)
    assert _refusal(path) == "FILE: tensor output_norm.weight has the unknown type 99"


def test_values_that_are_not_finite_are_refused_when_read(tmp_path):
    _, path = _written(tmp_path, tensors={"output_norm.weight": np.full(32, np.nan, np.float32)})
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight holds values that are not finite"):
        open_gguf(f"gguf:{path}").params()


def test_a_package_that_holds_one_file(tmp_path, monkeypatch):
    _, path = _written(tmp_path)
    package = tmp_path / "site" / "some_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    for name in ("some_model", "some-model"):
        with pytest.raises(UserError, match=rf"gguf:{name}: the package holds 0 \.gguf files"):
            open_gguf(f"gguf:{name}")
    path.rename(package / "one.gguf")
    for name in ("some_model", "some-model"):
        pretrained = open_gguf(f"gguf:{name}")
        assert (pretrained.reference, pretrained.depth) == (f"gguf:{name}", 2)
    (package / "two.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"the package holds 2 \.gguf files"):
        open_gguf("gguf:some_model")


def test_without_the_package_gguf(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"need the package gguf.*: pip install gguf$"):
        open_gguf("gguf:nowhere")


@pytest.mark.parametrize("name", ["nowhere", "no/where.gguf", "no.where", "struct", "made_here", ""])
def test_neither_a_file_nor_a_package(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    with pytest.raises(UserError, match=rf"^gguf:{name}: (no such file and no such package|is a directory)"):
        open_gguf(f"gguf:{name}")
