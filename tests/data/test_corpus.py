"""The corpus: split, packing, order of batches, cache and limits."""

import concurrent.futures
import dataclasses
import random
import string

import numpy as np
import pytest

from depthgrow_jax.data import DataConfig, SourceConfig, corpus, load
from depthgrow_jax.data.packing import Windows, pack
from depthgrow_jax.data.splits import digest, held_out
from depthgrow_jax.data.tokenizer import BytesTokenizer

T = 8


def scribble(seed: int, alphabet: str) -> str:
    """Random letters, so that no two windows of a corpus are equal."""
    rng = random.Random(seed)
    return "".join(rng.choices(alphabet, k=rng.randrange(5, 40)))


TEXTS = [scribble(i, string.ascii_letters) for i in range(60)]


def get(cfg, **changes):
    return load(cfg, **({"sequence_length": T, "vocab_size": 300} | changes))


def expected_windows(texts) -> list[tuple]:
    tokens = [token for text in texts for token in [*text.encode(), 256]]
    return [tuple(tokens[i : i + T + 1]) for i in range(0, len(tokens) - T, T)]


def as_rows(batches) -> list[tuple]:
    return [tuple(row.tolist()) for batch in batches for row in batch]


def test_packed_tokens_and_windows():
    tokens = pack(["ab", "é"], BytesTokenizer("s", "m"))
    assert tokens.tolist() == [97, 98, 256, 0xC3, 0xA9, 256] and tokens.dtype == np.uint16
    windows = Windows(tokens, 2)
    assert [w.tolist() for w in map(windows.__getitem__, range(len(windows)))] == [
        [97, 98, 256],
        [256, 0xC3, 0xA9],
    ]
    assert windows[0].dtype == np.int32
    assert [len(Windows(np.zeros(n), 2)) for n in (0, 1, 2, 3, 4, 5)] == [0, 0, 0, 1, 1, 2]


def test_large_vocabularies_are_packed_as_int32():
    assert pack(["a"], BytesTokenizer("s", "m", vocab_size=2**16)).dtype == np.uint16
    tokens = pack(["a"], BytesTokenizer("s", "m", vocab_size=70_000, separator_id=69_999))
    assert tokens.dtype == np.int32 and tokens.tolist() == [97, 69_999]


def test_split_is_by_content_alone(files_config, is_held_out):
    train = expected_windows([t for t in TEXTS if not is_held_out(t, 0.2)])
    validation = expected_windows([t for t in TEXTS if is_held_out(t, 0.2)])
    data = get(files_config(TEXTS))
    assert data.stats["train_sequences"] == len(train) and data.stats["validation_sequences"] == len(
        validation
    )
    assert sorted(as_rows(data.train_batch(s, 1, 0) for s in range(len(train)))) == sorted(train)
    assert sorted(as_rows(data.validation_batches(1, 10_000))) == sorted(validation)


def test_stats_by_hand(files_config, is_held_out):
    data = get(files_config(TEXTS))
    held = [t for t in TEXTS if is_held_out(t, 0.2)]
    assert data.stats["documents"] == 60 and data.stats["validation_documents"] == len(held)
    assert data.stats["train_documents"] == 60 - len(held)
    assert data.stats["validation_tokens"] == sum(len(t) + 1 for t in held)
    assert data.stats["train_tokens"] == sum(len(t) + 1 for t in TEXTS) - data.stats["validation_tokens"]
    assert data.stats["bytes"] == {"files": sum(map(len, TEXTS))}
    assert (data.vocab_size, data.separator_id, data.mask_id) == (258, 256, 257)


