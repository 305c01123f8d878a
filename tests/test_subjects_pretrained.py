"""A pretrained network as a subject: its own function, its own tokenizer, and the text that it is shown."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from depthgrow_jax import model
from depthgrow_jax.corpora import corpus_of, tokenizer_of, vocabulary_of, with_tokenizer
from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.data.tokenizer import train_bpe
from depthgrow_jax.errors import UserError
from depthgrow_jax.interop import open_model
from depthgrow_jax.subjects import load_network, load_pretrained
from depthgrow_jax.train.config import MeshConfig

pytest.importorskip("torch", reason="the networks are compared with those of torch")
pytest.importorskip("transformers", reason="the networks are compared with those of transformers")

from tests.interop import tiny_hf

ONE_DEVICE = MeshConfig(data=1)
TEXTS = [f"text number {number} " * 20 for number in range(20)]
BEGIN, END = 0, 1
ROWS = 300  # of the embedding; the tokenizer has fewer ids


def save_pretrained(directory: pathlib.Path, *, template: str | None = None, **fields: Any):
    """A tiny random model with a tokenizer of 280 ids; returns the model.

    Args:
      template: of the tokenizer, such as `<s> $A`.
      fields: of the config of transformers.
    """
    fields = {"vocab_size": ROWS, **fields}
    network = tiny_hf.make(directory, "llama", **fields)
    backend = train_bpe(TEXTS, 280, ("<s>", "</s>"))
    if template:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", BEGIN), ("</s>", END)]
        )
    backend.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return network


def write_texts(place: pathlib.Path, texts=TEXTS) -> DataConfig:
    """Writes `texts` below `place`; what a network is shown of them."""
    (place / "texts").mkdir(parents=True)
    for number, text in enumerate(texts):
        (place / "texts" / f"{number:02d}.txt").write_text(text)
    shown = DataConfig(source="files", path=str(place / "texts"), cache_dir=str(place / "cache"))
    return dataclasses.replace(shown, validation_fraction=0.2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory, model of transformers, the text that it is shown)."""
    place = tmp_path_factory.mktemp("pretrained")
    network = save_pretrained(place / "model", template="<s> $A", max_position_embeddings=40)
    return place / "model", network, write_texts(place)


def test_computes_what_transformers_computes(saved):
    directory, network, text = saved
    loaded = load_pretrained(f"hf:{directory}", text, mesh=ONE_DEVICE)
    tokens = np.random.default_rng(0).integers(0, ROWS, (2, 40))
    with jax.default_matmul_precision("highest"):
        subject = loaded.subject
        found = model.apply(subject.cfg, subject.params, jnp.asarray(tokens), program=subject.program).logits
    np.testing.assert_allclose(found, tiny_hf.logits(network, tokens), rtol=0, atol=2e-5)
    assert loaded.step == 0 and loaded.subject.steps == loaded.meta["depth"] == 2
    assert loaded.context == loaded.config.train.sequence_length == 40
    fingerprint = open_model(f"hf:{directory}").fingerprint
    assert loaded.facts["run"] == f"hf:{directory}" and loaded.facts["config_hash"] == fingerprint
    assert loaded.facts["lineage"] == [[0, 1]] and loaded.facts["objective"] == "causal"


def test_on_a_mesh_and_in_another_dtype(saved):
    directory, network, text = saved
    loaded = load_network(
        f"hf:{directory}", flag="--model", text=text, mesh=MeshConfig(fsdp=4), dtype="bfloat16"
    )
    table = loaded.subject.params["embed"]["table"]
    assert loaded.subject.devices == 8 and not table.sharding.is_fully_replicated
    assert loaded.subject.cfg.dtype == "bfloat16" and table.dtype == np.float32
    np.testing.assert_array_equal(table, network.model.embed_tokens.weight.detach().numpy())


