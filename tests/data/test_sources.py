"""Where documents come from: the standard library and files of text."""

import dataclasses
import gzip
import json
import os
import pathlib
import sys
import sysconfig

import pytest

from depthgrow_jax.data import SourceConfig
from depthgrow_jax.data.readers import find_files
from depthgrow_jax.data.sources import documents, stdlib_files

FILES = SourceConfig(source="files")


def read(path, **changes) -> list[str]:
    return documents(dataclasses.replace(FILES, path=str(path), **changes), "data.")


def test_stdlib_takes_modules_in_order_without_tests_packages_and_build_records(tmp_path):
    kept = ["a.py", "b/__init__.py", "b/z.py", "c.py"]
    dropped = [
        "site-packages/p.py",
        "dist-packages/p.py",
        "test/t.py",
        "b/tests/t.py",
        "idlelib/idle_test/t.py",
    ]
    dropped += ["_sysconfigdata__linux.py", "config-3.11/python-config.py", "d.txt"]
    for name in [*reversed(kept), *dropped]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    assert [p.relative_to(tmp_path).as_posix() for p in stdlib_files(tmp_path)] == kept


def test_stdlib_is_the_running_pythons():
    first, *_ = documents(SourceConfig(max_bytes=20_000), "data.")
    assert first == (pathlib.Path(sysconfig.get_paths()["stdlib"]) / "__future__.py").read_text(
        encoding="utf-8"
    )


