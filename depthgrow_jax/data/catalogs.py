"""Documents of prepared datasets: TensorFlow Datasets (without TensorFlow) and Hugging Face."""

import fnmatch
import os
import pathlib
import re
import socket
import types
import urllib.parse
import urllib.request
from collections.abc import Iterator

from depthgrow_jax.data.config import SourceConfig
from depthgrow_jax.data.readers import no_field, one_line, optional_package, resolve, text_of
from depthgrow_jax.errors import UserError

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_HUB_TIMEOUT_S = 5.0


def read_tfds(component: SourceConfig, field: str) -> Iterator[str]:
    """Documents of a dataset that TFDS has prepared on this disk as array_record.

    Never downloads: the directory is looked at before TFDS is asked. Raises `UserError` naming the
    directory if the dataset is not there, cannot be read, or has no such split or field.
    """
    directory = find_tfds(component, field)
    tfds = optional_package("tensorflow_datasets", "tensorflow-datasets", f"{field}source='tfds'")
    try:
        builder = tfds.builder_from_directory(directory)
        stored_as = builder.info.file_format.value
        splits = sorted(builder.info.splits)
    except Exception as e:  # whatever TFDS meets in a damaged directory, the user can mend it
        raise UserError(f"{directory}: not a readable TFDS dataset: {one_line(e)}") from e
    if stored_as != "array_record":
        raise UserError(f"{directory}: stored as {stored_as}; prepare it with file_format='array_record'")
    if component.split.partition("[")[0] not in splits:
        raise UserError(f"{field}split={component.split!r}: {directory} has the splits {', '.join(splits)}")
    if component.text_field not in builder.info.features:
        raise no_field(component, field, str(directory), builder.info.features)
    try:
        records = builder.as_data_source(split=component.split)
        for i, record in enumerate(records):
            yield text_of(record, component, field, f"{directory} record {i}")
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{directory}: split {component.split} cannot be read: {one_line(e)}") from e


def find_tfds(component: SourceConfig, field: str) -> pathlib.Path:
    """The directory `data_dir/dataset[/config]/version` of a prepared dataset, newest version first.

    `data_dir` is `path`, else `$TFDS_DATA_DIR`, else `~/tensorflow_datasets`.
    """
    dataset, _, version = component.name.partition(":")
    root = resolve(component.path or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    base = root / dataset
    found = [
        info.parent
        for pattern in ("*/dataset_info.json", "*/*/dataset_info.json")
        for info in base.glob(pattern)
        if _VERSION.fullmatch(info.parent.name) and fnmatch.fnmatch(info.parent.name, version or "*")
    ]
    if not found:
        raise UserError(
            f"{field}name={component.name!r}: not prepared in {base} "
            "(no [config/]version/dataset_info.json there); "
            f"prepare it with file_format='array_record' or set {field}path to its data directory"
        )
    configs = sorted({d.parent.relative_to(root).as_posix() for d in found})
    if len(configs) > 1:
        raise UserError(f"{field}name={component.name!r}: must be one of {', '.join(configs)} in {root}")
    return max(found, key=lambda d: tuple(map(int, d.name.split("."))))


def read_hf(component: SourceConfig, field: str) -> Iterator[str]:
    """Documents of a Hugging Face dataset.

    `path` is a `save_to_disk` directory, a directory of data files, or a Hub name. A directory is
    read without the network. For a Hub name the Hub must answer within 5 seconds, unless
    `HF_HUB_OFFLINE=1` asks for the copy in its cache. Raises `UserError` naming the path.
    """
    datasets = optional_package("datasets", "datasets", f"{field}source='hf'")
    path = resolve(component.path)
    if not path.is_dir() and (path.is_absolute() or component.path.startswith(("~", "."))):
        raise UserError(f"{field}path={component.path!r}: no such directory")
    if not path.is_dir() and not datasets.config.HF_HUB_OFFLINE:
        _require_hub(component, field)
    try:
        records = _open_hf(datasets, path, component, field)
        if component.text_field not in records.column_names:
            raise no_field(component, field, component.path, records.column_names)
        for i, record in enumerate(records.select_columns([component.text_field])):
            yield text_of(record, component, field, f"{component.path} row {i}")
    except UserError:
        raise
    except Exception as e:  # datasets raises its own, OS, value and pyarrow errors here
        raise UserError(f"{field}path={component.path!r}: cannot be loaded by datasets: {one_line(e)}") from e


def _open_hf(datasets: types.ModuleType, path: pathlib.Path, component: SourceConfig, field: str):
    if (path / "dataset_dict.json").exists():
        splits = datasets.load_from_disk(str(path))
        if component.split not in splits:
            raise UserError(
                f"{field}split={component.split!r}: {path} has the splits {', '.join(sorted(splits))}"
            )
        return splits[component.split]
    if (path / "state.json").exists():
        return datasets.load_from_disk(str(path))
    name = str(path) if path.is_dir() else component.path
    return datasets.load_dataset(name, component.name or None, split=component.split)


def _require_hub(component: SourceConfig, field: str) -> None:
    """Raises `UserError` at once where the Hub's own client would retry for half a minute."""
    if urllib.request.getproxies():
        return  # only the proxy can say whether the Hub can be reached
    endpoint = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    address = (endpoint.hostname, endpoint.port or (80 if endpoint.scheme == "http" else 443))
    try:
        socket.create_connection(address, timeout=_HUB_TIMEOUT_S).close()
    except OSError as e:
        raise UserError(
            f"{field}path={component.path!r}: no such directory, and {address[0]} cannot be reached "
            f"({one_line(e)}); "
            "set HF_HUB_OFFLINE=1 to use a copy in its cache"
        ) from e
