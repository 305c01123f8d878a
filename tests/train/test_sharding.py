"""The same run on 1 and on 8 (fake) devices: the same losses, sharded state, and resumes both ways."""

import collections

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from toys import ToyBatches, in_fresh_process, merged, stop_after, stored, tiny_config, tiny_run

from depthgrow_jax.errors import Preempted, UserError
from depthgrow_jax.rundir import read_metrics
from depthgrow_jax.train import sharding
from depthgrow_jax.train.config import MeshConfig
from depthgrow_jax.train.loop import Run
from depthgrow_jax.train.signals import StopRequest

# One growth event after 3 of 6 steps.
SHORT = {
    "depth": 2,
    "growth": {"boundaries": (3,)},
    "train": {"steps": 6, "log_every": 1, "eval_every": 3, "ema_decay": 0.5},
}
ONE, FSDP, DATA = {"data": 1}, {"data": 2, "fsdp": 4}, {"data": 8}


def losses_of(directory) -> np.ndarray:
    lines = read_metrics(directory)
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]
    return np.array([line.get("loss", line.get("val_loss")) for line in lines])


def assert_close_runs(directory, other) -> None:
    np.testing.assert_allclose(losses_of(directory), losses_of(other), rtol=2e-5)
    for one, two in zip(*(jax.tree.leaves(stored(d, 6)) for d in (directory, other)), strict=True):
        np.testing.assert_allclose(one, two, rtol=5e-3, atol=2e-4)


STATIC = merged(SHORT, {"growth": {"operator": "none"}})


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [pytest.param(FSDP, SHORT, id="fsdp"), pytest.param(DATA, STATIC, id="data", marks=pytest.mark.slow)],
)
def test_eight_devices_give_the_losses_of_one(mesh, changes, uninterrupted):
    assert jax.device_count() == 8
    assert_close_runs(uninterrupted({**changes, "mesh": mesh}), uninterrupted({**changes, "mesh": ONE}))


@pytest.mark.slow
def test_masked_corruption_does_not_depend_on_devices(uninterrupted):
    masked = merged(
        STATIC,
        {
            "depth": 1,
            "model": {"causal": False},
            "train": {"objective": "masked", "mask_rate": 0.4, "accumulation": 2},
        },
    )
    assert_close_runs(
        uninterrupted({**masked, "mesh": {"data": 1, "fsdp": 4}}), uninterrupted({**masked, "mesh": ONE})
    )


