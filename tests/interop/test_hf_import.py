"""Directories of transformers: the same logits, the same bits, and broken ones refused by file and tensor."""

import json
import pathlib
import socket
import time
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop import hf_files
from depthgrow_jax.interop.hf_files import open_hf
from depthgrow_jax.interop.tensors import EMBEDDING, HEAD
from depthgrow_jax.model import apply

torch = pytest.importorskip("torch", reason="imports are compared with transformers, which needs torch")
pytest.importorskip("transformers", reason="imports are compared with transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

import tiny_hf  # noqa: E402 (needs both)

POSITIONS = 304
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
# With heads of 16 the 8 frequencies turn 10, 3.2, 1.02, 0.3 ... times: kept, interpolated twice, divided.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama_gqa": ("llama", {}),
    "llama_mqa_tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama_mha_biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads_eps": ("llama", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "llama_theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama_linear": ("llama", {"rope_parameters": LINEAR}),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral_gqa": ("mistral", {}),
    "mistral_mqa_narrow_heads_tied": (
        "mistral",
        {"num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True},
    ),
    "mistral_linear": ("mistral", {"rope_parameters": LINEAR}),
    "qwen2_gqa_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_mqa_wide_heads": ("qwen2", {"num_key_value_heads": 1, "head_dim": 16}),
    "qwen2_mha_llama3": ("qwen2", {"num_key_value_heads": 4, "head_dim": 16, "rope_parameters": LLAMA3}),
    "qwen3_gqa_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_mqa_wide_heads_biases": (
        "qwen3",
        {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True},
    ),
    "qwen3_mha_llama3": ("qwen3", {"num_key_value_heads": 4, "head_dim": 16, "rope_parameters": LLAMA3}),
}


def to_old_schema(directory):
    """RoPE as transformers 4 wrote it."""
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {("type" if kind == "linear" else "rope_type"): kind, **rope}
    tiny_hf.edit_config(directory, rope_parameters=..., rope_theta=theta, rope_scaling=scaling)


def our_logits(pretrained, tokens):
    params = pretrained.params()
    forward = jax.jit(lambda p, t: apply(pretrained.cfg, p, t).logits)
    with jax.default_matmul_precision("highest"):
        lowered = forward.lower(params, jnp.asarray(tokens))
    # Compiling is most of the time of this file.
    quick: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
    return np.asarray(lowered.compile(compiler_options=quick)(params, jnp.asarray(tokens)))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    kind, fields = CASES[name]
    theirs = tiny_hf.make(tmp_path, kind, **fields)
    tokens = np.random.default_rng(0).integers(0, tiny_hf.VOCABULARY, (1, POSITIONS), dtype=np.int32)
    wanted = tiny_hf.logits(theirs, tokens)
    assert wanted.std() > 0.3
    pretrained = open_hf(f"hf:{tmp_path}")
    assert (pretrained.depth, pretrained.context, pretrained.vocabulary) == (2, 512, None)
    got = our_logits(pretrained, tokens)
    assert np.abs(got - wanted).max() < 2e-5 * max(1.0, np.abs(wanted).max())
    to_old_schema(tmp_path)
    assert open_hf(f"hf:{tmp_path}").cfg == pretrained.cfg


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})],
    ids=["mistral", "qwen2"],
)
def test_a_window_of_w_tokens_is_full_attention_over_w_tokens_and_not_over_more(kind, fields, tmp_path):
    theirs = tiny_hf.make(tmp_path, kind, sliding_window=24, **fields)
    tokens = np.random.default_rng(0).integers(0, tiny_hf.VOCABULARY, (1, 25), dtype=np.int32)
    pretrained = open_hf(f"hf:{tmp_path}")
    assert pretrained.context == 24
    off = np.abs(our_logits(pretrained, tokens) - tiny_hf.logits(theirs, tokens)).max(axis=(0, 2))
    assert off[:24].max() < 2e-5 * 5
    assert off[24] > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_upcast_bit_for_bit(dtype, tmp_path):
    theirs = tiny_hf.make(tmp_path, "llama", dtype=dtype, num_hidden_layers=3)
    stored = {array.dtype.name for _, array in open_hf(f"hf:{tmp_path}").tensors()}
    params = open_hf(f"hf:{tmp_path}").params()
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    assert stored == {dtype}
    np.testing.assert_array_equal(params["embed"]["table"], state[EMBEDDING])
    np.testing.assert_array_equal(params["head"]["kernel"], state[HEAD].T)
    for layer in range(3):
        down = state[f"model.layers.{layer}.mlp.down_proj.weight"]
        np.testing.assert_array_equal(params["layers"]["mlp"]["down"]["kernel"][layer], down.T)
        norm = state[f"model.layers.{layer}.post_attention_layernorm.weight"]
        np.testing.assert_array_equal(params["layers"]["mlp_norm"]["scale"][layer], norm)


