"""Exported directories are read by transformers and give the logits, the text and the bits of the model."""

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from random_models import random_params

from depthgrow_jax.data import tokenizer as tokenizing
from depthgrow_jax.interop.export import export
from depthgrow_jax.interop.hf_files import open_hf
from depthgrow_jax.interop.pretrained import Vocabulary
from depthgrow_jax.model import ModelConfig, abstract_params, apply, layer_program

torch = pytest.importorskip("torch", reason="exports are read by transformers (requirements-dev.txt)")
transformers = pytest.importorskip("transformers", reason="exports are read by transformers")
safetensors = pytest.importorskip("safetensors", reason="exports are safetensors files")
torch.set_num_threads(1)

DEPTH, CONTEXT = 3, 64
BASE = {"vocab_size": 97, "width": 32, "heads": 4, "kv_heads": 2, "mlp_dim": 48}
SETTINGS = {"context": CONTEXT, "vocabulary": None, "lineage": {"run": "toy"}}
# What each asks of the folding and of the classes of transformers: plain Llama, Qwen2, Qwen3, LN-scaling and
# depth scaling with gates, a program with repeats.
MODELS = {
    "llama": ({"rope_theta": 5e5, "norm_eps": 1e-6}, None, None),
    "untied": (
        {"tie_embeddings": False, "attention_bias": True, "mlp_bias": True, "kv_heads": 1},
        None,
        None,
    ),
    "qwen2": ({"qkv_bias": True}, None, None),
    "qwen3": ({"qk_norm": True, "head_dim": 16, "tie_embeddings": False}, None, None),
    "linear": ({"rope_scaling": "linear", "rope_factor": 3.0}, None, None),
    "llama3": ({"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_length": 24}, None, None),
    "scaled": (
        {"norm_placement": "pre_lns", "residual_scaling": "depth", "residual_exponent": 0.5},
        None,
        [[1.0, 0.5], [0.0, 1.0], [2.0, -0.7]],
    ),
    "learned": ({"residual_scaling": "learned"}, (0, 2, 1, 1, 0), None),
}
TOKENS = np.random.default_rng(11).integers(0, BASE["vocab_size"], (2, 40))


def random_model(name):
    """(cfg, params, program) of one of `MODELS`."""
    fields, order, gate = MODELS[name]
    cfg = ModelConfig(**{**BASE, **fields})
    steps = DEPTH if order is None else len(order)
    return cfg, random_params(cfg, DEPTH), layer_program(cfg, steps, order=order, gate=gate)


def export_model(name, directory, **changes):
    cfg, params, program = random_model(name)
    export(cfg, params, program, directory, **{**SETTINGS, **changes})
    return cfg, params, program


@functools.partial(jax.jit, static_argnums=0)
def our_logits(cfg, params, program, tokens):
    with jax.default_matmul_precision("highest"):
        return apply(cfg, params, tokens, program=program).logits