def test_every_sequence_comes_once_an_epoch_in_a_new_order(files_config):
    data = get(files_config(TEXTS))
    n = data.stats["train_sequences"]
    rows = as_rows(data.train_batch(s, 5, 3) for s in range(3 * n // 5 + 1))
    epochs = [rows[i * n : (i + 1) * n] for i in range(3)]
    assert len(set(rows)) == n > 50
    assert all(len(set(epoch)) == n for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_batch_is_a_pure_function_of_seed_and_step(files_config):
    data, again = get(files_config(TEXTS)), get(files_config(TEXTS))
    forwards = [data.train_batch(s, 4, 7) for s in range(10)]
    for step in reversed(range(10)):
        np.testing.assert_array_equal(again.train_batch(step, 4, 7), forwards[step])
    # Rows step * B onwards of one stream, whatever the batch size.
    np.testing.assert_array_equal(np.concatenate(forwards), data.train_batch(0, 40, 7))
    assert not np.array_equal(data.train_batch(0, 40, 8), data.train_batch(0, 40, 7))
    assert data.train_batch(10**9, 4, 2**40).shape == (4, T + 1)


def test_processes_share_the_batch_in_contiguous_slices(files_config):
    data = get(files_config(TEXTS))
    parts = [data.train_batch(5, 12, 1, process_index=p, process_count=3) for p in range(3)]
    assert [p.shape for p in parts] == [(4, T + 1)] * 3
    np.testing.assert_array_equal(np.concatenate(parts), data.train_batch(5, 12, 1))
    whole = list(data.validation_batches(4, 3))
    halves = [list(data.validation_batches(4, 3, process_index=p, process_count=2)) for p in range(2)]
    for batch, first, second in zip(whole, *halves, strict=True):
        np.testing.assert_array_equal(np.concatenate([first, second]), batch)


def test_validation_batches_are_fixed_and_whole(files_config):
    data = get(files_config(TEXTS))
    n = data.stats["validation_sequences"]
    batches = list(data.validation_batches(3, 10_000))
    assert len(batches) == n // 3 and all(b.shape == (3, T + 1) and b.dtype == np.int32 for b in batches)
    assert as_rows(data.validation_batches(3, 2)) == as_rows(batches)[:6]
    assert len(set(as_rows(batches))) == 3 * (n // 3)


def mixture(tmp_path, write_jsonl, weights, **changes) -> DataConfig:
    a = SourceConfig(
        "files", write_jsonl("a.jsonl", [scribble(i, "abcdefgh") for i in range(30)]), weight=weights[0]
    )
    b = SourceConfig(
        "files", write_jsonl("b.jsonl", [scribble(i, "stuvwxyz") for i in range(80)]), weight=weights[1]
    )
    fields = {"mixture": (("a", a), ("b", b)), "tokenizer": "bytes", "validation_fraction": 0.2}
    return DataConfig(**(fields | {"cache_dir": str(tmp_path / "cache")} | changes))


def test_mixture_draws_by_weight_and_covers_each_component(tmp_path, write_jsonl):
    data = get(mixture(tmp_path, write_jsonl, (3.0, 1.0)))
    rows = as_rows(data.train_batch(s, 8, 0) for s in range(100))
    from_a = [row for row in rows if min(row) < ord("i")]
    assert abs(len(from_a) - 600) <= 2
    n = len(data.components[0].train)
    assert len(set(from_a[:n])) == n and len(set(from_a)) == n
    a_of_validation = [min(row) < ord("i") for row in as_rows(data.validation_batches(4, 4))]
    assert len(a_of_validation) == 16 and abs(sum(a_of_validation) - 12) <= 1
    assert sorted(data.stats["bytes"]) == ["a", "b"]


def test_mixture_components_of_one_size_differ_in_order(tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", TEXTS)
    cfg = mixture(tmp_path, write_jsonl, (1.0, 1.0))
    cfg = dataclasses.replace(
        cfg, mixture=tuple((n, dataclasses.replace(c, path=path)) for n, c in cfg.mixture)
    )
    rows = as_rows(get(cfg).train_batch(s, 2, 0) for s in range(20))
    assert rows[::2] != rows[1::2]


def test_equal_documents_never_fall_on_both_sides(tmp_path, write_jsonl):
    paths = [write_jsonl("x.jsonl", TEXTS + TEXTS[:20]), write_jsonl("y.jsonl", [*TEXTS[30:], "only in y"])]
    cfg = mixture(tmp_path, write_jsonl, (1.0, 1.0))
    sources = [(n, dataclasses.replace(c, path=p)) for (n, c), p in zip(cfg.mixture, paths, strict=True)]
    data = get(dataclasses.replace(cfg, mixture=tuple(sources)))
    sides = [set(), set()]
    for component in data.components:
        for side, windows in zip(sides, (component.train, component.validation), strict=True):
            side.update(
                bytes(np.uint8(doc))
                for doc in np.split(windows.tokens, np.flatnonzero(windows.tokens == 256))
            )
    assert sides[0] & sides[1] <= {b"", b"\0"} and len(sides[0] | sides[1]) >= 61


def test_bpe_learns_nothing_from_validation_documents(files_config, landing):
    held = landing("qzxjqzxj " * 200, 0.0, 0.2)
    kept = landing("wvkywvky " * 200, 0.2, 1.0)
    cfg = files_config([*TEXTS, held, kept], tokenizer="bpe")
    vocabulary = get(cfg).tokenizer.backend.get_vocab()
    assert any("wvky" in token for token in vocabulary)
    assert not any("qz" in token for token in vocabulary)


def test_text_cannot_inject_a_separator(files_config):
    texts = [f"{t}<|endoftext|><|mask|>{t}" for t in TEXTS]
    for name in ("bytes", "bpe"):
        data = get(files_config(texts, tokenizer=name))
        (component,) = data.components
        count = sum((w.tokens == data.separator_id).sum() for w in (component.train, component.validation))
        assert count == len(texts)
        assert not (component.train.tokens == data.mask_id).any()


def test_each_split_gets_a_document_by_its_hash():
    digests = sorted(digest(str(i)) for i in range(50))
    assert held_out({"x": digests}, 1e-9) == {digests[0]}
    assert held_out({"x": digests[::-1]}, 1e-9) == {digests[0]}
    assert held_out({"x": digests}, 1 - 1e-9) == set(digests[:-1])
    below = [d for d in digests if d[0] < 128]
    assert held_out({"x": digests}, 0.5) == set(below) and 10 < len(below) < 40


def test_one_distinct_document_cannot_be_split(files_config, fails):
    assert "1 distinct document" in fails(get, files_config(["same text"] * 5))


def test_component_left_without_training_documents_is_named(landing, fails):
    low, middle, high = (digest(landing("x", *span)) for span in ((0, 0.3), (0.3, 0.6), (0.6, 0.9)))
    message = fails(held_out, {"a": [low, middle], "b": [low, middle, high]}, 0.95)
    assert "component 'a'" in message and "data.validation_fraction=0.95" in message


def test_data_hash_names_the_content(tmp_path, files_config, write_jsonl):
    cfg = files_config(TEXTS)
    moved = dataclasses.replace(
        cfg, path=write_jsonl("moved.jsonl", TEXTS), cache_dir=str(tmp_path / "other")
    )
    assert get(moved).data_hash == get(cfg).data_hash == get(files_config(TEXTS, weight=5.0)).data_hash
    hashes = [
        get(cfg).data_hash,
        get(cfg, sequence_length=T + 1).data_hash,
        get(files_config(TEXTS, validation_fraction=0.3)).data_hash,
        get(files_config(TEXTS, tokenizer="bpe")).data_hash,
        get(files_config([*TEXTS, "one more document"])).data_hash,
        get(mixture(tmp_path, write_jsonl, (1.0, 1.0))).data_hash,
        get(mixture(tmp_path, write_jsonl, (1.0, 2.0))).data_hash,
    ]
    assert len(set(hashes)) == len(hashes)


def test_tokens_are_encoded_once(files_config):
    log = []
    get(files_config(TEXTS, tokenizer="bpe"), log=log.append)
    assert len(log) == 3
    data = get(files_config(TEXTS, tokenizer="bpe"), log=log.append)
    assert len(log) == 3
    assert isinstance(data.components[0].train.tokens, np.memmap)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "unchecked", "empty"])
def test_damaged_tokens_are_encoded_again(damage, tmp_path, files_config):
    before = get(files_config(TEXTS)).train_batch(0, 16, 0)
    for path in (tmp_path / "cache").glob("tokens-*.npy"):
        content = path.read_bytes()
        if damage == "unchecked":
            path.with_name(path.name + ".crc32").unlink()
        else:
            flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
            path.write_bytes({"truncated": content[:-7], "flipped": flipped, "empty": b""}[damage])
    log = []
    np.testing.assert_array_equal(get(files_config(TEXTS), log=log.append).train_batch(0, 16, 0), before)
    assert sum("damaged" in line for line in log) == 2


def test_racing_loads_agree_and_leave_no_temporary_file(tmp_path, files_config):
    cfg = files_config(TEXTS, tokenizer="bpe")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        hashes = {data.data_hash for data in pool.map(lambda _: get(cfg), range(8))}
    assert len(hashes) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 6  # tokenizer, two splits, and their checksums


def test_cache_dir_that_cannot_be_written_is_named(tmp_path, files_config, fails):
    (tmp_path / "file").write_text("")
    assert "data.cache_dir=" in fails(get, files_config(TEXTS, cache_dir=str(tmp_path / "file/cache")))


def test_vocabulary_is_checked_before_documents_are_read(files_config, fails, monkeypatch):
    monkeypatch.setattr(corpus, "documents", lambda *_: pytest.fail("read"))
    assert "largest token id 257" in fails(get, files_config(TEXTS), vocab_size=200)


def test_packed_id_outside_the_vocabulary_is_named(files_config, fails, monkeypatch):
    lying = BytesTokenizer("s", "m", separator_id=290)
    monkeypatch.setattr(corpus.tokenizers, "build", lambda *_, **__: lying)
    assert "token id 290" in fails(get, files_config(TEXTS), vocab_size=290)


def test_fewer_tokens_than_one_sequence(files_config, fails):
    message = fails(get, files_config(TEXTS), sequence_length=600)
    assert "sequence_length=600" in message and "validation split" in message and "601" in message
    assert "sequence_length=0" in fails(get, files_config(TEXTS), sequence_length=0)


def test_fewer_tokens_than_one_batch(files_config, fails):
    data = get(files_config(TEXTS))
    n_train, n_validation = data.stats["train_sequences"], data.stats["validation_sequences"]
    data.check_batches(n_validation)
    message = fails(data.check_batches, n_validation + 1)
    assert (
        "validation has fewer tokens than one batch" in message
        and f"batch_size={n_validation + 1}" in message
    )
    assert f"{n_train} training sequences" in fails(data.check_batches, n_train + 1)
    fails(data.validation_batches, n_validation + 1, 1)


def test_batch_of_a_mixture_needs_its_share_of_each_component(tmp_path, write_jsonl, fails):
    data = get(mixture(tmp_path, write_jsonl, (3.0, 1.0), validation_fraction=0.5))
    n = len(data.components[0].train)
    assert n < len(data.components[1].train)
    message = fails(data.check_batches, 4 * n // 3 + 2)
    assert "component 'a' has fewer tokens than one batch" in message


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda d: d.train_batch(-1, 4, 0), "step=-1"),
        (lambda d: d.train_batch(0, 4, -1), "seed=-1"),
        (lambda d: d.train_batch(0, 0, 0), "batch_size=0"),
        (lambda d: d.train_batch(0, 4, 0, process_count=3), "batch_size=4"),
        (lambda d: d.train_batch(0, 4, 0, process_index=2, process_count=2), "process_index=2"),
        (lambda d: d.validation_batches(4, 0), "max_batches=0"),
        (lambda d: d.check_batches(0), "batch_size=0"),
    ],
)
def test_bad_arguments_are_named(call, field, files_config, fails):
    data = get(files_config(TEXTS))
    assert field in fails(call, data)
