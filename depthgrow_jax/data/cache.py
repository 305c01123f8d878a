"""Files kept by content hash: written atomically, checked on reading, rebuilt when damaged."""

import io
import os
import pathlib
import uuid
import zlib
from collections.abc import Callable

import numpy as np

from depthgrow_jax.errors import UserError

_CHUNK = 1 << 22


def cached_bytes(path: pathlib.Path, build: Callable[[], bytes], log: Callable[[str], None]) -> bytes:
    """The content of `path`, or of `build()`, which is then written there.

    Processes that race write the same content, since `path` is named by what it is made from; each
    replaces the file as a whole. Raises `UserError` if the directory cannot be written.
    """
    _ensure(path, build, log)
    return path.read_bytes()


def cached_array(
    path: pathlib.Path, build: Callable[[], np.ndarray], log: Callable[[str], None]
) -> np.ndarray:
    """Like `cached_bytes` for an array in `.npy` format, which comes back memory-mapped, read-only."""

    def build_npy() -> bytes:
        stream = io.BytesIO()
        np.save(stream, build(), allow_pickle=False)
        return stream.getvalue()

    _ensure(path, build_npy, log)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _ensure(path: pathlib.Path, build: Callable[[], bytes], log: Callable[[str], None]) -> None:
    if path.exists():
        if _is_intact(path):
            return
        log(f"{path} is damaged: building it again")
    content = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The checksum first: a process that sees the file then finds it intact.
        _replace(_checksum_path(path), _checksum_line(zlib.crc32(content), len(content)))
        _replace(path, content)
    except OSError as e:
        raise UserError(f"data.cache_dir={str(path.parent)!r}: cannot be written: {e}") from e


def _is_intact(path: pathlib.Path) -> bool:
    checksum, size = 0, 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    recorded = _checksum_path(path)
    return recorded.exists() and recorded.read_bytes() == _checksum_line(checksum, size)


def _checksum_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".crc32")


def _checksum_line(checksum: int, size: int) -> bytes:
    return f"{checksum:08x} {size}\n".encode()


def _replace(path: pathlib.Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
