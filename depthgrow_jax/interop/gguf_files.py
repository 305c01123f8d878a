"""GGUF files, the format of llama.cpp: `gguf:FILE`, or `gguf:PACKAGE`, an installed package that holds one.

llama.cpp turns neighbouring rows of a head where Hugging Face turns row i and row i + H/2, so files of the
`llama` architecture keep the rows of q and k in another order; it is undone here.
"""

import hashlib
import importlib.util
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.gguf_config import Description, describe
from depthgrow_jax.interop.gguf_header import Header, TensorInfo, read_header, read_tensor
from depthgrow_jax.interop.gguf_vocabulary import read_vocabulary
from depthgrow_jax.interop.pretrained import Pretrained
from depthgrow_jax.interop.tensors import EMBEDDING, FINAL_NORM, HEAD, shapes

_TOP = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
# The fingerprint reads this much of each tensor: so many pieces, evenly spread, of so many bytes.
_PIECES, _PIECE = 8, 4096


def open_gguf(reference: str) -> Pretrained:
    """Describes and checks the file that `reference`, `gguf:FILE` or `gguf:PACKAGE`, names; reads no weights.

    The fingerprint is a hash of the header and of evenly spread pieces of each tensor, at most 32 KiB of one.

    Raises `UserError` naming the file, and the key or tensor, for what is missing, damaged or not supported.
    """
    _require_package()
    path = _find(reference)
    header = read_header(path)
    description = describe(header)
    names = _check_tensors(header, description)
    return Pretrained(
        reference=reference,
        cfg=description.cfg,
        depth=description.depth,
        context=description.context,
        tensors=lambda: _read_tensors(header, description, names),
        vocabulary=read_vocabulary(
            header.metadata, str(path), description.cfg.vocab_size, description.context
        ),
        fingerprint=_fingerprint(header),
    )


def _require_package() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(
            "gguf: files need the package gguf, which is not installed: pip install gguf"
        ) from None


def _find(reference: str) -> pathlib.Path:
    name = reference.removeprefix("gguf:")
    path = pathlib.Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{reference}: is a directory; must be gguf:FILE or gguf:PACKAGE")
    module = name.replace("-", "_")
    # Of a dotted name the parent would be imported.
    try:
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
    except ValueError:  # a module of this process that was not loaded from a file
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{reference}: no such file and no such package; must be gguf:FILE or gguf:PACKAGE")
    found = sorted(
        file for folder in spec.submodule_search_locations for file in pathlib.Path(folder).rglob("*.gguf")
    )
    if len(found) != 1:
        raise UserError(
            f"{reference}: the package holds {len(found)} .gguf files, must be 1; name it as gguf:FILE"
        )
    return found[0]


def _gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of `tensors.shapes`."""
    match = _LAYER_NAME.fullmatch(name)
    return f"blk.{match[1]}.{_BLOCK[match[2]]}.{match[3]}" if match else _TOP[name]


def _check_tensors(header: Header, description: Description) -> dict[str, str]:
    """llama.cpp's name -> Hugging Face's. Raises `UserError` unless the file has just these tensors."""
    # Before a dictionary of so many layers is made: a damaged count may be any number.
    if (last := f"blk.{description.depth - 1}.attn_norm.weight") not in header.tensors:
        raise UserError(f"{header.path}: tensor {last} is missing")
    expected = shapes(description.cfg, description.depth)
    names = {_gguf_name(name): name for name in expected}
    for name, info in header.tensors.items():
        if name in description.handled:
            continue
        where = f"{header.path}: tensor {name}"
        if name not in names:
            kind = f"{description.architecture} model of {description.depth} layers"
            raise UserError(f"{where} belongs to no {kind} that is supported")
        wanted = expected[names[name]]
        if info.shape != wanted:
            raise UserError(f"{where} has shape {list(info.shape)}, must be {list(wanted)}")
        _require_readable(info, where)
    missing = [name for name in names if name not in header.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{header.path}: tensor {missing[0]} is missing{more}")
    return names


def _require_readable(info: TensorInfo, where: str) -> None:
    import gguf

    one_block = np.zeros((1, gguf.GGML_QUANT_SIZES[info.type][1]), np.uint8)
    try:
        gguf.quants.dequantize(one_block, info.type)
    except NotImplementedError:
        raise UserError(
            f"{where} is of type {info.type.name}, which the package gguf cannot dequantize"
        ) from None


def _read_tensors(
    header: Header, description: Description, names: dict[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    heads = {"attn_q": description.cfg.heads, "attn_k": description.cfg.num_kv_heads}
    for name, info in header.tensors.items():
        if name in description.handled:
            continue
        tensor = read_tensor(header.path, info)
        block = name.split(".")[-2]
        if description.architecture == "llama" and block in heads:
            tensor = _rotate_half_rows(tensor, heads[block])
        yield names[name], tensor


def _rotate_half_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection (or its bias) from llama.cpp's order of neighbours to that of halves."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _fingerprint(header: Header) -> str:
    digest = hashlib.sha256()
    with header.path.open("rb") as file:
        digest.update(file.read(header.start))
        for info in header.tensors.values():
            for piece in range(_PIECES):
                last = max(info.nbytes - _PIECE, 0)
                file.seek(info.offset + last * piece // (_PIECES - 1))
                digest.update(file.read(min(_PIECE, info.nbytes)))
    return digest.hexdigest()
