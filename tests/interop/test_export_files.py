"""What an export leaves in the file system: shards, lineage, all or nothing, and what it refuses."""

import contextlib
import errno
import json
import os
import pathlib
import subprocess
import sys
import weakref

import jax
import numpy as np
import pytest
import safetensors
from random_models import random_params

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop import export as exporting
from depthgrow_jax.interop.export import check_export, export
from depthgrow_jax.model import ModelConfig, layer_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPTH, CONTEXT = 3, 64
BASE = {"vocab_size": 97, "width": 32, "heads": 4, "kv_heads": 2, "mlp_dim": 48, "tie_embeddings": False}
LINEAGE = {"run": "toy/midas/seed0", "step": 40, "stage": 1, "lineage": [[0, 1], [0, 1, 1]], "note": "é"}
SETTINGS = {"context": CONTEXT, "vocabulary": None, "lineage": LINEAGE}


def make(**changes):
    """(cfg, params, program) of a plain random model; `changes` of its config."""
    cfg = ModelConfig(**{**BASE, **changes})
    return cfg, random_params(cfg, DEPTH), layer_program(cfg, DEPTH)


def write(directory, **changes):
    """Exports a random model; `changes` of the settings."""
    export(*make(), directory, **{**SETTINGS, **changes})


def read_tensors(directory):
    with safetensors.safe_open(directory / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_one_shard_at_a_time_is_in_memory(tmp_path, monkeypatch):
    limit, most, refs = 20_000, [0], []

    def watched(cfg, params):
        for name, tensor in unstack(cfg, params):
            refs.append(weakref.ref(tensor))
            alive = [ref() for ref in refs]
            most[0] = max(most[0], sum(t.nbytes for t in alive if t is not None))
            del alive
            yield name, tensor

    unstack = exporting.unstack
    monkeypatch.setattr(exporting, "unstack", watched)
    write(tmp_path / "out", shard_bytes=limit)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert limit / 2 < most[0] <= limit + 4 * BASE["vocab_size"] * BASE["width"], "a shard and a tensor"


def test_strided_parameters_are_not_scrambled(tmp_path):
    """Views that are not contiguous in memory, in every leaf: their bytes are not their values in order."""
    cfg, params, program = make(qk_norm=True)

    def strided(leaf):
        wide = np.empty((*leaf.shape[:-1], 2 * leaf.shape[-1]), np.float32)
        wide[..., ::2] = leaf
        return wide[..., ::2]

    export(cfg, params, program, tmp_path / "plain", **SETTINGS)
    export(cfg, jax.tree.map(strided, params), program, tmp_path / "strided", **SETTINGS)
    plain, got = read_tensors(tmp_path / "plain"), read_tensors(tmp_path / "strided")
    assert all(np.array_equal(plain[name], got[name]) for name in plain)
    kernel = params["layers"]["mlp"]["up"]["kernel"][1]
    assert np.array_equal(got["model.layers.1.mlp.up_proj.weight"], kernel.T)
    assert np.array_equal(
        got["model.layers.1.input_layernorm.weight"], params["layers"]["attn_norm"]["scale"][1]
    )


def test_where_a_model_comes_from_is_in_the_directory_and_in_every_shard(tmp_path):
    write(tmp_path / "out", shard_bytes=30_000)
    assert json.loads((tmp_path / "out" / "depthgrow.json").read_text()) == LINEAGE
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1
    for path in shards:
        with safetensors.safe_open(path, framework="numpy") as file:
            assert file.metadata()["format"] == "pt"
            assert json.loads(file.metadata()["depthgrow"]) == LINEAGE


@pytest.mark.parametrize(
    ("fields", "dtype", "message"),
    [
        ({}, "float8", r"^--dtype='float8': must be one of float32, bfloat16, float16$"),
        ({"norm_placement": "sandwich"}, "float32", r"^model\.norm_placement='sandwich'"),
        (
            {"norm_placement": "post", "residual_scaling": "depth"},
            "float32",
            r"^model\.norm_placement='post'",
        ),
        ({"norm": "layer"}, "float32", r"^model\.norm='layer'"),
        ({"causal": False}, "float32", r"^model\.causal=False"),
    ],
)
def test_what_a_llama_cannot_hold_is_refused_before_weights_are_read(fields, dtype, message, tmp_path):
    cfg = ModelConfig(**{**BASE, **fields})
    settings = {"dtype": dtype, "context": CONTEXT, "vocabulary": None}
    with pytest.raises(UserError, match=message):
        check_export(cfg, DEPTH, tmp_path / "out", **settings)
    with pytest.raises(UserError, match=message):
        export(cfg, {}, layer_program(cfg, DEPTH), tmp_path / "out", lineage={}, **settings)
    assert not list(tmp_path.iterdir())


def check_place(directory):
    settings = {"dtype": "float32", "context": CONTEXT, "vocabulary": None}
    check_export(ModelConfig(**BASE), DEPTH, directory, **settings)


def test_a_directory_that_is_in_use_is_refused_and_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(
        UserError, match=r"^--out='.*/out': exists and is not empty; must be a new or an empty"
    ):
        write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    with pytest.raises(UserError, match=r"mine.txt is a file; must be a directory"):
        write(tmp_path / "out" / "mine.txt" / "deeper")


def test_an_empty_directory_is_filled_through_a_link_too_and_parents_are_made(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()
    write(tmp_path / "a" / "b" / "c")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["c"]
    assert (tmp_path / "a" / "b" / "c").stat().st_mode == (tmp_path / "a" / "b").stat().st_mode


def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"^--out='/': exists and is not empty"):
        check_place("/")
    monkeypatch.setattr(os.path, "ismount", lambda path: pathlib.Path(path) == tmp_path / "disk")
    with pytest.raises(UserError, match=r"^--out='.*/disk': is a mount point"):
        check_place(tmp_path / "disk")
    monkeypatch.setattr(os, "access", lambda path, mode: pathlib.Path(path) != tmp_path)
    with pytest.raises(UserError, match=rf"^--out='.*/deep/out': {tmp_path} is not writable$"):
        check_place(tmp_path / "deep" / "out")


def test_values_that_the_dtype_cannot_hold_are_refused_by_tensor(tmp_path):
    cfg, params, program = make()
    params["layers"]["mlp"]["down"]["kernel"][1, 2, 3] = -70000.0
    with pytest.raises(
        UserError,
        match=r"^tensor model\.layers\.1\.mlp\.down_proj\.weight: holds 70000; float16 ends at 65504$",
    ):
        export(cfg, params, program, tmp_path / "out", dtype="float16", **SETTINGS)
    assert not list(tmp_path.iterdir())
    export(cfg, params, program, tmp_path / "wide", dtype="bfloat16", **SETTINGS)
    params["head"]["norm"]["scale"][0] = np.nan
    with pytest.raises(UserError, match=r"^tensor model\.norm\.weight: holds values that are not finite$"):
        export(cfg, params, program, tmp_path / "out", **SETTINGS)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_fails_midway_leaves_nothing(failure, tmp_path, monkeypatch):
    written = []

    def fail_at_the_second(tensors, path, metadata):
        if written:
            raise failure
        written.append(path)
        save_file(tensors, path, metadata)
        assert path.exists() and not (tmp_path / "out").exists()

    save_file = exporting.save_file
    monkeypatch.setattr(exporting, "save_file", fail_at_the_second)
    expected = (
        pytest.raises(UserError, match=r"^--out='.*/out': cannot be written \(No space left on device\)$")
        if isinstance(failure, OSError)
        else pytest.raises(KeyboardInterrupt)
    )
    with expected:
        write(tmp_path / "out", shard_bytes=20_000)
    assert written and not list(tmp_path.iterdir())


def test_the_target_that_another_process_filled_meanwhile_wins(tmp_path, monkeypatch):
    def fill(*arguments):
        with contextlib.suppress(FileExistsError):
            (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs.txt").write_text("theirs")

    monkeypatch.setattr(exporting, "save_file", fill)
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs.txt"]


KILLED = """
import os, signal, sys
import jax, numpy
sys.path.insert(0, sys.argv[1])
from depthgrow_jax.interop import export
from depthgrow_jax.model import ModelConfig, abstract_params, layer_program

def kill_at_the_second(tensors, path, metadata, first=[True]):
    if not first:
        os.kill(os.getpid(), signal.SIGKILL)
    first.clear()
    save_file(tensors, path, metadata)

save_file, export.save_file = export.save_file, kill_at_the_second
cfg = ModelConfig(vocab_size=97, width=32, mlp_dim=48)
params = jax.tree.map(lambda leaf: numpy.ones(leaf.shape, numpy.float32), abstract_params(cfg, 2))
program = layer_program(cfg, 2)
settings = {"context": 64, "vocabulary": None, "lineage": {}, "shard_bytes": 20_000}
export.export(cfg, params, program, sys.argv[2], **settings)
"""


def test_what_a_killed_export_leaves_is_not_the_target_and_goes_with_the_next(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(ROOT), str(out)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".out.export-") and any(leftover.glob("*.safetensors"))

    # Names of others that look alike, and an export that still runs (this test's parent does), are not ours.
    others = [".out.export-notes", ".out2.export-1", f".out.export-{os.getppid()}"]
    # In a container a killed process often had the id that the next one gets.
    for name in [*others, f".out.export-{os.getpid()}"]:
        (tmp_path / name).mkdir()
    write(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "out"])
    config = json.loads((out / "config.json").read_text())
    assert config["num_hidden_layers"] == DEPTH and read_tensors(out)


def test_weights_may_be_read_by_those_who_may_read_the_other_files(tmp_path):
    write(tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
