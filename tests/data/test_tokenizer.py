"""Tokenizers: round trips, special tokens, vocabularies and the cache."""

import dataclasses
import json
import random

import pytest
import tokenizers

from depthgrow_jax.data import DataConfig
from depthgrow_jax.data.tokenizer import BytesTokenizer, build, check_vocabulary, load_json, train_bpe

SEPARATOR, MASK = "<|endoftext|>", "<|mask|>"
TEXTS = ["the cat sat on the mat. " * 20, "def f(x):\n    return x\n" * 20]


def bpe(tmp_path, texts=TEXTS, log=lambda _: None, **changes):
    cfg = DataConfig(**({"bpe_vocab_size": 300} | changes))
    return build(cfg, texts, 300, masked=False, cache_dir=tmp_path, log=log)


def write_json(tmp_path, specials=(SEPARATOR, MASK), change=lambda description: None) -> DataConfig:
    description = json.loads(train_bpe(TEXTS, 280, specials).to_str())
    change(description)
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    return DataConfig(tokenizer=str(tmp_path / "tokenizer.json"))


@pytest.fixture(params=["bpe", "bytes", "json"])
def tokenizer(request, tmp_path):
    if request.param == "json":
        return load_json(write_json(tmp_path), masked=True)
    return bpe(tmp_path) if request.param == "bpe" else BytesTokenizer(SEPARATOR, MASK)


def test_round_trip_of_any_unicode(tokenizer):
    rng = random.Random(0)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = ["".join(map(chr, rng.choices(points, k=rng.randrange(30)))) for _ in range(200)]
    texts += ["", " a  b ", "\r\n\t\0", "e\u0301 \u00e9", SEPARATOR, f"{MASK}x", *TEXTS]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids.tolist()


def test_spelling_of_a_special_token_is_plain_text(tokenizer):
    for text in (SEPARATOR, f"a{SEPARATOR}b{MASK}"):
        ids = [*tokenizer.encode(text), *tokenizer.encode_batch([text])[0].tolist()]
        assert tokenizer.separator_id not in ids and tokenizer.mask_id not in ids
    assert tokenizer.decode([tokenizer.separator_id, tokenizer.mask_id]) == SEPARATOR + MASK


def test_bytes_ids_are_bytes():
    tokenizer = BytesTokenizer(SEPARATOR, MASK)
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 33]
    assert (tokenizer.separator_id, tokenizer.mask_id, tokenizer.vocab_size) == (256, 257, 258)
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_bpe_ids(tmp_path):
    tokenizer = bpe(tmp_path)
    assert (tokenizer.separator_id, tokenizer.mask_id) == (0, 1)
    assert 258 < tokenizer.vocab_size <= 300
    assert len(tokenizer.encode(" the")) == 1
    assert (
        train_bpe(TEXTS, 300, (SEPARATOR, MASK)).to_str() == train_bpe(TEXTS, 300, (SEPARATOR, MASK)).to_str()
    )


def test_bpe_is_trained_once_and_again_when_anything_changes(tmp_path):
    log = []
    first = bpe(tmp_path, log=log.append)
    assert bpe(tmp_path, log=log.append).fingerprint == first.fingerprint and len(log) == 1
    bpe(tmp_path, bpe_vocab_size=290, log=log.append)
    bpe(tmp_path, texts=[*TEXTS, "more"], log=log.append)
    bpe(tmp_path, mask_token="<m>", log=log.append)
    bpe(tmp_path, separator="<s>", log=log.append)
    assert len(log) == 5


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b.replace(b"Bytes", b"bytes", 1) + b" "]
)
def test_damaged_bpe_is_trained_again(damage, tmp_path):
    fingerprint = bpe(tmp_path).fingerprint
    (path,) = tmp_path.glob("bpe-*.json")
    path.write_bytes(damage(path.read_bytes()))
    log = []
    assert bpe(tmp_path, log=log.append).fingerprint == fingerprint
    assert any("damaged" in line for line in log)


def test_json_takes_ids_from_the_file(tmp_path):
    tokenizer = load_json(write_json(tmp_path, (MASK, "<pad>", SEPARATOR)), masked=True)
    assert (tokenizer.separator_id, tokenizer.mask_id, tokenizer.vocab_size) == (2, 0, 280)


def test_json_adds_nothing_to_documents(tmp_path):
    """Truncation, padding, templates and specials not marked special are set aside."""

    def change(description):
        description["truncation"] = {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        description["padding"] = {
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": SEPARATOR,
        }
        start = {"SpecialToken": {"id": SEPARATOR, "type_id": 0}}
        description["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SEPARATOR: {"id": SEPARATOR, "ids": [0], "tokens": [SEPARATOR]}},
        }
        for token in description["added_tokens"]:
            token["special"] = False

    plain = load_json(write_json(tmp_path), masked=True)
    changed = load_json(write_json(tmp_path, change=change), masked=True)
    text = f"the cat {SEPARATOR}{MASK} zebra"
    assert changed.encode(text) == plain.encode(text) and 0 not in changed.encode(text)


def test_json_needs_a_separator_and_a_mask_only_if_masked(tmp_path, fails):
    cfg = write_json(tmp_path, (SEPARATOR,))
    assert load_json(cfg, masked=False).mask_id == -1
    assert f"data.mask_token={MASK!r}: must be in the vocabulary" in fails(load_json, cfg, masked=True)
    cfg = dataclasses.replace(cfg, separator="</s>")
    assert "data.separator='</s>': must be in the vocabulary" in fails(load_json, cfg, masked=False)


def test_json_that_cannot_be_read_is_named(tmp_path, fails):
    cfg = DataConfig(tokenizer=str(tmp_path / "t.json"))
    assert "no such file; must be bpe, bytes or the path" in fails(load_json, cfg, masked=False)
    for content in ("{", "{}", "[]", '{"model": {"type": "None"}}'):
        (tmp_path / "t.json").write_text(content)
        message = fails(load_json, cfg, masked=False)
        assert "t.json" in message and "not a readable tokenizer.json" in message


def test_vocabulary_must_hold_every_id(tmp_path, fails):
    check_vocabulary(DataConfig(tokenizer="bytes"), 258, masked=True)
    message = fails(check_vocabulary, DataConfig(tokenizer="bytes"), 257, masked=True)
    assert "largest token id 257 is outside the model's vocabulary of 257" in message
    cfg = write_json(tmp_path)
    check_vocabulary(cfg, 280, masked=True)
    assert "largest token id 279" in fails(check_vocabulary, cfg, 279, masked=True)
    assert "largest token id 299" in fails(check_vocabulary, DataConfig(bpe_vocab_size=300), 299, masked=True)


def test_bpe_vocabulary_must_hold_all_bytes(fails):
    check_vocabulary(DataConfig(), 258, masked=False)
    assert "model vocabulary=257: a bpe needs at least 258" in fails(
        check_vocabulary, DataConfig(), 257, masked=False
    )
    cfg = DataConfig(bpe_vocab_size=100)
    assert "data.bpe_vocab_size=100" in fails(check_vocabulary, cfg, 500, masked=False)


def test_smallest_bpe_is_bytes(tmp_path):
    tokenizer = build(DataConfig(), TEXTS, 258, masked=False, cache_dir=tmp_path, log=print)
    assert tokenizer.vocab_size == 258 and len(tokenizer.encode("the")) == 3


def test_library_version_is_part_of_the_key(tmp_path, monkeypatch):
    bpe(tmp_path)
    monkeypatch.setattr(tokenizers, "__version__", "other")
    bpe(tmp_path)
    assert len(list(tmp_path.glob("bpe-*.json"))) == 2
