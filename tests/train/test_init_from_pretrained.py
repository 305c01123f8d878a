"""Runs that start from a pretrained model: its weights to the bit, grown before the first step, resumed."""

import copy
import dataclasses
import shutil
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from toys import (
    VOCABULARY,
    ToyBatches,
    assert_same_run,
    merged,
    stop_after,
    stored,
    tiny_config,
    tiny_run,
)

from depthgrow_jax.corpora import load_corpus
from depthgrow_jax.errors import Preempted, UserError
from depthgrow_jax.interop import open_model
from depthgrow_jax.train.signals import StopRequest
from depthgrow_jax.train.start import from_pretrained

torch = pytest.importorskip("torch", reason="the models are those of torch")
pytest.importorskip("transformers", reason="the models are those of transformers")

from test_subjects_pretrained import save_pretrained, write_texts  # noqa: E402  (needs both)

from tests.interop import tiny_hf  # noqa: E402

DEPTH = 4
UPSCALED = (0, 1, 2, 1, 2, 3)  # SOLAR: the first three layers, then the last three
EXPANDED = (0, 1, 1, 2, 3, 3)  # LLaMA-Pro: a copy after every second layer
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
CONSTANT = {"schedule": "constant", "warmup_steps": 0, "decay_steps": 0}
# A run of one step that changes nothing (its rate is 0 in float32): its loss is that of the start.
STILL = {"train": {"steps": 1}, "optimizer": {**CONSTANT, "name": "sgd", "learning_rate": 1e-46}}
# Grown before the first step, and once more after two of four.
TWICE = {
    "depth": 7,
    "growth": {"sources": (UPSCALED, (*UPSCALED, 5)), "boundaries": (0, 2)},
    "train": {"steps": 4, "eval_every": 2},
    "optimizer": CONSTANT,
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """(directory, model of transformers)."""
    directory = tmp_path_factory.mktemp("pretrained")
    return directory, tiny_hf.make(directory, "llama", num_hidden_layers=DEPTH, **SMALL)


def config(directory, *changes: dict):
    """The tiny config, around the architecture in `directory`, without growth."""
    model = dataclasses.asdict(open_model(f"hf:{directory}").cfg)
    fields = {"depth": DEPTH, "model": model, "init_from": {"path": f"hf:{directory}"}}
    fields["growth"] = {"operator": "none", "start_depth": DEPTH, "boundaries": ()}
    for change in changes:
        fields = merged(fields, change)
    return tiny_config(**fields)


def grown(source: tuple[int, ...], init: str = "copy") -> dict:
    """Changes of the config: grown by `source` before the first step."""
    event = {"operator": "explicit", "sources": (source,), "schedule": "explicit", "boundaries": (0,)}
    return {"depth": len(source), "growth": {**event, "init": init}}


def with_layers(network, source):
    """A model of transformers with copies of layers."""
    other = copy.deepcopy(network)
    other.model.layers = torch.nn.ModuleList(copy.deepcopy(network.model.layers[i]) for i in source)
    other.config.num_hidden_layers = len(source)
    return other


def validation_loss(network, cfg) -> float:
    """By torch, of the sequences that the run is judged on."""
    batches = ToyBatches(cfg.train.sequence_length).validation_batches(
        cfg.train.batch_size, cfg.train.eval_batches
    )
    tokens = torch.from_numpy(np.concatenate(list(batches))).long()
    with torch.no_grad():
        logits = network(input_ids=tokens[:, :-1], use_cache=False).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def assert_weights(params, network):
    """Parameters, stacked, are those of a model of transformers, to the bit."""
    same = lambda ours, theirs: np.testing.assert_array_equal(ours, theirs.detach().numpy())  # noqa: E731
    same(params["embed"]["table"], network.model.embed_tokens.weight)
    same(params["head"]["norm"]["scale"], network.model.norm.weight)
    same(params["head"]["kernel"].T, network.lm_head.weight)
    layers = params["layers"]
    assert len(layers["attn"]["q"]["kernel"]) == len(network.model.layers)
    for i, layer in enumerate(network.model.layers):
        same(layers["attn_norm"]["scale"][i], layer.input_layernorm.weight)
        same(layers["mlp_norm"]["scale"][i], layer.post_attention_layernorm.weight)
        for name in "qkvo":
            same(layers["attn"][name]["kernel"][i].T, getattr(layer.self_attn, f"{name}_proj").weight)
        for name in ("gate", "up", "down"):
            same(layers["mlp"][name]["kernel"][i].T, getattr(layer.mlp, f"{name}_proj").weight)


def test_starts_from_exactly_its_weights(pretrained, tmp_path):
    directory, network = pretrained
    cfg = config(directory, STILL)
    averaged = tiny_run(tmp_path / "averaged", config(directory, STILL, {"train": {"ema_decay": 0.5}}))
    state = from_pretrained(averaged.setup)
    assert_weights(state.params, network)
    assert_weights(state.ema, network)  # the average starts there too
    assert int(state.step) == 0 and state.lineage.tolist() == [[0, 1, 2, 3]]
    assert state.born.tolist() == [-1] * DEPTH
    result = tiny_run(tmp_path / "run", cfg).train()
    assert result["val_loss"] == pytest.approx(validation_loss(network, cfg), rel=1e-6)
    assert_weights(stored(tmp_path / "run", 1), network)


def test_grows_by_a_source_map_before_the_first_step(pretrained, tmp_path, capfd):
    directory, network = pretrained
    cfg = config(directory, grown(UPSCALED), STILL)
    run = tiny_run(tmp_path / "run", cfg)
    result = run.train()
    upscaled = with_layers(network, UPSCALED)
    assert_weights(stored(tmp_path / "run", 1), upscaled)
    loss = validation_loss(upscaled, cfg)
    assert result["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert abs(loss - validation_loss(network, cfg)) > 0.01  # growth by copies changes the function
    assert result["depth"] == 6 and run.compilations == 1  # nothing is compiled for the depth before
    training = stored(tmp_path / "run", 1, "training")
    assert training["lineage"].tolist() == [list(UPSCALED), [0, 1, 2, 3, 4, 5]]
    assert training["born"].tolist() == [-1, -1, -1, 0, 0, -1]
    assert "grows to depth 6 after step 0" in capfd.readouterr().err


def test_identity_insertion_changes_no_loss(pretrained, tmp_path):
    directory, network = pretrained
    cfg = config(directory, grown(EXPANDED, "identity"), STILL)
    result = tiny_run(tmp_path / "run", cfg).train()
    assert result["val_loss"] == pytest.approx(validation_loss(network, cfg), rel=1e-6)
    expanded = with_layers(network, EXPANDED)
    with torch.no_grad():
        for i in (2, 5):
            expanded.model.layers[i].self_attn.o_proj.weight.zero_()
            expanded.model.layers[i].mlp.down_proj.weight.zero_()
    assert_weights(stored(tmp_path / "run", 1), expanded)


@pytest.fixture(scope="module")
def _trained():
    return {}


@pytest.fixture
def grown_twice(_trained, pretrained, tmp_path_factory):
    """(config, directory of the finished run, directory of its pretrained model, which may be removed)."""
    if not _trained:
        place = tmp_path_factory.mktemp("twice")
        shutil.copytree(pretrained[0], place / "model")
        cfg = config(place / "model", grown(UPSCALED), TWICE)
        tiny_run(place / "run", cfg).train()
        _trained["run"] = cfg, place / "run", place / "model"
    return _trained["run"]


@pytest.mark.slow
def test_trains_as_if_the_grown_model_were_given(pretrained, grown_twice, tmp_path):
    """Nothing of the smaller model is left behind: neither optimizer state nor schedule."""
    network, (_, directory, _) = pretrained[1], grown_twice
    with_layers(network, UPSCALED).save_pretrained(tmp_path / "upscaled")
    whole = {"depth": 6, "growth": {"start_depth": 6}, "train": {"steps": 2}, "optimizer": CONSTANT}
    tiny_run(tmp_path / "given", config(tmp_path / "upscaled", whole)).train()
    ours, given = stored(directory, 2), stored(tmp_path / "given", 2)
    for found, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    start = network.model.embed_tokens.weight.detach().numpy()
    assert np.abs(ours["embed"]["table"] - start).max() > 0.01  # two steps were taken


@pytest.mark.slow
def test_resumes_to_the_bit_and_needs_the_model_no_more(grown_twice, tmp_path, monkeypatch):
    """Stopped in both stages."""
    cfg, whole, model = grown_twice
    for stop in (1, 3):
        monkeypatch.setattr(StopRequest, "asked", stop_after(stop))
        with pytest.raises(Preempted, match=f"stopped after step {stop}, saved"):
            tiny_run(tmp_path / "run", cfg).train()
        shutil.rmtree(model, ignore_errors=True)
    monkeypatch.setattr(StopRequest, "asked", stop_after(None))
    tiny_run(tmp_path / "run", cfg).train()
    assert_same_run(tmp_path / "run", whole, 4)
    assert stored(tmp_path / "run", 4)["layers"]["attn_norm"]["scale"].shape[0] == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"heads": 2, "kv_heads": 2}},
            r"init_from.path='hf:.*': is of another architecture \(model.head.* there .*, here .*\)",
        ),
        ({"model": {"rope_theta": 5e5}}, r"architecture \(model.rope_theta there 10000.0, here 500000.0\)$"),
        (
            {"depth": 3, "growth": {"start_depth": 3}},
            r"init_from.path='hf:.*': it has depth 4, this run starts at depth 3; set growth.start_depth=4$",
        ),
        ({"init_from": {"what": "all"}}, r"^init_from.what='all': must be params for a pretrained model$"),
        ({"init_from": {"step": 2}}, r"^init_from.step=2: must be 0: a pretrained model has no steps$"),
        (
            {"train": {"sequence_length": 17}},
            r"^train.sequence_length=17: must be at most 16, the longest sequence that hf:.* is made for$",
        ),
        ({"init_from": {"path": "hf:nowhere"}}, r"^hf:nowhere: no such directory"),
        ({"init_from": {"path": "gguf:nowhere"}}, r"^gguf:nowhere: no such file and no such package"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(pretrained, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        tiny_run(tmp_path / "run", config(pretrained[0], changes))
    assert "\n" not in str(caught.value) and list((tmp_path / "run").iterdir()) == []


def test_reads_its_data_in_the_tokenizer_of_the_model(tmp_path):
    """`data.tokenizer=hf:DIR`; the ids mean what they meant to the model."""
    save_pretrained(tmp_path / "model", template="<s> $A", num_hidden_layers=DEPTH)
    reference = f"hf:{tmp_path / 'model'}"
    data = dataclasses.replace(write_texts(tmp_path), tokenizer=reference)
    cfg = dataclasses.replace(config(tmp_path / "model"), data=data)
    corpus = load_corpus(cfg, {}, print)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    row = corpus.train_batch(0, 8, seed=0)[0]
    assert "text number" in theirs.decode(row.tolist()) and corpus.separator_id == theirs.token_to_id("</s>")
    assert 0 not in row  # texts follow one another, without the beginning that a prompt has
    small = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=200))
    with pytest.raises(UserError, match=r"largest token id 279 is outside the model's vocabulary of 200"):
        load_corpus(small, {}, print)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=rf"^data.tokenizer='{reference}': comes without a tokenizer"):
        load_corpus(cfg, {}, print)
