"""Broken directories of transformers: refused in one line that names the file and the tensor."""

import json
import shutil
import struct

import numpy as np
import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.hf_files import open_hf
from depthgrow_jax.interop.tensors import EMBEDDING, HEAD

torch = pytest.importorskip("torch", reason="the directories are written by transformers, which needs torch")
pytest.importorskip("transformers", reason="the directories are written by transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

import tiny_hf  # noqa: E402 (needs both)


def refusal(directory) -> str:
    with pytest.raises(UserError) as caught:
        open_hf(f"hf:{directory}")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def sharded(tmp_path):
    """A directory of several shards, sorted by name, with its index."""
    tiny_hf.make(tmp_path, "llama", max_shard_size="20KB")
    return tmp_path, sorted(tmp_path.glob("*.safetensors")), tmp_path / "model.safetensors.index.json"


def test_a_missing_shard(sharded):
    directory, shards, index = sharded
    shards[1].unlink()
    tensors = json.loads(index.read_text())["weight_map"]
    message = refusal(directory)
    assert shards[1].name in message
    assert min(name for name, shard in tensors.items() if shard == shards[1].name) in message


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_a_shard_cut_short(sharded, size):
    directory, shards, _ = sharded
    shards[1].write_bytes(shards[1].read_bytes()[:size])
    assert f"{shards[1]}: cut short" in refusal(directory)


def test_a_shard_that_is_something_else(sharded):
    directory, shards, _ = sharded
    shards[0].write_text("version https://git-lfs.github.com/spec/v1\n" * 20)
    assert f"{shards[0]}: cut short, or not a safetensors file" in refusal(directory)


def test_an_index_that_places_a_tensor_wrongly(sharded):
    directory, shards, index = sharded
    content = json.loads(index.read_text())
    moved = next(name for name, shard in content["weight_map"].items() if shard == shards[0].name)
    content["weight_map"][moved] = shards[1].name
    index.write_text(json.dumps(content))
    message = refusal(directory)
    assert f"{shards[1]}: lacks tensor {moved}" in message


@pytest.mark.parametrize("shard", ["../x.safetensors", "", 3, "/etc/passwd"])
def test_an_index_that_leaves_the_directory(sharded, shard):
    directory, _, index = sharded
    index.write_text(json.dumps({"weight_map": {EMBEDDING: shard}}))
    assert f"{index}: tensor {EMBEDDING} is in {shard!r}" in refusal(directory)


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none(sharded, content):
    directory, _, index = sharded
    index.write_text(content)
    assert str(index) in refusal(directory)


def test_a_tensor_in_two_shards(sharded):
    directory, shards, index = sharded
    content = json.loads(index.read_text())
    twice = [name for name, shard in content["weight_map"].items() if shard == shards[0].name]
    shutil.copy(shards[0], directory / "z.safetensors")
    content["weight_map"][twice[0]] = "z.safetensors"
    index.write_text(json.dumps(content))
    message = refusal(directory)
    assert any(f"z.safetensors: tensor {name} is also in {shards[0].name}" in message for name in twice)


@pytest.fixture
def saved(tmp_path):
    """A directory of one file, and a function that rewrites the file with other tensors."""
    model = tiny_hf.make(tmp_path, "llama")

    def rewrite(**changes):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
        kept = {name: tensor for name, tensor in state.items() if tensor is not None}
        safetensors_torch.save_file(kept, tmp_path / "model.safetensors")
        return refusal(tmp_path)

    return tmp_path, rewrite


@pytest.mark.parametrize(
    ("name", "tensor", "parts"),
    [
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(32, 48), ["shape [32, 48]", "must be [48, 32]"]),
        ("model.layers.1.self_attn.k_proj.weight", torch.zeros(32, 32), ["must be [16, 32]"]),
        ("model.norm.weight", torch.zeros(32, dtype=torch.float64), ["F64", "F32, F16, BF16"]),
        ("model.layers.0.input_layernorm.weight", torch.zeros(32, dtype=torch.int8), ["I8"]),
        ("model.layers.1.mlp.down_proj.weight", None, ["missing"]),
        ("model.layers.2.mlp.down_proj.weight", torch.zeros(32, 48), ["2-layer"]),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(32), ["belongs to no"]),
        ("model.layers.0.self_attn.q_proj.weight_scale", torch.zeros(1), ["belongs to no"]),
        (EMBEDDING, torch.zeros(96, 32), ["[96, 32]", "[97, 32]", "vocab_size=97"]),
        (HEAD, torch.zeros(98, 32), ["[98, 32]", "[97, 32]", "vocab_size=97"]),
        (HEAD, None, ["missing"]),
    ],
)
def test_a_tensor_that_does_not_fit(saved, name, tensor, parts):
    directory, rewrite = saved
    message = rewrite(**{name.replace(".", "__"): tensor})
    assert all(part in message for part in [str(directory / "model.safetensors"), name, *parts]), message


def test_values_that_are_not_finite_are_named_when_read(saved):
    directory, _ = saved
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    start = 8 + length + json.loads(content[8 : 8 + length])["model.norm.weight"]["data_offsets"][0]
    path.write_bytes(content[:start] + struct.pack("<f", np.nan) + content[start + 4 :])
    with pytest.raises(UserError, match=r"model\.norm\.weight holds values that are not finite"):
        open_hf(f"hf:{directory}").params()


def test_a_file_that_disappears_before_it_is_read(saved):
    directory, _ = saved
    pretrained = open_hf(f"hf:{directory}")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        pretrained.params()


def test_a_directory_without_weights_or_config(tmp_path):
    assert str(tmp_path / "config.json") in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert f"{tmp_path / 'config.json'}: must hold a JSON object" in refusal(tmp_path)
    tiny_hf.make(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin must be converted to safetensors" in refusal(tmp_path)
    tiny_hf.edit_config(tmp_path, architectures=["GemmaForCausalLM"])
    assert f"{tmp_path / 'config.json'}: architectures=['GemmaForCausalLM']" in refusal(tmp_path)


@pytest.mark.parametrize(
    "reference", ["", "hf:", "gguf:x", "hf:/no/such/place", "hf:nowhere", "hf:a/b/c", "hf:../x"]
)
def test_references_that_name_nothing(reference):
    with pytest.raises(UserError, match=r"must be hf:DIR or hf:org/name|no such directory"):
        open_hf(reference)


def test_a_reference_to_a_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "is a file" in refusal(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**6}, "tensors, too few for the 1000000 layers of config.json"),
        (
            {"num_hidden_layers": 10**30},
            "num_hidden_layers=1000000000000000000000000000000: must be an integer",
        ),
        ({"head_dim": 10**20}, "head_dim=100000000000000000000: must be an integer of at least 1, at most"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648: must be an integer"),
        ({"rms_norm_eps": 10**400}, "must be a finite number above 0"),
    ],
    ids=["layers", "huge_layers", "head_dim", "vocabulary", "eps"],
)
def test_sizes_that_no_model_has_are_refused_at_once(saved, fields, message):
    tiny_hf.edit_config(saved[0], **fields)
    assert message in refusal(saved[0])


@pytest.mark.parametrize(
    "text",
    ['{"a":' * 20000 + "1" + "}" * 20000, '{"a": ' + "9" * 5000 + "}", "\udcff"],
    ids=["deep", "long", "bytes"],
)
def test_a_config_that_is_no_json(saved, text):
    (saved[0] / "config.json").write_text(text, errors="surrogateescape")
    assert "config.json: cannot be read" in refusal(saved[0])