@pytest.mark.parametrize(("first", "second"), [(FSDP, ONE), (ONE, FSDP)])
@pytest.mark.parametrize("stop", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_resumes_on_another_mesh(first, second, stop, uninterrupted, tmp_path, monkeypatch):
    """Stopped at the event and after it; the checkpoint knows nothing of the devices that wrote it."""
    monkeypatch.setattr(StopRequest, "asked", stop_after(stop))
    with pytest.raises(Preempted):
        tiny_run(tmp_path / "run", tiny_config(**SHORT, mesh=first)).train()
    tiny_run(tmp_path / "run", tiny_config(**SHORT, mesh=second)).train()
    assert_close_runs(tmp_path / "run", uninterrupted({**SHORT, "mesh": ONE}))


@pytest.mark.slow
def test_resumes_in_processes_with_other_devices(uninterrupted, tmp_path):
    """Real device counts of 8 and 1: there, back, and there again."""
    every = {**SHORT, "mesh": {"data": 0}}
    for number, counts in enumerate([(8, 1, 8), (1, 8, 1)]):
        directory = tmp_path / str(number)
        for stop, devices in zip((2, 4, None), counts, strict=True):
            job = {"directory": str(directory), "changes": every, "stop": stop}
            in_fresh_process([job], tmp_path, devices=devices)
        assert_close_runs(directory, uninterrupted({**SHORT, "mesh": ONE}))


def test_the_state_in_training_is_really_split(tmp_path, monkeypatch):
    """Each fsdp device holds a quarter of every matrix, moment and average, before and after growth."""
    save = Run._save
    run = tiny_run(tmp_path / "run", tiny_config(**SHORT, mesh=FSDP))
    # States are donated to the next step: what is looked at must be looked at when it is saved.
    shapes = []

    def look(self, state, *args):
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            pieces = {shard.data.shape for shard in leaf.addressable_shards}
            shapes.append((jax.tree_util.keystr(path), leaf.shape, pieces, len(leaf.addressable_shards)))
        save(self, state, *args)

    monkeypatch.setattr(Run, "_save", look)
    run.train()
    split = collections.Counter()
    for name, shape, pieces, count in shapes:
        assert count == 8 and len(pieces) == 1, name
        (piece,) = pieces
        axes = [axis for axis in range(len(shape)) if piece[axis] != shape[axis]]
        assert all(piece[axis] * 4 == shape[axis] for axis in axes), name
        if "layers" in name and ("kernel" in name or "scale" in name):
            assert len(axes) == 1 and axes[0] != 0, name  # never the layer axis
        if "table" in name:
            assert piece == (31, 4)
        split[bool(axes)] += 1
    assert split[True] > 60 and len(shapes) > 80


def test_rule_picks_the_widest_axis_that_divides():
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4), 8)
    leaf = lambda *shape, dtype=np.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    tree = {
        "layers": {"wide": leaf(8, 4, 16), "odd": leaf(8, 3, 5), "norm": leaf(4, 8), "count": leaf(8)},
        "table": leaf(31, 12),
        "step": leaf(dtype=np.int32),
        "born": leaf(8, dtype=np.int32),
    }
    specs = jax.tree.map(lambda s: s.spec, sharding.state_shardings(mesh, tree))
    assert specs == {
        "layers": {
            "wide": PartitionSpec(None, None, "fsdp"),
            "odd": PartitionSpec(),
            "norm": PartitionSpec(None, "fsdp"),
            "count": PartitionSpec(),
        },
        "table": PartitionSpec(None, "fsdp"),
        "step": PartitionSpec(),
        "born": PartitionSpec(),
    }


def test_mesh_of_the_config():
    shape = lambda **fields: dict(sharding.make_mesh(MeshConfig(**fields), 8).shape)  # noqa: E731
    assert shape() == {"data": 8, "fsdp": 1}
    assert shape(fsdp=4) == {"data": 2, "fsdp": 4}
    assert shape(data=1) == {"data": 1, "fsdp": 1}
    assert shape(data=2, fsdp=2) == {"data": 2, "fsdp": 2}


@pytest.mark.parametrize(
    ("fields", "rows", "message"),
    [
        ({"fsdp": 3}, 8, r"mesh.fsdp=3: must divide the 8 devices"),
        ({"fsdp": 16}, 16, r"mesh.fsdp=16: must divide the 8 devices"),
        ({"data": 4, "fsdp": 4}, 16, r"mesh.data=4: .* exceeds the 8 devices"),
        ({"data": 8}, 12, r"mesh.data=8: .*=8 must divide train.batch_size / train.accumulation=12"),
        ({}, 4, r"mesh.data=8: .* must divide train.batch_size"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(fields, rows, message):
    with pytest.raises(UserError, match=message):
        sharding.make_mesh(MeshConfig(**fields), rows)


def test_a_run_whose_mesh_does_not_fit_writes_nothing(tmp_path):
    with pytest.raises(UserError, match=r"mesh.data=8: .* must divide"):
        tiny_run(tmp_path / "run", tiny_config(train={"accumulation": 2}, mesh={"data": 8}))
    assert list((tmp_path / "run").iterdir()) == []


def test_batches_are_split_over_all_devices():
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4), 8)
    rows = ToyBatches(8).train_batch(0, 8, 0)
    batch = sharding.shard_batch(mesh, rows)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(1, 9)}
    np.testing.assert_array_equal(batch, rows)
