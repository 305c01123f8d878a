"""A model as the directory that `save_pretrained` of Hugging Face `transformers` would write.

config.json  generation_config.json
model.safetensors, or model-00001-of-0000N.safetensors ... and model.safetensors.index.json
tokenizer.json  tokenizer_config.json  (and what else the tokenizer came with)
depthgrow.json   where the model comes from
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors import SafetensorError
from safetensors.numpy import save_file

from depthgrow_jax.errors import UserError, require_choice
from depthgrow_jax.interop import hf_config
from depthgrow_jax.interop.folding import fold, folded_config
from depthgrow_jax.interop.pretrained import Vocabulary
from depthgrow_jax.interop.tensors import shapes, unstack
from depthgrow_jax.model import LayerProgram, ModelConfig, Params, depth_of
from depthgrow_jax.rundir import resolve_directory

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def check_export(
    cfg: ModelConfig,
    depth: int,
    directory: str | os.PathLike,
    *,
    dtype: str,
    context: int,
    vocabulary: Vocabulary | None,
) -> None:
    """Refuses what `export` would refuse without looking at a weight or a factor.

    Args:
      depth: the layers of the export, which are the steps of the program.

    Raises `UserError` naming the field of the model, the dtype or the directory.
    """
    require_choice("--dtype", dtype, DTYPES)
    _config(cfg, depth, dtype, context, vocabulary)
    free_directory(directory)


def export(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    directory: str | os.PathLike,
    *,
    dtype: str = "float32",
    context: int,
    vocabulary: Vocabulary | None,
    lineage: dict[str, Any],
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes the network that `program` makes of `params`, its factors folded into the weights.

    The directory is complete or it is not there: it is written beside its place and renamed. Memory: the
    layers once more at most (`fold`), and one shard.

    Args:
      directory: a new or an empty one; parents are made.
      context: the longest sequence, in tokens.
      vocabulary: None writes no tokenizer, and no ids into the configs.
      lineage: JSON; written to `depthgrow.json` and, as text, to the metadata `depthgrow` of every shard.
      shard_bytes: a file of weights is not larger, unless it is a single tensor.

    Raises:
      UserError: as `check_export` and `fold`; a value that is not finite, or too large for `dtype`, naming
        the tensor; a directory that cannot be written.
    """
    check_export(cfg, program.steps, directory, dtype=dtype, context=context, vocabulary=vocabulary)
    plain, folded = fold(cfg, params, program)
    texts = _texts(_config(cfg, program.steps, dtype, context, vocabulary), vocabulary, context)
    texts["depthgrow.json"] = _json(lineage)
    metadata = {"format": "pt", "depthgrow": json.dumps(lineage)}
    with _complete_or_absent(free_directory(directory)) as place:
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
        _write_weights(plain, folded, place, dtype, metadata, shard_bytes)


def _config(
    cfg: ModelConfig, depth: int, dtype: str, context: int, vocabulary: Vocabulary | None
) -> dict[str, Any]:
    ids = _ids(vocabulary)
    eos = ids.get("eos_token_id")
    return hf_config.write(
        folded_config(cfg), depth, context, dtype=dtype, bos=ids.get("bos_token_id"), eos=eos
    )


def _ids(vocabulary: Vocabulary | None) -> dict[str, Any]:
    """The token ids that a generation config holds; an end is a list only where there are several."""
    ids: dict[str, Any] = {}
    if vocabulary is not None and vocabulary.prefix:
        ids["bos_token_id"] = vocabulary.prefix[0]
    if vocabulary is not None and vocabulary.ends:
        ends = vocabulary.ends
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    return ids


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _texts(config: dict[str, Any], vocabulary: Vocabulary | None, context: int) -> dict[str, str]:
    """Contents of the files that hold no weights, by name."""
    texts: dict[str, str] = {}
    if vocabulary is not None:
        texts["tokenizer_config.json"] = _json(_tokenizer_config(vocabulary, context))
        texts |= vocabulary.files
        texts["tokenizer.json"] = vocabulary.json
    # Sampling settings that came with the tokenizer stay; the ids are those that this model was run with.
    generation = json.loads(texts.get("generation_config.json", "{}")) | _ids(vocabulary)
    return texts | {"config.json": _json(config), "generation_config.json": _json(generation)}


