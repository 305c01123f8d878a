"""The header of a GGUF file: metadata and where each tensor lies.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. It is read here because the reader of
the `gguf` package does not say at which key or tensor a file that was cut short ends.
"""

import mmap
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from depthgrow_jax.errors import UserError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# GGUF's number of a scalar type -> numpy dtype.
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_DEFAULT_ALIGNMENT = 32


class TensorInfo(NamedTuple):
    """Where a tensor lies and how it is encoded.

    `type` is a `gguf.GGMLQuantizationType`; `shape` has the rows first, unlike the file; `offset` counts from
    the start of the file.
    """

    type: Any
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """`metadata`: key -> value, a float32 as its shortest decimal; `start`: where the tensor data begin."""

    path: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    start: int


class _Cursor:
    """Reads value after value; `at` says what is being read, for the error if the file ends there."""

    def __init__(self, data: mmap.mmap, where: pathlib.Path):
        self.data, self.where, self.offset, self.at = data, where, 0, "the first bytes"

    def take(self, count: int) -> bytes:
        end = self.offset + count
        if end > len(self.data):
            raise UserError(f"{self.where}: cut short in {self.at} ({len(self.data)} bytes in all)")
        taken = self.data[self.offset : end]
        self.offset = end
        return taken

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def string(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.where}: {self.at} is not UTF-8: {raw[:40]!r}") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.u32(), self.u64()
            if item in _SCALARS:
                return np.frombuffer(
                    self.take(count * np.dtype(_SCALARS[item]).itemsize), _SCALARS[item]
                ).tolist()
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise UserError(f"{self.where}: {self.at} has the unknown value type {kind}")
        scalar = np.frombuffer(self.take(np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[0]
        # 1e-05 is stored as 9.99999974737875e-06: the shortest decimal of the same float32 is what was meant.
        return float(str(scalar)) if scalar.dtype == np.float32 else scalar.item()


def read_header(path: pathlib.Path) -> Header:
    """Reads metadata and tensor table, and checks that the file holds every tensor to its last byte.

    Raises `UserError` naming the file, and the key or tensor, for anything but a whole GGUF of version 2 or 3
    with little-endian numbers.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{path}: is not a GGUF file (its first 4 bytes are not {_MAGIC.decode()})")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Cursor(data, path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _read(cursor: _Cursor) -> Header:
    where = cursor.where
    cursor.take(len(_MAGIC))
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise UserError(f"{where}: is a big-endian GGUF; must be little-endian")
    if version not in _VERSIONS:
        raise UserError(f"{where}: is a GGUF of version {version}; must be 2 or 3")
    tensor_count, key_count = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        cursor.at = f"metadata key {index + 1} of {key_count}"
        key = cursor.string()
        cursor.at = f"metadata key {key}"
        if key in metadata:
            raise UserError(f"{where}: metadata key {key} is there twice")
        metadata[key] = cursor.value(cursor.u32())
    table: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for index in range(tensor_count):
        cursor.at = f"the table of tensors, entry {index + 1} of {tensor_count}"
        name = cursor.string()
        if name in table:
            raise UserError(f"{where}: tensor {name} is there twice")
        dims = tuple(cursor.u64() for _ in range(cursor.u32()))
        table[name] = (cursor.u32(), dims[::-1], cursor.u64())
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise UserError(f"{where}: general.alignment={alignment!r}: must be a whole number of at least 1")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, (number, shape, offset) in table.items():
        kind, nbytes = _size(where, name, number, shape)
        if start + offset + nbytes > len(cursor.data):
            raise UserError(
                f"{where}: cut short: tensor {name} ends at byte {start + offset + nbytes}, "
                f"the file at byte {len(cursor.data)}"
            )
        tensors[name] = TensorInfo(kind, shape, start + offset, nbytes)
    return Header(where, metadata, tensors, start)


def _size(where: pathlib.Path, name: str, number: int, shape: tuple[int, ...]) -> tuple[Any, int]:
    """The encoding as the `gguf` package names it, and the bytes that a tensor of it takes."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise UserError(f"{where}: tensor {name} has the unknown type {number}") from None
    values, size = gguf.GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % values:
        raise UserError(f"{where}: tensor {name} of type {kind.name} has shape {list(shape)}")
    count = 1
    for extent in shape:
        count *= extent
    return kind, count // values * size


def read_tensor(path: pathlib.Path, info: TensorInfo) -> np.ndarray:
    """The float32 values of one tensor, read now."""
    import gguf

    data = np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)
    # Damaged blocks may hold any scale; values that are not finite are refused by name where they are used.
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data.reshape((*info.shape[:-1], -1)), info.type)
    return values.reshape(info.shape)
