"""Where arrays live: a mesh of `data` x `fsdp` devices, and a rule for every leaf."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from depthgrow_jax.errors import UserError, require
from depthgrow_jax.train.config import MeshConfig

BATCH_AXES = ("data", "fsdp")


def make_mesh(cfg: MeshConfig, rows: int) -> Mesh:
    """The mesh of the config over the visible devices.

    Args:
      rows: sequences in memory at once; the devices must divide them.

    Raises `UserError` if the devices are too few or do not divide `rows`.
    """
    devices = jax.device_count()
    require(devices % cfg.fsdp == 0, "mesh.fsdp", cfg.fsdp, f"must divide the {devices} devices")
    data = cfg.data or devices // cfg.fsdp
    if data * cfg.fsdp > devices:
        raise UserError(
            f"mesh.data={data}: mesh.data * mesh.fsdp={data * cfg.fsdp} exceeds the {devices} devices"
        )
    if rows % (data * cfg.fsdp):
        raise UserError(
            f"mesh.data={data}: mesh.data * mesh.fsdp={data * cfg.fsdp} must divide "
            f"train.batch_size / train.accumulation={rows}"
        )
    chosen = jax.devices()[: data * cfg.fsdp]
    return jax.make_mesh((data, cfg.fsdp), BATCH_AXES, axis_types=(AxisType.Auto,) * 2, devices=chosen)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Batch axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def state_shardings(mesh: Mesh, state):
    """A sharding for each leaf: the largest axis that `fsdp` divides is split over it.

    The layer axis is never split: growth changes it, and every device runs every layer. A leaf without such
    an axis is replicated. The rule looks at shapes only, so moments lie where their parameters lie.
    """
    size = mesh.shape["fsdp"]

    def rule(path, leaf):
        stacked = any(getattr(key, "key", None) == "layers" for key in path)
        axes = range(1 if stacked else 0, leaf.ndim)
        fits = [axis for axis in axes if leaf.shape[axis] % size == 0 and leaf.shape[axis] >= size]
        if size == 1 or leaf.ndim == 0 or not fits or not np.issubdtype(leaf.dtype, np.floating):
            return NamedSharding(mesh, PartitionSpec())
        widest = max(fits, key=lambda axis: leaf.shape[axis])
        return NamedSharding(
            mesh, PartitionSpec(*("fsdp" if axis == widest else None for axis in range(leaf.ndim)))
        )

    return jax.tree_util.tree_map_with_path(rule, state)


def shard_batch(mesh: Mesh, local: np.ndarray) -> jax.Array:
    """This process's rows of the batch, as part of one global array."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), local)