def _tokenizer_config(vocabulary: Vocabulary, context: int) -> dict[str, Any]:
    """For a tokenizer that came without one: which of its tokens have a part to play."""
    described = json.loads(vocabulary.json)
    spelling = tokenizers.Tokenizer.from_str(vocabulary.json).id_to_token
    named = {
        "bos_token": spelling(vocabulary.prefix[0]) if vocabulary.prefix else None,
        "eos_token": spelling(vocabulary.ends[0]) if vocabulary.ends else None,
        "unk_token": described["model"].get("unk_token"),
        "pad_token": (described.get("padding") or {}).get("pad_token"),
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{part: token for part, token in named.items() if token is not None},
    }


def _write_weights(
    cfg: ModelConfig,
    params: Params,
    place: pathlib.Path,
    dtype: str,
    metadata: dict[str, str],
    shard_bytes: int,
) -> None:
    counts = {name: math.prod(shape) for name, shape in shapes(cfg, depth_of(params)).items()}
    itemsize = DTYPES[dtype].itemsize
    shards = _shards({name: count * itemsize for name, count in counts.items()}, shard_bytes)
    total = len(shards)
    files = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    files = files if total > 1 else ["model.safetensors"]

    tensors = unstack(cfg, params)  # in the order of `shapes`
    for file, names in zip(files, shards, strict=True):
        # No name is bound to the shard: it is gone before the next one is made.
        save_file(
            {name: _cast(name, tensor, dtype) for name, tensor in itertools.islice(tensors, len(names))},
            place / file,
            metadata,
        )
        # save_file makes files that their owner alone may read.
        (place / file).chmod((place / "config.json").stat().st_mode)
    if total > 1:
        sizes = {"total_parameters": sum(counts.values()), "total_size": sum(counts.values()) * itemsize}
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": sizes, "weight_map": where}
        (place / "model.safetensors.index.json").write_text(_json(index), encoding="utf-8")


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in their order, cut so that no part exceeds `limit` bytes unless it is one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _cast(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    if not np.isfinite(tensor).all():
        raise UserError(f"tensor {name}: holds values that are not finite")
    with np.errstate(over="ignore"):
        cast = tensor.astype(DTYPES[dtype], copy=False)
    if not np.isfinite(cast).all():
        largest, limit = np.abs(tensor).max(), ml_dtypes.finfo(DTYPES[dtype]).max
        raise UserError(f"tensor {name}: holds {largest:.6g}; {dtype} ends at {float(limit):.6g}")
    # save_file writes the memory of a strided view as it lies there, and says nothing.
    return np.ascontiguousarray(cast)


def free_directory(directory: str | os.PathLike) -> pathlib.Path:
    """The absolute path of a directory that can be written. Raises `UserError` naming `--out`."""
    named = f"--out={str(directory)!r}"
    try:
        target = resolve_directory(os.fspath(directory), "--out").resolve()
        if target.exists() and any(target.iterdir()):
            raise UserError(f"{named}: exists and is not empty; must be a new or an empty directory")
    except (OSError, RuntimeError) as error:  # a symlink loop is a RuntimeError until Python 3.13
        raise UserError(f"{named}: cannot be read ({error})") from None
    if os.path.ismount(target):
        raise UserError(f"{named}: is a mount point; must be a directory inside it, which can be renamed")
    above = next(parent for parent in target.parents if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{named}: {above} is not writable")
    return target


@contextlib.contextmanager
def _complete_or_absent(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a directory beside `target`; renames it to `target` after the block, removes it if that fails.

    Raises `UserError` for an error of the file system, in the block too.
    """
    place = target.with_name(f"{_unfinished(target)}{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        try:
            place.mkdir()
            yield place
            os.rename(place, target)  # replaces an empty directory, and no other
        except BaseException:  # Ctrl-C too
            shutil.rmtree(place, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--out={str(target)!r}: cannot be written ({reason})") from error


def _unfinished(target: pathlib.Path) -> str:
    """What the name of a directory that becomes `target` starts with; the id of its process follows."""
    return f".{target.name}.export-"


def _remove_leftovers(target: pathlib.Path) -> None:
    """Removes what exports to `target` left behind whose processes were killed."""
    form = re.compile(re.escape(_unfinished(target)) + r"(\d{1,9})")
    for path in list(target.parent.iterdir()):
        match = form.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink() and not _runs_elsewhere(int(match[1])):
            shutil.rmtree(path)


def _runs_elsewhere(process: int) -> bool:
    """Whether another process than this one has the id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()
