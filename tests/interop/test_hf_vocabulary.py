"""The tokenizer of a transformers directory: what it puts before a text, what ends one, what is refused."""

import json

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from depthgrow_jax.data.tokenizer import train_bpe
from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.hf_vocabulary import read_vocabulary

TEXTS = ["a rose is a rose", "is a rose"]
SPECIALS = ("<s>", "</s>", "<|endoftext|>")


@pytest.fixture
def save(tmp_path):
    """Writes a tokenizer of 270 ids and other files; returns the directory."""

    def write(specials=SPECIALS, template=None, padded=False, **files):
        backend = train_bpe(TEXTS, 270, specials)
        if template:
            pairs = [(name, specials.index(name)) for name in specials if name in template]
            backend.post_processor = TemplateProcessing(single=template, special_tokens=pairs)
        if padded:
            backend.enable_padding(direction="left", pad_id=2, pad_token="<|endoftext|>", length=16)
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name.replace("__", ".")).write_text(text)
        return tmp_path

    return write


def refusal(directory, config=None, vocab_size=300) -> str:
    with pytest.raises(UserError) as caught:
        read_vocabulary(directory, config or {}, vocab_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_tokenizer_is_none(tmp_path):
    assert read_vocabulary(tmp_path, {}, 300) is None


def test_the_description_is_handed_on_with_its_files(save):
    directory = save(
        tokenizer_config__json={"eos_token": "</s>"},
        special_tokens_map__json={"eos_token": "</s>"},
        generation_config__json={"eos_token_id": 1},
        chat_template__jinja="{{ messages }} é",
        other__json={},
    )
    vocabulary = read_vocabulary(directory, {}, 300)
    assert vocabulary is not None
    assert vocabulary.json == (directory / "tokenizer.json").read_text()
    assert {name: vocabulary.files[name] for name in sorted(vocabulary.files)} == {
        "chat_template.jinja": "{{ messages }} é",
        "generation_config.json": '{"eos_token_id": 1}',
        "special_tokens_map.json": '{"eos_token": "</s>"}',
        "tokenizer_config.json": '{"eos_token": "</s>"}',
    }


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (None, ()),
        ("<s> $A", (0,)),
        ("<s> <s> $A </s>", (0, 0)),
        ("$A </s>", ()),
        ("<|endoftext|> <s> $A </s>", (2, 0)),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_prefix_is_what_stands_before_a_text(save, template, prefix, padded):
    vocabulary = read_vocabulary(save(template=template, padded=padded), {}, 300)
    assert vocabulary is not None
    assert vocabulary.prefix == prefix


@pytest.mark.parametrize(
    ("files", "config", "ends"),
    [
        ({"generation_config__json": {"eos_token_id": [1, 2]}}, {"eos_token_id": 0}, (1, 2)),
        ({"generation_config__json": {"eos_token_id": None}}, {"eos_token_id": 0}, (0,)),
        ({"generation_config__json": {}}, {"eos_token_id": [2, 0]}, (2, 0)),
        ({"tokenizer_config__json": {"eos_token": "</s>"}}, {}, (1,)),
        ({"tokenizer_config__json": {"eos_token": {"content": "<s>"}}}, {"eos_token_id": None}, (0,)),
        ({"tokenizer_config__json": {"eos_token": None}}, {}, ()),
        ({}, {}, ()),
    ],
)
def test_ends_come_from_the_first_file_that_names_them(save, files, config, ends):
    vocabulary = read_vocabulary(save(**files), config, 300)
    assert vocabulary is not None
    assert vocabulary.ends == ends


@pytest.mark.parametrize(
    ("specials", "files", "config", "separator"),
    [
        (SPECIALS, {"generation_config__json": {"eos_token_id": 1}}, {}, "<|endoftext|>"),
        (("<s>", "</s>"), {"generation_config__json": {"eos_token_id": [1, 0]}}, {}, "</s>"),
        # A row of the embedding that no token has.
        (("<s>", "</s>"), {"generation_config__json": {"eos_token_id": [299, 1]}}, {}, "</s>"),
        (("<s>", "</s>"), {}, {"bos_token_id": 0}, "<s>"),
        (("<s>", "</s>"), {"tokenizer_config__json": {"bos_token": "<s>"}}, {}, "<s>"),
    ],
)
def test_separator(save, specials, files, config, separator):
    vocabulary = read_vocabulary(save(specials=specials, **files), config, 300)
    assert vocabulary is not None
    assert vocabulary.separator == separator
    assert separator in tokenizers.Tokenizer.from_str(vocabulary.json).get_vocab()


def test_a_vocabulary_without_a_separator(save):
    message = refusal(save(specials=("<s>", "</s>")))
    assert "tokenizer_config.json: names no eos_token or bos_token" in message


def test_a_vocabulary_larger_than_the_embedding(save):
    directory = save()
    size = max(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab().values()) + 1
    assert read_vocabulary(directory, {}, size) is not None
    message = refusal(directory, vocab_size=size - 1)
    assert f"tokenizer.json: largest token id {size - 1} is outside the embedding" in message
    assert f"vocab_size={size - 1}" in message


@pytest.mark.parametrize(
    ("files", "config", "parts"),
    [
        ({"tokenizer__json": "{"}, {}, ["tokenizer.json", "not a readable"]),
        ({"tokenizer__json": '{"version": "1.0"}'}, {}, ["tokenizer.json", "not a readable"]),
        ({"tokenizer_config__json": "["}, {}, ["tokenizer_config.json"]),
        ({"tokenizer_config__json": "[]"}, {}, ["tokenizer_config.json", "JSON object"]),
        ({"special_tokens_map__json": "nothing"}, {}, ["special_tokens_map.json"]),
        ({"generation_config__json": "{"}, {}, ["generation_config.json"]),
        (
            {"generation_config__json": {"eos_token_id": "1"}},
            {},
            ["generation_config.json: eos_token_id='1'", "299"],
        ),
        ({"generation_config__json": {"eos_token_id": [1, 300]}}, {}, ["eos_token_id=[1, 300]"]),
        ({}, {"eos_token_id": -1}, ["config.json: eos_token_id=-1"]),
        ({}, {"bos_token_id": True}, ["config.json: bos_token_id=True"]),
        (
            {"tokenizer_config__json": {"eos_token": "<nothing>"}},
            {},
            ["eos_token='<nothing>'", "tokenizer.json"],
        ),
        ({"tokenizer_config__json": {"bos_token": 3}}, {}, ["tokenizer_config.json: bos_token=3"]),
    ],
)
def test_malformed_files_are_named(save, files, config, parts):
    message = refusal(save(**files), config)
    assert all(part in message for part in parts), message
