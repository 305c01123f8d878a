"""Checkpoints: Orbax behind one small door.

A checkpoint is a few named items (parameters, training state, average) and a JSON one, `meta`, that says
what they are (step, stage, depth, lineage, config hash). The JSON is read first: arrays are only ever
restored into shapes built for the depth it names.
"""

import copy
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_manager

from depthgrow_jax.errors import UserError
from depthgrow_jax.growth import check_like

# Layout of `meta` and of the items; raised when either changes.
FORMAT = 1


class Checkpoints:
    """The `checkpoints/` of one run directory.

    Saving is asynchronous and atomic: a step exists only when it is complete, and what a killed process
    leaves half-written is ignored and later removed.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        keep: int = 1,
        keep_steps: tuple[int, ...] = (),
        writable: bool = True,
    ):
        """Opens the directory.

        Args:
          keep: regular checkpoints to keep.
          keep_steps: steps that are kept whatever comes later (growth boundaries, the end).
          writable: False never creates or deletes anything.
        """
        policy = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy.AnyPreservationPolicy(
                [policy.LatestN(keep), policy.CustomSteps(list(keep_steps))]
            ),
            cleanup_tmp_directories=writable,
            create=writable,
            read_only=not writable,
            save_interval_steps=int(writable),
        )
        self.directory = directory
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=options,
        )

    def latest(self) -> int | None:
        """Newest complete step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All complete steps, ascending."""
        return sorted(self._manager.all_steps())

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON item of a step. Raises `UserError` if it cannot be read."""
        try:
            meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            if not isinstance(meta, dict) or meta.get("format") != FORMAT:
                raise ValueError(f"meta is not of format {FORMAT}")
        except Exception as error:  # whatever the library meets in a damaged file
            raise self._unusable(step, error) from error
        return meta

    def _unusable(self, step: int, error: Exception) -> UserError:
        others = [other for other in self.steps() if other != step]
        reason = " ".join(str(error).split())[:300]
        return UserError(
            f"{self.directory / str(step)}: damaged, or not the state of this config ({reason}); "
            f"complete checkpoints besides it: {others or 'none'}; without it a run goes on from the newest"
        )

    def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Items of a step, each in the structure, shapes, dtypes and shardings of its abstract tree.

        Raises `UserError` if the stored arrays are not exactly these.
        """
        args = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        try:
            for name, tree in abstract.items():
                self._check_stored(step, name, tree)
            items = self._manager.restore(step, args=ocp.args.Composite(**args))
            restored = {name: items[name] for name in abstract}
            check_like(restored, abstract, "checkpoint")
        except Exception as error:  # whatever the library meets in a damaged file
            raise self._unusable(step, error) from error
        return restored

    def _check_stored(self, step: int, name: str, abstract: Any) -> None:
        """Raises `ValueError` unless an item is stored in these shapes and dtypes: Orbax casts in silence."""
        path = epath.Path(self.directory.absolute()) / str(step) / name
        stored = _described(ocp.StandardCheckpointHandler().metadata(path).tree)
        wanted = _described(abstract)
        for leaf in sorted(stored.keys() | wanted.keys()):
            if stored.get(leaf) != wanted.get(leaf):
                raise ValueError(f"{name}.{leaf} is {stored.get(leaf)}, must be {wanted.get(leaf)}")

    def save(self, step: int, items: dict[str, Any], meta: dict[str, Any]) -> None:
        """Starts writing a step; returns when the arrays are copied. Raises `RuntimeError` if refused."""
        args: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        # A copy: the JSON is written in the background, while the run's sums and clocks go on.
        args["meta"] = ocp.args.JsonSave(copy.deepcopy(meta))
        refused = f"{self.directory}: step {step} was not saved; latest is {self.latest()}"
        try:
            saved = self._manager.save(step, args=ocp.args.Composite(**args), force=True)
        except checkpoint_manager.StepAlreadyExistsError as error:
            raise RuntimeError(refused) from error
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error
        if not saved:
            raise RuntimeError(refused)

    def _unwritable(self, error: Exception) -> UserError:
        reason = " ".join(str(error).split())[:300]
        return UserError(f"{self.directory}: cannot be written ({reason}); last complete: {self.latest()}")

    def wait(self) -> None:
        """Returns when everything saved is complete on disk; raises what went wrong in the background."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Waits and releases the directory."""
        self.wait()
        self._manager.close()


def _described(tree: Any) -> dict[str, str]:
    """`{"layers.mlp.up.kernel": "float32[3, 16, 32]"}`, alike for containers stored and live."""
    return {
        ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Abstract arrays that say where they are to be restored."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )
