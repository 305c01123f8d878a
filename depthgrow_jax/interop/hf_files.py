"""Models in directories of Hugging Face transformers: `config.json` and safetensors."""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.hf_config import Description, read
from depthgrow_jax.interop.hf_fields import read_object
from depthgrow_jax.interop.hf_vocabulary import read_vocabulary
from depthgrow_jax.interop.pretrained import Pretrained
from depthgrow_jax.interop.tensors import EMBEDDING, HEAD, is_derived, shapes
from depthgrow_jax.model import ModelConfig

SCHEME = "hf:"
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_DOWNLOADED = ["*.safetensors", "*.json", "*.jinja"]
_NOT_DOWNLOADED = ["*/*", "consolidated*"]  # the same weights in other layouts
_PROBE_SECONDS = 5.0
_SAMPLED_ROWS = 16


def open_hf(reference: str) -> Pretrained:
    """Describes and checks the model that `reference` names; no weight is read yet.

    Args:
      reference: `hf:DIR`, or `hf:org/name`, a repository of the Hub, which is downloaded into the cache of
        `huggingface_hub` (or taken from it where the Hub cannot be reached).

    The fingerprint is a SHA-256 of the architecture and of each tensor's name, dtype, shape and 16 of its
    rows, evenly spaced (all of a vector). It does not depend on how tensors are sharded. It would miss a
    change of other rows alone; training changes all.

    Raises `UserError` naming the file, and the tensor or the field, that is missing, malformed or not
    supported.
    """
    directory = _directory(reference)
    config = read_object(directory / CONFIG)
    description = read(config, str(directory / CONFIG))
    files = _files(directory)
    _check_shapes(files, description)
    return Pretrained(
        reference=reference,
        cfg=description.cfg,
        depth=description.depth,
        context=description.context,
        tensors=lambda: _tensors(files),
        vocabulary=read_vocabulary(directory, config, description.cfg.vocab_size),
        fingerprint=_fingerprint(files, description),
    )


def _directory(reference: str) -> pathlib.Path:
    name = reference.removeprefix(SCHEME)
    if not reference.startswith(SCHEME) or not name:
        raise UserError(f"{reference!r}: must be hf:DIR or hf:org/name")
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{reference}: is a file; must be a directory that holds {CONFIG} and {SINGLE}")
    if not _REPOSITORY.fullmatch(name):
        raise UserError(f"{reference}: no such directory, and not of the form hf:org/name")
    return _download(name, reference)


def _download(repository: str, reference: str) -> pathlib.Path:
    """The local snapshot of a repository of the Hub."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"{reference}: no such directory; a repository of the Hub needs `pip install huggingface_hub`"
        ) from None

    def snapshot(**options) -> pathlib.Path:
        patterns = {"allow_patterns": _DOWNLOADED, "ignore_patterns": _NOT_DOWNLOADED}
        return pathlib.Path(huggingface_hub.snapshot_download(repository, **patterns, **options))

    # One request with a short timeout: downloads retry for minutes where there is no network. The exceptions
    # are those of another HTTP library in each major version of huggingface_hub, hence the broad clauses.
    try:
        huggingface_hub.HfApi().model_info(repository, timeout=_PROBE_SECONDS)
    except Exception as unreachable:
        try:
            return snapshot(local_files_only=True)
        except Exception:
            raise UserError(
                f"{reference}: no such directory, not complete in the cache of huggingface_hub, and not to "
                f"be had from the Hub: {_one_line(unreachable)}"
            ) from unreachable
    try:
        return snapshot()
    except Exception as error:
        raise UserError(f"{reference}: cannot be downloaded: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files that hold the model, each of which can be read, in order."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    path = directory / INDEX
    if not path.exists():
        others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.gguf") for p in directory.glob(pattern))
        found = f"; {others[0]} must be converted to safetensors" if others else ""
        raise UserError(f"{directory}: holds no {SINGLE} and no {INDEX}{found}")
    shard_of = read_object(path).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise UserError(f"{path}: weight_map must be an object that names the file of each tensor")
    held: dict[str, set[str]] = {}
    for tensor, shard in shard_of.items():
        if not isinstance(shard, str) or not shard or pathlib.PurePath(shard).name != shard:
            raise UserError(f"{path}: tensor {tensor} is in {shard!r}; must be a file of this directory")
        held.setdefault(shard, set()).add(tensor)
    for shard, names in sorted(held.items()):
        if not (directory / shard).is_file():
            raise UserError(f"{directory / shard}: missing; {INDEX} names it for tensor {min(names)}")
        with _opened(directory / shard) as file:
            absent = names - set(file.keys())
        if absent:
            raise UserError(f"{directory / shard}: lacks tensor {min(absent)}, which {INDEX} places there")
    return [directory / shard for shard in sorted(held)]


def _opened(path: pathlib.Path) -> Any:
    """A `safe_open` handle; its header and its size are right. Raises `UserError` naming the file."""
    try:
        # Not through a memory map, whose pages would stay: a whole shard beside the model.
        return safe_open(path, framework="numpy", backend="pread")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cut short, or not a safetensors file ({_one_line(error)})") from None


def _check_shapes(files: list[pathlib.Path], description: Description) -> None:
    """Compares headers with the architecture."""
    cfg, depth, _ = description
    count = 0
    for path in files:
        with _opened(path) as file:
            count += len(file.keys())
    if depth > count:  # before a list of its tensors is made
        raise UserError(f"{files[0]}: holds {count} tensors, too few for the {depth} layers of {CONFIG}")
    expected, seen = shapes(cfg, depth), {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (a handle is no mapping)
                if is_derived(name):
                    continue
                if name in seen:
                    raise UserError(f"{path}: tensor {name} is also in {seen[name].name}")
                seen[name] = path
                _check_tensor(path, name, file.get_slice(name), expected, cfg, depth)
    missing = [name for name in expected if name not in seen]
    if missing:
        where = files[0] if len(files) == 1 else files[0].parent / INDEX
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{where}: tensor {missing[0]} is missing{more}")


def _check_tensor(
    path: pathlib.Path, name: str, header: Any, expected: dict, cfg: ModelConfig, depth: int
) -> None:
    # A tied model may store its head as well.
    shape = expected.get(EMBEDDING if name == HEAD else name)
    if shape is None:
        raise UserError(f"{path}: tensor {name} belongs to no {depth}-layer model of this {CONFIG}")
    found = tuple(header.get_shape())
    if found != shape:
        rows = f" (vocab_size={cfg.vocab_size} of {CONFIG} rows)" if name in (EMBEDDING, HEAD) else ""
        raise UserError(f"{path}: tensor {name} has shape {list(found)}, must be {list(shape)}{rows}")
    if header.get_dtype() not in _DTYPES:
        raise UserError(f"{path}: tensor {name} is {header.get_dtype()}, must be one of {', '.join(_DTYPES)}")


def _tensors(files: list[pathlib.Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Reads the tensors, one at a time; nothing is kept."""
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                if not is_derived(name):
                    yield name, file.get_tensor(name)


def _fingerprint(files: list[pathlib.Path], description: Description) -> str:
    cfg, depth, context = description
    # Fields at their defaults are left out: fields to come will not change the fingerprints of today.
    fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    set_fields = {f.name: fields[f.name] for f in dataclasses.fields(cfg) if fields[f.name] != f.default}
    digest = hashlib.sha256(json.dumps([set_fields, depth, context], sort_keys=True).encode())
    tensors = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                if not is_derived(name):
                    tensors[name] = _sample(name, file.get_slice(name))
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


def _sample(name: str, tensor: Any) -> bytes:
    """A digest of a tensor's header and of some of its rows."""
    shape = tensor.get_shape()
    digest = hashlib.sha256(json.dumps([name, tensor.get_dtype(), shape]).encode())
    rows = np.linspace(0, shape[0] - 1, min(shape[0], _SAMPLED_ROWS)).astype(int)
    parts = [tensor[:]] if len(shape) == 1 else [tensor[row : row + 1] for row in rows.tolist()]
    for part in parts:
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.digest()