def test_shards_give_the_bits_and_the_fingerprint_of_one_file(tmp_path):
    tiny_hf.make(tmp_path / "one", "llama")
    tiny_hf.make(tmp_path / "many", "llama", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) >= 3
    one, many = open_hf(f"hf:{tmp_path / 'one'}"), open_hf(f"hf:{tmp_path / 'many'}")
    jax.tree.map(np.testing.assert_array_equal, one.params(), many.params())
    assert one.fingerprint == many.fingerprint


def test_fingerprint_changes_with_weights_and_with_what_they_mean(tmp_path):
    tiny_hf.make(tmp_path, "llama")
    found = [open_hf(f"hf:{tmp_path}").fingerprint]
    tiny_hf.edit_config(tmp_path, rms_norm_eps=1e-4)
    found.append(open_hf(f"hf:{tmp_path}").fingerprint)
    tiny_hf.make(tmp_path, "llama", seed=1)
    found.append(open_hf(f"hf:{tmp_path}").fingerprint)
    tiny_hf.make(tmp_path, "llama", dtype="bfloat16", seed=1)
    found.append(open_hf(f"hf:{tmp_path}").fingerprint)
    assert len(set(found)) == 4


def test_tensors_come_one_at_a_time(tmp_path):
    tiny_hf.make(tmp_path, "llama", hidden_size=128, num_hidden_layers=4, intermediate_size=256)
    pretrained = open_hf(f"hf:{tmp_path}")
    sizes, held = [], []
    tracemalloc.start()
    try:
        for _, tensor in pretrained.tensors():
            assert not any(reference() is not None for reference in held)
            held.append(weakref.ref(tensor))
            sizes.append(tensor.nbytes)
            del tensor
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(sizes) > 10 * max(sizes)
    assert max(sizes) <= peak < 2 * max(sizes)


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="memory maps are read from /proc")
def test_no_file_is_mapped_into_memory(tmp_path):
    tiny_hf.make(tmp_path, "llama")
    for _ in open_hf(f"hf:{tmp_path}").tensors():
        assert str(tmp_path) not in pathlib.Path("/proc/self/maps").read_text()


def test_recomputed_frequencies_and_a_tied_head_may_be_stored(tmp_path):
    theirs = tiny_hf.make(tmp_path, "llama", tie_word_embeddings=True)
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4, dtype=torch.float64)
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    params = open_hf(f"hf:{tmp_path}").params()
    np.testing.assert_array_equal(params["embed"]["table"], state[EMBEDDING].numpy())
    state[HEAD] += 1
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        open_hf(f"hf:{tmp_path}").params()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache, and a Hub that accepts connections and never answers."""
    constants = pytest.importorskip("huggingface_hub", reason="hf:org/name needs huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hf_files, "_PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield tmp_path / "cache"


def test_a_hub_that_does_not_answer_is_an_error_at_once(hub):
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"hf:some-org/some.model: no such directory.*not complete in the cache"
    ) as caught:
        open_hf("hf:some-org/some.model")
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)


def test_the_cache_is_used_without_a_network(hub):
    snapshot = hub / "models--some-org--tiny" / "snapshots" / ("a" * 40)
    theirs = tiny_hf.make(snapshot, "llama")
    (hub / "models--some-org--tiny" / "refs").mkdir()
    (hub / "models--some-org--tiny" / "refs" / "main").write_text("a" * 40)
    pretrained = open_hf("hf:some-org/tiny")
    assert pretrained.reference == "hf:some-org/tiny"
    wanted = theirs.state_dict()[EMBEDDING].numpy()
    np.testing.assert_array_equal(pretrained.params()["embed"]["table"], wanted)


def test_a_repository_is_downloaded_and_its_other_layouts_are_not(hub, monkeypatch):
    import huggingface_hub

    files = ["config.json", "model-1.safetensors", "tokenizer.json", "chat_template.jinja"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/x.safetensors", "onnx/config.json"]
    tiny_hf.make(hub / "there", "llama")
    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(hub / "there")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repository, timeout: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_hf("hf:org/name").depth == 2
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(files + others, **patterns)) == files
    assert asked["repository"] == "org/name"
