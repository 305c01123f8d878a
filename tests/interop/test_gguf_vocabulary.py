"""The tokenizer in a GGUF file: the ids of transformers' converter, and no control token for any text."""

import json

import pytest
import tokenizers

from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.data.tokenizer import load_json
from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.gguf_files import open_gguf
from depthgrow_jax.interop.gguf_vocabulary import read_vocabulary

torch = pytest.importorskip(
    "torch", reason="the weights of GGUF tests come from torch (requirements-dev.txt)"
)
transformers = pytest.importorskip("transformers", reason="GGUF is compared with transformers")
pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")

import tiny_gguf  # noqa: E402
import tiny_hf  # noqa: E402

TEXTS = [
    "Hello world, hello  world",
    "I'm sure we'll say they've IT'S it's",
    "In 1985, 12,345.67 dollars and 1234567",
    "naïve café “quotes” 中文字 Привет",
    "😀👍🏽 family",
    "a  b   c    d\t\te ",
    "line\n\nline\r\n  indented\n\tdef f(x):\n        return x**2  # ok\n",
]
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _byte_level_keys(pre, extra=()):
    """Metadata of a byte-level BPE that `tokenizers` trains here; controls first, then `extra` at the end."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=CONTROLS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), *extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS)),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _sentencepiece_keys():
    """Metadata of a SentencePiece BPE: scores fall from merge to merge, ids as well."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        TEXTS * 3, tokenizers.trainers.BpeTrainer(vocab_size=200, show_progress=False)
    )
    vocabulary = json.loads(backend.to_str())["model"]["vocab"]
    pieces = [piece for piece in sorted(vocabulary, key=vocabulary.get) if piece not in "中文字"]
    pieces += ["<", ">", "<s"]  # With these the merges could make "<s>".
    score = {piece: -float(rank) for rank, piece in enumerate(pieces)}
    pieces = pieces[::-1]
    special, raw = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *raw, *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [score[piece] for piece in pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _read(keys, vocab_size=1000):
    vocabulary = read_vocabulary(keys, "FILE", vocab_size, 512)
    assert vocabulary is not None
    backend = tokenizers.Tokenizer.from_str(vocabulary.json)
    backend.encode_special_tokens = True
    return vocabulary, backend


def _ids(backend, text):
    return backend.encode(text, add_special_tokens=False).ids


def _of_transformers(tmp_path, keys):
    """The tokenizer that transformers' converter makes of a file with these keys."""
    size = len(keys["tokenizer.ggml.tokens"])
    model = tiny_hf.make(tmp_path / "hf", "llama", vocab_size=size)
    path = tiny_gguf.write(tmp_path / "tiny.gguf", model, keys=keys)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    vocabulary = open_gguf(f"gguf:{path}").vocabulary
    assert vocabulary is not None
    return vocabulary, theirs


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_ids_equal_those_of_transformers(tmp_path, pre):
    vocabulary, theirs = _of_transformers(tmp_path, _byte_level_keys(pre))
    ours = tokenizers.Tokenizer.from_str(vocabulary.json)
    for text in TEXTS:
        ids = _ids(ours, text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.encode(CONTROLS[1]).ids[-1:] == [1]


def test_sentencepiece_ids_equal_those_of_transformers(tmp_path):
    vocabulary, theirs = _of_transformers(tmp_path, _sentencepiece_keys())
    ours = tokenizers.Tokenizer.from_str(vocabulary.json)
    for text in TEXTS:
        ids = _ids(ours, text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert any(3 <= i < 259 for i in _ids(ours, TEXTS[3]))  # Bytes of characters that are no tokens.
    assert vocabulary.prefix == (1,)


def test_splits_differ_where_their_models_do():
    pieces = ["12", "123", "Ġ1", "ĠĠ", "Ġx"]
    merges = ["1 2", "12 3", "Ġ 1", "Ġ Ġ", "Ġ x"]

    def spelt(pre, text):
        keys = _byte_level_keys(pre)
        found = [*keys["tokenizer.ggml.tokens"]]
        keys["tokenizer.ggml.tokens"] = found + [piece for piece in pieces if piece not in found]
        keys["tokenizer.ggml.merges"] = merges
        del keys["tokenizer.ggml.token_type"]
        return _read(keys)[1].encode(text).tokens

    assert spelt("gpt-2", " 1234") == ["Ġ", "123", "4"]
    assert spelt("smollm", " 1234") == ["Ġ", "1", "2", "3", "4"]
    assert spelt("qwen2", "1234") == ["1", "2", "3", "4"]
    assert spelt("llama-bpe", "1234")[-2:] == ["123", "4"]
    assert spelt("smollm", "  1") == ["ĠĠ", "1"] and spelt("gpt-2", "  x") == ["Ġ", "Ġx"]


def test_llama_3_takes_a_word_that_is_a_token_whole():
    keys = _byte_level_keys("llama-bpe", extra=["unreachable"])
    assert _read(keys)[1].encode("unreachable", add_special_tokens=False).tokens == ["unreachable"]
    assert "unreachable" not in _read(keys | {"tokenizer.ggml.pre": "gpt-2"})[1].encode("unreachable").tokens


def test_qwen_2_composes_characters():
    backend = _read(_byte_level_keys("qwen2"))[1]
    assert _ids(backend, "cafe\u0301") == _ids(backend, "caf\u00e9")
    backend = _read(_byte_level_keys("gpt-2"))[1]
    assert _ids(backend, "cafe\u0301") != _ids(backend, "caf\u00e9")


@pytest.mark.parametrize(
    "keys", [_byte_level_keys("gpt-2"), _byte_level_keys("llama-bpe"), _sentencepiece_keys()]
)
def test_no_text_becomes_a_control_token(tmp_path, keys):
    vocabulary, _ = _read(keys)
    path = tmp_path / "tokenizer.json"
    path.write_text(vocabulary.json)
    tokenizer = load_json(DataConfig(tokenizer=str(path), separator=vocabulary.separator), masked=False)
    controls = [i for i, kind in enumerate(keys["tokenizer.ggml.token_type"]) if kind in (2, 3, 6)][:8]
    text = "".join(keys["tokenizer.ggml.tokens"][i] for i in controls)
    assert set(controls).isdisjoint(tokenizer.encode(text))
    assert tokenizer.decode([1]) == keys["tokenizer.ggml.tokens"][1]


def test_a_user_defined_token_stays_whole():
    keys = _byte_level_keys("gpt-2", extra=["<think>"])
    backend = _read(keys)[1]
    assert len(_ids(backend, "<think>")) > 1
    keys["tokenizer.ggml.token_type"][-1] = 4
    backend = _read(keys)[1]
    assert _ids(backend, "<think>") == [len(keys["tokenizer.ggml.tokens"]) - 1]


def test_prefix_ends_and_separator():
    keys = _byte_level_keys("gpt-2")
    vocabulary, _ = _read(keys)
    assert (vocabulary.prefix, vocabulary.ends, vocabulary.separator) == ((), (2,), "<|endoftext|>")
    vocabulary, backend = _read(
        keys | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 0}
    )
    assert (vocabulary.prefix, vocabulary.ends) == ((1,), (2, 0))
    assert backend.encode("Hello").ids == [1, *_ids(backend, "Hello")]
    assert _read(_byte_level_keys("llama-bpe"))[0].prefix == (1,)
    assert _read(_byte_level_keys("llama-bpe") | {"tokenizer.ggml.add_bos_token": False})[0].prefix == ()
    assert _read(_sentencepiece_keys())[0].separator == "</s>"


def test_the_files_serve_transformers(tmp_path):
    keys = _byte_level_keys("llama-bpe") | {
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>"
    }
    vocabulary, backend = _read(keys)
    (tmp_path / "tokenizer.json").write_text(vocabulary.json)
    for name, content in vocabulary.files.items():
        (tmp_path / name).write_text(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == [1, *_ids(backend, text)]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.model_max_length) == (1, 2, 512)
    chat = theirs.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert chat == "Hello<|im_end|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.pre": "tekken"},
            "tokenizer.ggml.pre='tekken': must be one of gpt-2, smollm, qwen2, llama-bpe",
        ),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre='': must be one of"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert': must be one of gpt2, llama"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing or no list of str"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens holds 'a' twice"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for 330 tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing or no list of str"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'; must be two tokens"),
        ({"tokenizer.ggml.merges": ["é é"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ({"tokenizer.ggml.eos_token_id": 330}, "tokenizer.ggml.eos_token_id=330: must be an id of 0 to 329"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            "bos_token_id is missing",
        ),
    ],
)
def test_what_is_refused(change, message):
    keys = {name: value for name, value in (_byte_level_keys("gpt-2") | change).items() if value is not None}
    with pytest.raises(UserError, match=r"^FILE") as caught:
        read_vocabulary(keys, "FILE", 1000, 512)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_vocabulary_larger_than_the_embedding(tmp_path):
    model = tiny_hf.make(tmp_path / "hf", "llama", vocab_size=300)
    path = tiny_gguf.write(tmp_path / "tiny.gguf", model, keys=_byte_level_keys("gpt-2"))
    with pytest.raises(
        UserError, match=r"tokenizer\.ggml\.tokens holds 330 tokens, the embedding has 300 rows"
    ):
        open_gguf(f"gguf:{path}")


def test_a_file_without_a_tokenizer():
    assert read_vocabulary({}, "FILE", 10, 10) is None
    assert read_vocabulary({"tokenizer.ggml.model": "no_vocab"}, "FILE", 10, 10) is None
