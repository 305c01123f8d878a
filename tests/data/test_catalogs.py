"""Prepared datasets: TFDS without TensorFlow, Hugging Face without a network."""

import dataclasses
import shutil
import socket
import sys
from typing import ClassVar

import pytest
import tensorflow_datasets as tfds

from depthgrow_jax.data import SourceConfig
from depthgrow_jax.data.sources import documents

TEXTS = [f"document {i} é" for i in range(6)]


class Tiny(tfds.core.GeneratorBasedBuilder):
    """Six documents."""

    VERSION = tfds.core.Version("1.2.0")
    SUPPORTED_VERSIONS: ClassVar = [tfds.core.Version("1.10.0")]

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "title": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i, text in enumerate(TEXTS):
            yield i, {"text": text, "title": "t"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    Tiny(data_dir=root, file_format="array_record").download_and_prepare()
    return root


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def read_tfds(root, **changes):
    return documents(dataclasses.replace(SourceConfig("tfds", str(root), "tiny"), **changes), "data.")


def test_tfds_reads_array_record_without_tensorflow(prepared):
    assert sorted(read_tfds(prepared)) == TEXTS
    assert read_tfds(prepared) == read_tfds(prepared)
    assert "tensorflow" not in sys.modules


def test_tfds_subsplit_version_and_other_field(prepared):
    assert read_tfds(prepared, split="train[:50%]") == read_tfds(prepared)[:3]
    assert len(read_tfds(prepared, name="tiny:1.*.*")) == 6
    assert read_tfds(prepared, text_field="title") == ["t"] * 6


def test_tfds_takes_the_newest_version_by_number(prepared, tmp_path):
    for version in ("1.2.0", "1.10.0"):
        shutil.copytree(prepared / "tiny/1.2.0", tmp_path / "tiny" / version)
    (tmp_path / "tiny/1.2.0/dataset_info.json").write_text("broken")
    assert len(read_tfds(tmp_path)) == 6


def test_tfds_config_is_found_or_listed(prepared, tmp_path, fails):
    shutil.copytree(prepared / "tiny/1.2.0", tmp_path / "tiny/plain/1.2.0")
    assert len(read_tfds(tmp_path)) == len(read_tfds(tmp_path, name="tiny/plain")) == 6
    shutil.copytree(prepared / "tiny/1.2.0", tmp_path / "tiny/other/1.2.0")
    assert "must be one of tiny/other, tiny/plain" in fails(read_tfds, tmp_path)


def test_tfds_data_dir_from_the_environment(prepared, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    assert len(read_tfds("")) == 6


@pytest.mark.parametrize("name", ["mnist", "tiny:3.0.0", "tiny/none"])
def test_tfds_not_prepared_is_answered_without_asking_tfds(name, prepared, monkeypatch, fails):
    monkeypatch.setattr(tfds, "builder_from_directory", lambda _: pytest.fail("asked"))
    message = fails(read_tfds, prepared, name=name)
    assert str(prepared / name.partition(":")[0]) in message and "data.name=" in message


def test_tfds_wrong_split_field_or_format_is_named(prepared, tmp_path, fails):
    assert "data.split='test'" in fails(read_tfds, prepared, split="test")
    assert "splits train" in fails(read_tfds, prepared, split="test")
    assert "cannot be read" in fails(read_tfds, prepared, split="train[:x]")
    assert "it has text, title" in fails(read_tfds, prepared, text_field="body")
    info = shutil.copytree(prepared / "tiny", tmp_path / "tiny") / "1.2.0/dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    assert "stored as tfrecord" in fails(read_tfds, tmp_path)
    info.write_text("{")
    assert "not a readable TFDS dataset" in fails(read_tfds, tmp_path)


def test_tfds_missing_shard_is_named(prepared, tmp_path, fails):
    directory = shutil.copytree(prepared / "tiny", tmp_path / "tiny") / "1.2.0"
    for shard in directory.glob("*array_record*"):
        shard.unlink()
    assert str(directory) in fails(read_tfds, tmp_path)


def test_tfds_missing_package_says_what_to_install(prepared, monkeypatch, fails):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    assert "pip install tensorflow-datasets" in fails(read_tfds, prepared)


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="source hf needs the optional package datasets")


def read_hf(path, **changes):
    return documents(dataclasses.replace(SourceConfig("hf", str(path)), **changes), "data.")


def test_hf_reads_save_to_disk(datasets, tmp_path, fails):
    data = datasets.Dataset.from_dict({"text": TEXTS, "n": range(6)})
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "many")
    assert read_hf(tmp_path / "one") == read_hf(tmp_path / "many") == TEXTS
    assert read_hf(tmp_path / "many", split="test") == [TEXTS[1]]
    assert "has the splits test, train" in fails(read_hf, tmp_path / "many", split="dev")
    assert "it has n, text" in fails(read_hf, tmp_path / "one", text_field="body")
    assert "row 0 holds int there" in fails(read_hf, tmp_path / "one", text_field="n")
    (tmp_path / "one/data-00000-of-00001.arrow").write_bytes(b"\xff\xff\xff\xff")
    assert "cannot be loaded" in fails(read_hf, tmp_path / "one")


def test_hf_reads_a_directory_of_data_files(datasets, write_jsonl, tmp_path, monkeypatch, fails):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write_jsonl("data/train.jsonl", TEXTS)
    assert read_hf(tmp_path / "data") == TEXTS
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded" in fails(read_hf, tmp_path / "empty")


def test_hf_hub_out_of_reach_is_answered_at_once(datasets, monkeypatch, fails):
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked"))
    message = fails(read_hf, "nobody/nothing")
    assert "huggingface.co cannot be reached" in message and "HF_HUB_OFFLINE=1" in message


def test_hf_hub_error_is_one_line(datasets, monkeypatch, fails):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("first line\nsecond line")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert fails(read_hf, "nobody/nothing").endswith("first line")


def test_hf_missing_directory_is_not_taken_for_a_hub_name(datasets, tmp_path, fails):
    assert "no such directory" in fails(read_hf, tmp_path / "none")
    assert "no such directory" in fails(read_hf, "./none")


def test_hf_missing_package_says_what_to_install(tmp_path, monkeypatch, fails):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in fails(read_hf, tmp_path)
