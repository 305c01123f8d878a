"""What decides a run, and what training needs of a corpus."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from depthgrow_jax.growth import GrowthConfig, Stage
from depthgrow_jax.model import ModelConfig
from depthgrow_jax.train.config import (
    CheckpointConfig,
    InitFromConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)


class Batches(Protocol):
    """What training needs of a corpus; `depthgrow_jax.data.Corpus` is one."""

    @property
    def data_hash(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def separator_id(self) -> int: ...

    @property
    def mask_id(self) -> int: ...

    def train_batch(
        self, step: int, batch_size: int, seed: int, *, process_index: int, process_count: int
    ) -> np.ndarray:
        """`[batch_size / process_count, T + 1]`, a pure function of its arguments."""
        ...

    def validation_batches(
        self, batch_size: int, max_batches: int, *, process_index: int, process_count: int
    ) -> Iterable[np.ndarray]:
        """The same batches at every call, `[batch_size / process_count, T + 1]` each."""
        ...


class RunSpec(NamedTuple):
    """Everything that decides a run. `label` is shown; `plan` and `config_hash` are recorded."""

    label: str
    seed: int
    model: ModelConfig
    growth: GrowthConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    mesh: MeshConfig
    init_from: InitFromConfig
    stages: tuple[Stage, ...]
    plan: dict[str, Any]
    config_hash: str