def test_reads_the_text_in_its_own_tokenizer(saved):
    directory, _, text = saved
    loaded = load_pretrained(f"hf:{directory}", text, mesh=ONE_DEVICE)
    corpus = corpus_of(loaded, print)
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = theirs.encode(TEXTS[3], add_special_tokens=False).ids
    assert tokenizer_of(loaded, print).encode(TEXTS[3]) == corpus.tokenizer.encode(TEXTS[3]) == ids
    assert corpus.separator_id == END  # there is no <|endoftext|> in its vocabulary
    # Every document follows another after one separator.
    tokens = np.concatenate([part.tokens for c in corpus.components for part in (c.train, c.validation)])
    documents = [tuple(theirs.encode(t, add_special_tokens=False).ids) for t in TEXTS]
    cuts = np.flatnonzero(tokens == END)
    assert sorted(tuple(part[part != END]) for part in np.split(tokens, cuts[:-1] + 1)) == sorted(documents)
    vocabulary = vocabulary_of(loaded, print)
    assert vocabulary is not None and (vocabulary.prefix, vocabulary.ends) == ((BEGIN,), (END,))


def test_the_hash_of_the_data_is_that_of_the_text_and_the_tokenizer(saved, tmp_path):
    directory, _, text = saved

    def data_hash(shown: DataConfig) -> str:
        return corpus_of(load_pretrained(f"hf:{directory}", shown, mesh=ONE_DEVICE), print).data_hash

    first = data_hash(text)
    assert data_hash(dataclasses.replace(text, cache_dir=str(tmp_path / "cache"))) == first
    assert data_hash(write_texts(tmp_path / "other", [*TEXTS[1:], "another text " * 30])) != first
    # A tokenizer that is named goes before the model's own.
    train_bpe(TEXTS, 270, ("<|endoftext|>",)).save(str(tmp_path / "tokenizer.json"))
    assert data_hash(dataclasses.replace(text, tokenizer=str(tmp_path / "tokenizer.json"))) != first


def test_a_separator_that_is_given_goes_before_the_vocabulary_s(saved):
    directory, _, text = saved
    shown = dataclasses.replace(text, tokenizer=f"hf:{directory}")
    assert with_tokenizer(shown, print).separator == "</s>"
    assert with_tokenizer(dataclasses.replace(shown, separator="<s>"), print).separator == "<s>"
    with pytest.raises(UserError, match=r"data.separator='<x>': must be in the vocabulary"):
        corpus_of(
            load_pretrained(f"hf:{directory}", dataclasses.replace(text, separator="<x>"), mesh=ONE_DEVICE),
            print,
        )


def test_a_model_without_tokenizer_needs_one_that_is_named(saved, tmp_path):
    _, _, text = saved
    tiny_hf.make(tmp_path / "bare", "llama", vocab_size=ROWS)
    reference = f"hf:{tmp_path / 'bare'}"
    loaded = load_pretrained(reference, text, mesh=ONE_DEVICE)
    with pytest.raises(UserError) as caught:
        corpus_of(loaded, print)
    assert str(caught.value).startswith(
        f"data.tokenizer={reference!r}: comes without a tokenizer; give a tokenizer.json with "
    )
    with pytest.raises(UserError, match=rf"^{reference}: comes without a tokenizer, which must lie beside"):
        tokenizer_of(loaded, print)
    train_bpe(TEXTS, 270, ("<|endoftext|>",)).save(str(tmp_path / "tokenizer.json"))
    text = dataclasses.replace(text, tokenizer=str(tmp_path / "tokenizer.json"))
    loaded = load_pretrained(reference, text, mesh=ONE_DEVICE)
    assert corpus_of(loaded, print).vocab_size == 270 and vocabulary_of(loaded, print) is None


def test_refusals(saved, tmp_path):
    directory, _, text = saved
    with pytest.raises(UserError, match=r"^--step=3: is for --run; --other='hf:.*' has no steps$"):
        load_network(f"hf:{directory}", 3, flag="--other", text=text)
    with pytest.raises(UserError, match=r"mesh.fsdp=3: must divide the 8 devices"):
        load_pretrained(f"hf:{directory}", text, mesh=MeshConfig(fsdp=3))
    with pytest.raises(UserError, match=r"hf:nowhere: no such directory"):
        load_network("hf:nowhere", flag="--model")