def test_stdlib_bytes_that_are_not_utf8_are_replaced(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes(b"# \xff")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert documents(SourceConfig(), "data.") == ["# \ufffd"]


def test_txt_is_one_document_unless_separated(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n\nthree\tx", encoding="utf-8")
    assert read(tmp_path / "a.txt") == ["one\n\ntwo\n\n\n\nthree\tx"]
    assert read(tmp_path / "a.txt", document_separator="\n\n") == ["one", "two", "three\tx"]
    assert read(tmp_path / "a.txt", document_separator=r"\n\n") == ["one", "two", "three\tx"]
    assert read(tmp_path / "a.txt", document_separator=r"\t") == ["one\n\ntwo\n\n\n\nthree", "x"]


def test_formats_and_gzip_agree(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="reading parquet needs pyarrow")
    import pyarrow

    texts = ["première", "second\nline"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": t, "n": 1}) for t in texts) + "\n\n")
    parquet.write_table(pyarrow.table({"body": texts, "n": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("|".join(texts), encoding="utf-8")
    for name in ("a.jsonl", "a.parquet", "a.txt"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            assert read(path, text_field="body", document_separator="|") == texts


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone".encode())
    (tmp_path / "b.jsonl").write_bytes('\ufeff{"text": "two"}'.encode())
    assert read(tmp_path) == ["one", "two"]


def test_paths_may_be_directories_globs_and_lists(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/.hidden.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "d[1].txt").write_text("d")
    everything = ["a.txt", "b.txt", "d", "sub/c.txt"]
    assert read(tmp_path) == everything
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt", "d"]
    assert read(f"{tmp_path}/**/c.txt") == ["sub/c.txt"]
    assert read(tmp_path / "d[1].txt") == ["d"]
    assert read(f"{tmp_path}/b.txt, {tmp_path}") == ["b.txt", "a.txt", "d", "sub/c.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/sub") == ["sub/c.txt"]


def test_relative_paths_fall_back_to_the_data_root(tmp_path, monkeypatch):
    root, here = tmp_path / "root", tmp_path / "here"
    for directory in (root, here):
        (directory / "sub").mkdir(parents=True)
    (root / "sub/a.txt").write_text("root")
    (root / "sub/b.txt").write_text("b")
    (here / "a.txt").write_text("here")
    monkeypatch.chdir(here)
    monkeypatch.setenv("DEPTHGROW_DATA", str(root))
    assert read("sub/a.txt") == ["root"]
    assert read("sub/*.txt") == ["root", "b"]
    assert read("a.txt") == ["here"]


def test_symbolic_link_loops_end(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    os.symlink(tmp_path, tmp_path / "loop")
    assert len(find_files(str(tmp_path), "data.")) == 1


def test_max_bytes_cuts_the_document_that_crosses_it(write_jsonl):
    path = write_jsonl("a.jsonl", ["abcd", "ééé", "later"])
    assert read(path, max_bytes=4) == ["abcd"]
    assert read(path, max_bytes=7) == [
        "abcd",
        "é",
    ]  # 3 bytes are left: one é of two bytes and half of the next
    assert read(path, max_bytes=10) == ["abcd", "ééé"]
    assert read(path, max_bytes=0) == ["abcd", "ééé", "later"]


def test_max_documents_counts_those_with_text(write_jsonl):
    path = write_jsonl("a.jsonl", ["one", " ", "two", "three"])
    assert read(path, max_documents=2) == ["one", "two"]
    assert read(path, max_documents=2, max_bytes=2) == ["on"]
    assert read(path, max_documents=9) == read(path) == ["one", "two", "three"]


def test_surrogates_become_replacement_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud800b"}' + "\n" + r'{"text": "\ud83d\ude00"}')
    assert read(tmp_path / "a.jsonl") == ["a\ufffdb", "\U0001f600"]


def test_documents_of_white_space_are_dropped(write_jsonl):
    assert read(write_jsonl("a.jsonl", ["", " \n", "x"])) == ["x"]


@pytest.mark.parametrize("path", ["missing.txt", "missing/", ""])
def test_missing_file_is_named(path, tmp_path, fails):
    message = fails(read, f"{tmp_path}/{path}" if path else ",")
    assert message.startswith("data.path=") and path.rstrip("/") in message


@pytest.mark.parametrize("spec", ["x.md", ".", "*.md", "*.none"])
def test_nothing_legal_at_a_path_lists_the_formats(spec, tmp_path, monkeypatch, fails):
    (tmp_path / "x.md").write_text("x")
    monkeypatch.chdir(tmp_path)
    message = fails(read, spec)
    assert repr(spec) in message and ".txt, .jsonl or .parquet" in message


def test_empty_corpus_is_refused(tmp_path, fails):
    (tmp_path / "a.txt").write_text(" \n")
    assert "holds no text" in fails(read, tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"body": "x", "id": 3}', "a.jsonl:2 has no such field; it has body, id"),
        ("{}", "a.jsonl:2 has no such field; it has none"),
        ('{"text": 3}', "a.jsonl:2 holds int there, not text"),
        ('{"text": ', "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: holds list"),
    ],
)
def test_bad_json_line_is_named(line, expected, tmp_path, fails):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    assert expected in fails(read, tmp_path / "a.jsonl")


def test_text_that_is_not_utf8_is_refused(tmp_path, fails):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    assert "a.txt: not UTF-8 text (byte 2)" in fails(read, tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "a.jsonl:2: not UTF-8 text" in fails(read, tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.parquet.gz"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "not gzip"])
def test_damaged_gzip_is_named(name, damage, tmp_path, fails):
    whole = gzip.compress(json.dumps({"text": list(range(500))}).encode())
    flipped = bytes([*whole[:100], whole[100] ^ 255, *whole[101:]])
    content = {"truncated": whole[: len(whole) // 2], "flipped": flipped, "not gzip": b"plain text"}[damage]
    (tmp_path / name).write_bytes(content)
    assert f"{name}: cannot be read" in fails(read, tmp_path / name)


def test_bad_parquet_is_named(tmp_path, fails):
    parquet = pytest.importorskip("pyarrow.parquet", reason="reading parquet needs pyarrow")
    import pyarrow

    path = tmp_path / "a.parquet"
    path.write_bytes(b"not parquet at all")
    assert "a.parquet: not readable as parquet" in fails(read, path)
    parquet.write_table(pyarrow.table({"body": ["x"]}), path)
    assert "a.parquet has no such field; it has body" in fails(read, path)
    parquet.write_table(pyarrow.table({"text": ["x", None]}), path)
    assert "a.parquet row 2 holds NoneType there" in fails(read, path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch, fails):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in fails(read, tmp_path / "a.parquet")


def test_state_of_the_union_addresses():
    path = pathlib.Path(os.environ.get("DEPTHGROW_DATA", "")) / "text/sotu.txt.gz"
    if not path.is_file():
        pytest.skip("needs text/sotu.txt.gz below $DEPTHGROW_DATA")
    assert len(read(path, document_separator=r"\n\n")) == 233