def load(directory, dtype="float32"):
    """The model as transformers reads it; everything in the files must have a place, and the reverse."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def their_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens), use_cache=False).logits.numpy()


def read_tensors(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same_bits(mine, theirs):
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32)) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_same_logits_and_the_same_greedy_continuation(name, tmp_path):
    cfg, params, program = export_model(name, tmp_path / "out")
    model = load(tmp_path / "out")
    want = np.asarray(our_logits(cfg, params, program, jnp.asarray(TOKENS)))
    got = their_logits(model, TOKENS)
    assert np.abs(got - want).max() <= 2e-5 * max(1, np.abs(want).max())

    prompt = TOKENS[:, :8]
    generated = model.generate(
        torch.from_numpy(prompt),
        attention_mask=torch.ones(prompt.shape, dtype=torch.long),
        do_sample=False,
        max_new_tokens=32,
    ).numpy()
    assert generated.shape == (2, 40), "no id of the config may end the text: there is no tokenizer"
    line = np.zeros((2, 40), np.int64)
    line[:, :8] = prompt
    for position in range(8, 40):
        logits = our_logits(cfg, params, program, jnp.asarray(line))
        line[:, position] = np.asarray(logits[:, position - 1]).argmax(-1)
    assert np.array_equal(generated, line)


@pytest.mark.parametrize("name", ["llama", "untied", "qwen2", "qwen3"])
def test_out_through_transformers_and_back_is_bit_exact(name, tmp_path):
    cfg, params, _ = export_model(name, tmp_path / "out")
    load(tmp_path / "out").save_pretrained(tmp_path / "theirs")
    for directory in ("out", "theirs"):
        back = open_hf(f"hf:{tmp_path / directory}")
        assert (back.cfg.norm_eps, back.depth, back.context) == (cfg.norm_eps, DEPTH, CONTEXT)
        assert same_bits(back.params(), params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_once_and_comes_back(dtype, tmp_path):
    _, params, _ = export_model("untied", tmp_path / "out", dtype=dtype)
    numpy_dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    rounded = jax.tree.map(lambda leaf: leaf.astype(numpy_dtype).astype(np.float32), params)
    load(tmp_path / "out", dtype).save_pretrained(tmp_path / "theirs")
    for directory in ("out", "theirs"):
        assert {t.dtype for t in read_tensors(tmp_path / directory).values()} == {np.dtype(numpy_dtype)}
        assert same_bits(open_hf(f"hf:{tmp_path / directory}").params(), rounded)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype


def test_shards_hold_what_one_file_holds(tmp_path):
    export_model("untied", tmp_path / "one")
    limit = 20_000
    export_model("untied", tmp_path / "many", shard_bytes=limit)
    one, many = read_tensors(tmp_path / "one"), read_tensors(tmp_path / "many")
    assert one.keys() == many.keys() and all(np.array_equal(one[name], many[name]) for name in one)

    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    count = len(shards)
    assert count > 3 and shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    total = {"total_size": sum(t.nbytes for t in one.values())}
    assert index["metadata"] == total | {"total_parameters": sum(t.size for t in one.values())}
    assert index["weight_map"].keys() == one.keys() and set(index["weight_map"].values()) == set(shards)
    for file in shards:
        sizes = [one[name].nbytes for name, where in index["weight_map"].items() if where == file]
        assert sum(sizes) <= limit or len(sizes) == 1
    assert np.array_equal(
        their_logits(load(tmp_path / "many"), TOKENS), their_logits(load(tmp_path / "one"), TOKENS)
    )


def test_the_config_is_in_both_schemas_of_transformers(tmp_path):
    """Version 4 reads `rope_theta`, `rope_scaling`, `torch_dtype`; version 5 `rope_parameters`, `dtype`."""
    export_model("llama3", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    scaling = {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
        "rope_type": "llama3",
    }
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "dtype": "float32",
    }
    assert {name: config[name] for name in expected} == expected
    assert config["rope_scaling"].items() >= scaling.items()
    assert config["rope_parameters"].items() >= (scaling | {"rope_theta": 10000.0}).items()
    export_model("llama", tmp_path / "plain")
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert plain["rope_theta"] == plain["rope_parameters"]["rope_theta"] == 5e5
    assert plain["rope_scaling"] is None and plain["rope_parameters"]["rope_type"] == "default"


TEXTS = ["the cat sat on the mat, and the hat", "  two  spaces\n\ttab 123 1999", "naïve — émigré 日本 🙂", ""]


def bpe():
    return tokenizing.train_bpe([text * 20 for text in TEXTS], 290, ("<|end|>", "<|mask|>"))


@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])
def test_the_tokenizer_goes_along(prefix, tmp_path):
    backend = bpe()
    if prefix:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|mask|> $A", special_tokens=[("<|mask|>", 1)]
        )
    ids = (1,) if prefix else ()
    vocabulary = Vocabulary(backend.to_str(), "<|end|>", prefix=ids, ends=(0,))
    cfg = ModelConfig(**{**BASE, "vocab_size": 290})
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), abstract_params(cfg, 1))
    export(cfg, params, layer_program(cfg, 1), tmp_path / "out", **{**SETTINGS, "vocabulary": vocabulary})

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == [*ids, *backend.encode(text, add_special_tokens=False).ids]
        assert theirs.decode(theirs(text, add_special_tokens=False)["input_ids"]) == text
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|end|>", 0)
    assert theirs.bos_token_id == (1 if prefix else None)
    assert theirs.model_max_length == CONTEXT
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.bos_token_id) == (0, 1 if prefix else None)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.eos_token_id, config.bos_token_id) == (0, 1 if prefix else None)


def test_files_of_a_tokenizer_are_handed_on(tmp_path):
    files = {
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|mask|>"}',
        "chat_template.jinja": "{{ messages }} é",
        "generation_config.json": '{"temperature": 0.25, "do_sample": true, "eos_token_id": 7}',
    }
    vocabulary = Vocabulary(bpe().to_str(), "<|end|>", ends=(1, 0), files=files)
    export_model("llama", tmp_path / "out", vocabulary=vocabulary)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text(encoding="utf-8") == files[name]
    assert (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8") == vocabulary.json
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.temperature, generation.eos_token_id) == (0.25, [1, 0])
