"""Prompts of files and corpora: what is read, where answers start, what is refused."""

import gzip

import numpy as np
import pytest
from probe_runs import MASKED, trained, write_jsonl

from depthgrow_jax.corpora import load_corpus
from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.data.tokenizer import BytesTokenizer, SubwordTokenizer, train_bpe
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.config import PromptConfig
from depthgrow_jax.prompts import Masking, facts, from_corpus, from_file, masking
from depthgrow_jax.subjects import read_config
from depthgrow_jax.train.objective import SpecialTokens

BYTES = BytesTokenizer(DataConfig().separator, DataConfig().mask_token)
PLAIN = {"template": "{prompt}={answer}", "separator_first": False}


def read(path, length=64, tokenizer=BYTES, vocab=258, mask=None, **fields):
    return from_file(PromptConfig(path=str(path), **(PLAIN | fields)), tokenizer, length, vocab, mask)


def test_ids_targets_padding_and_answers(tmp_path):
    """Two records by hand: `ab=cd` (answer from id 3) and `x`, a text without an answer."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "ab", "answer": "cd"}, "", {"text": "xyz"}])
    prompts, found = read(path)
    a, b, c, d, x, y, z, equal, pad = *b"abcdxyz=", 256
    assert prompts.inputs.tolist() == [[a, b, equal, c, d], [x, y, z, pad, pad]]
    assert prompts.targets[0, :4].tolist() == [b, equal, c, d] and prompts.targets[1, :2].tolist() == [y, z]
    assert prompts.scored.tolist() == [[True] * 4 + [False], [True, True, False, False, False]]
    assert prompts.valid.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    # Position 2 predicts `c`, the answer's first; 5 = T says that there is none.
    assert prompts.answer.tolist() == [2, 5]
    assert prompts.inputs.dtype == prompts.targets.dtype == prompts.answer.dtype == np.int32
    expected = {"examples": 2, "length": 5, "shortest": 3, "tokens": 8, "cut": 0, "answers_cut_off": 0}
    assert expected.items() <= found.items() and found["source"] == str(path)


def test_separator_first_and_prompt_field(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ab", "answer": "c"}])
    prompts, _ = read(path, separator_first=True)
    assert prompts.inputs.tolist() == [[256, *b"ab=c"]] and prompts.answer.tolist() == [3]


def test_cut_on_the_right(tmp_path):
    """A cut prompt keeps the target of its last position; an answer beyond the cut is lost."""
    records = [{"prompt": "abcd", "answer": "e"}, {"prompt": "a", "answer": "bcdefg"}, {"text": "ab"}]
    prompts, found = read(write_jsonl(tmp_path / "a.jsonl", records), length=4)
    assert prompts.inputs.shape == (3, 4)
    assert prompts.targets[0].tolist() == list(b"bcd=") and prompts.scored[0].all()
    assert prompts.answer.tolist() == [4, 1, 4]
    assert (found["cut"], found["answers_cut_off"]) == (2, 1)
    exact, found = read(write_jsonl(tmp_path / "b.jsonl", records[:1]), length=5)
    # The answer's first token is the target of the last position that is left.
    assert exact.answer.tolist() == [4] and exact.targets[0, 4] == ord("e")
    assert (found["cut"], found["answers_cut_off"]) == (1, 0)


def test_a_token_across_the_border_belongs_to_the_answer(tmp_path):
    backend = train_bpe(["aab" * 50], 258, ["<s>", "<m>"])
    merged = train_bpe(["xy xy xy"] * 50, 260, ["<s>", "<m>"])
    plain, merging = (SubwordTokenizer(t, 260, 0, 1, "") for t in (backend, merged))
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ax", "answer": "yb"}])
    found = {}
    for name, tokenizer in (("plain", plain), ("merging", merging)):
        prompts, _ = read(path, tokenizer=tokenizer, vocab=260, template="{prompt}{answer}")
        first = prompts.answer[0] + 1
        whole = prompts.inputs[0].tolist()
        found[name] = (tokenizer.decode(whole[:first]), tokenizer.decode(whole[first:]))
    assert found == {"plain": ("ax", "yb"), "merging": ("a", "xyb")}


def test_templates_are_filled_literally(tmp_path):
    record = {"prompt": "{answer} {0}", "answer": "{prompt}"}
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    prompts, _ = read(path, template="Q {prompt} A {answer}.")
    assert bytes(prompts.inputs[0].tolist()) == b"Q {answer} {0} A {prompt}."
    assert bytes(prompts.inputs[0, prompts.answer[0] + 1 :].tolist()) == b"{prompt}."


def test_only_the_first_examples_and_gz(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\r\n{"text": "two"}\nnot JSON\n'))
    prompts, _ = read(path, examples=2)
    assert bytes(prompts.inputs[1].tolist()) == b"two"
    with pytest.raises(UserError, match=r"a.jsonl.gz:3: not JSON"):
        read(path, examples=3)


def test_relative_paths_are_looked_for_below_the_data_root(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    monkeypatch.setenv("DEPTHGROW_DATA", str(tmp_path))
    assert read("a.jsonl")[0].inputs.shape == (1, 3)


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        ([], r"a.jsonl: holds no records"),
        (["", "  "], r"a.jsonl: holds no records"),
        (['{"text": "ab"}', "{text}"], r"a.jsonl:2: not JSON: .*\(column 2\)"),
        (["[1]"], r"a.jsonl:1: holds list; must be a JSON object"),
        (["{}"], r"a.jsonl:1: needs text, or prompt \(or question\) and answer; it has none"),
        (['{"answer": "a", "q": 1}'], r"a.jsonl:1: needs text, .*; it has answer, q"),
        (['{"question": "a"}'], r"it has question"),
        (['{"text": 3}'], r"a.jsonl:1: text holds int, must be text"),
        (['{"question": "a", "answer": null}'], r"a.jsonl:1: answer holds NoneType"),
        (['{"question": " ", "answer": "a"}'], r"a.jsonl:1: question is empty"),
        (['{"question": "a", "answer": ""}'], r"a.jsonl:1: answer is empty"),
        (['{"text": "a"}'], r"a.jsonl:1: is a single token; at least 2 are needed"),
        (['{"text": "\\u00ff\\u00ff"}'], r"a.jsonl:1: token id 195 is outside the vocabulary of 128"),
        (["[" * 100_000], r"a.jsonl:1: "),
    ],
)
def test_wrong_lines(tmp_path, lines, pattern):
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    with pytest.raises(UserError, match=pattern) as error:
        read(path, vocab=128)
    assert "\n" not in str(error.value)


def test_wrong_files(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 9)[:-9])
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"text": "one"}\n')
    for name, pattern in {
        "none.jsonl": r"probe.prompts.path='.*none.jsonl': no such file",
        "text.txt": r"probe.prompts.path='.*text.txt': must be a .jsonl file, optionally .gz",
        "latin.jsonl": r"latin.jsonl:1: cannot be read: ",
        "torn.jsonl.gz": r"torn.jsonl.gz: cannot be read after line \d: ",
        "plain.jsonl.gz": r"plain.jsonl.gz: cannot be read after line 0: ",
    }.items():
        with pytest.raises(UserError, match=pattern):
            read(tmp_path / name)


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    prompts, _ = read(write_jsonl(tmp_path / "a.jsonl", ['{"text": "a\\ud800"}']))
    assert bytes(prompts.inputs[0].tolist()) == "a\ufffd".encode()


def test_hash_follows_tokens_and_answers(tmp_path):
    prompts, found = read(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ab", "answer": "c"}]))
    assert facts(prompts, "elsewhere")["sha256"] == found["sha256"]
    for changed in (prompts._replace(answer=prompts.answer + 1), prompts._replace(inputs=prompts.inputs + 1)):
        assert facts(changed, "")["sha256"] != found["sha256"]


def test_masked_prompts_of_a_file(tmp_path):
    """Hidden positions are scored and predict themselves; the answer is not shifted."""
    mask = Masking(0.5, SpecialTokens(258, 256, 257))
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "abcdefgh" * 4, "answer": "ijkl"}])
    prompts, _ = read(path, mask=mask)
    text = np.frombuffer(b"abcdefgh" * 4 + b"=ijkl", np.uint8)
    assert (prompts.targets[0] == text).all() and prompts.answer.tolist() == [33]
    assert 0.2 < prompts.scored.mean() < 0.8
    assert (prompts.inputs == prompts.targets)[~prompts.scored].all()
    assert (prompts.inputs[prompts.scored] == 257).mean() > 0.5
    with pytest.raises(UserError, match=r"train.mask_rate=1e-09: hides no position of the 1 prompts"):
        read(path, mask=Masking(1e-9, mask.special))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    return trained(root), trained(root, MASKED)


def test_windows_of_a_corpus(runs):
    cfg = read_config(runs[0])
    corpus = load_corpus(cfg, {}, print)
    prompts = from_corpus(corpus, 3, 10, masking(cfg.train, corpus))
    expected = np.concatenate(list(corpus.validation_batches(1, 3)))
    assert (prompts.inputs == expected[:, :10]).all() and (prompts.targets == expected[:, 1:11]).all()
    assert prompts.scored.all() and prompts.valid.all() and (prompts.answer == 10).all()
    available = len(list(corpus.validation_batches(1, 10**6)))
    assert len(from_corpus(corpus, 10**6, 16).inputs) == available
    with pytest.raises(UserError, match=r"probe.prompts.length=17: must be at most 16"):
        from_corpus(corpus, 3, 17)


def test_windows_of_a_masked_corpus(runs):
    cfg = read_config(runs[1])
    corpus = load_corpus(cfg, {}, print)
    mask = masking(cfg.train, corpus)
    assert mask == Masking(0.3, SpecialTokens(258, 256, 257))
    prompts = from_corpus(corpus, 20, 16, mask)
    again = from_corpus(corpus, 20, 16, mask)
    assert all((a == b).all() for a, b in zip(prompts, again, strict=True))
    tokens = np.concatenate(list(corpus.validation_batches(1, 20)))[:, :16]
    # Windows without a hidden position are left out; the others keep their text as targets.
    rows = [row.tolist() for row in tokens]
    assert all(row.tolist() in rows for row in prompts.targets)
    assert prompts.scored.any(axis=1).all() and 0.2 < prompts.scored.mean() < 0.4
    assert (prompts.inputs == prompts.targets)[~prompts.scored].all()
