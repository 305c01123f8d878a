"""The life of one run: start or resume, train each stage, grow, save, evaluate, finish.

    for every stage of the plan
        grow, if the state is still that of an earlier stage
        compile the step for this depth
        for every step: dispatch it, then read the metrics of the one before

A checkpoint at a growth boundary holds the state *before* growth: resuming there grows again, from the
plan, with the same result. Nothing else is special about it.
"""

import contextlib
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np

from depthgrow_jax import growth
from depthgrow_jax.errors import Diverged, Preempted, UserError
from depthgrow_jax.model import num_params
from depthgrow_jax.rundir import MetricsLog, read_json, read_metrics, started, write_json
from depthgrow_jax.stats import bootstrap_interval
from depthgrow_jax.train import sharding
from depthgrow_jax.train import state as states
from depthgrow_jax.train.checkpoints import FORMAT, Checkpoints
from depthgrow_jax.train.objective import SpecialTokens
from depthgrow_jax.train.optimizer import make_optimizer
from depthgrow_jax.train.progress import Progress
from depthgrow_jax.train.signals import StopRequest
from depthgrow_jax.train.spec import Batches, RunSpec
from depthgrow_jax.train.start import Setup, architecture, check_init_from, first_state, shardings_of
from depthgrow_jax.train.step import GROWTH, StepConfig, make_eval_step, make_train_step


class _Clock:
    """Wall seconds by kind of work, continued over resumes."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = {"compile": 0.0, "step": 0.0, "evaluate": 0.0, "save": 0.0, "grow": 0.0, **seconds}

    @contextlib.contextmanager
    def measure(self, kind: str):
        start = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - start


class _Window:
    """Means of the metrics since the last line of the log; saved with a checkpoint, so that a resumed run
    writes the same lines."""

    def __init__(self, sums: dict[str, float]):
        self.sums = dict(sums)

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in {**metrics, "count": 1.0}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        count = self.sums.pop("count")
        means = {name: total / count for name, total in self.sums.items()}
        self.sums = {}
        return means


class Run:
    """One run in one process. `train` is its whole interface; the parts are methods for the reader's sake."""

    def __init__(self, spec: RunSpec, batches: Batches, directory: pathlib.Path):
        """Sets up what needs no device memory, and writes nothing.

        Raises `UserError` for devices that do not fit and for an `init_from` that cannot be used.
        """
        self.spec, self.batches, self.directory = spec, batches, directory
        self.total = spec.train.steps
        mesh = sharding.make_mesh(spec.mesh, spec.train.batch_size // spec.train.accumulation)
        self.setup = Setup(spec, make_optimizer(spec.optimizer), mesh)
        events = tuple(stage.first for stage in spec.stages[1:])
        special = SpecialTokens(batches.vocab_size, batches.separator_id, batches.mask_id)
        self.step_config = StepConfig(
            spec.model, spec.growth, spec.train, spec.optimizer, special, events, spec.seed
        )
        self.process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        self.is_main = jax.process_index() == 0
        self.compilations = 0
        self.keep_steps = (*events, self.total)
        if spec.init_from.path and not started(directory):
            check_init_from(spec)

    # ---- parts of the loop --------------------------------------------------------------------------------

    def _grow(self, state: states.TrainState, stage: int) -> states.TrainState:
        """The state of stage `stage` from that of the stage before, on the same devices."""
        event = self.spec.stages[stage].event
        assert event is not None
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.spec.seed), GROWTH), stage)

        def event_fn(old):
            return growth.grow(
                old,
                event,
                model=self.spec.model,
                tx=self.setup.tx,
                key=key,
                init=self.spec.growth.init,
                optimizer=self.spec.growth.optimizer,
            )

        abstract = jax.eval_shape(event_fn, state)
        return jax.jit(event_fn, out_shardings=sharding.state_shardings(self.setup.mesh, abstract))(state)

    def _compile(self, state: states.TrainState):
        """Train and eval step for the state's depth, compiled ahead of time: they cannot retrace."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        rows, width = self.spec.train.batch_size, self.spec.train.sequence_length + 1
        on_batch = sharding.batch_sharding(self.setup.mesh)
        tokens = jax.ShapeDtypeStruct((rows, width), np.int32, sharding=on_batch)
        few = jax.ShapeDtypeStruct((rows // self.spec.train.accumulation, width), np.int32, sharding=on_batch)
        replicated = jax.sharding.NamedSharding(self.setup.mesh, jax.sharding.PartitionSpec())
        train_step = jax.jit(
            make_train_step(self.step_config, self.setup.tx),
            donate_argnums=0,
            out_shardings=(shardings_of(abstract), replicated),
        )
        eval_step = jax.jit(make_eval_step(self.step_config), out_shardings=replicated)
        index = jax.ShapeDtypeStruct((), np.int32)
        self.compilations += 1
        return train_step.lower(abstract, tokens).compile(), eval_step.lower(abstract, few, index).compile()

    def _batch(self, step: int) -> jax.Array:
        rows = self.batches.train_batch(step, self.spec.train.batch_size, self.spec.seed, **self.process)
        return sharding.shard_batch(self.setup.mesh, rows)

    def _evaluate(self, eval_fn, state) -> dict[str, float]:
        """Validation loss, nats a target, with its 95% bootstrap interval over sequences.

        Always the same `eval_batches * batch_size` sequences, a microbatch at a time.
        """
        train, results = self.spec.train, []
        for batch in self.batches.validation_batches(train.batch_size, train.eval_batches, **self.process):
            for rows in np.split(batch, train.accumulation):
                tokens = sharding.shard_batch(self.setup.mesh, rows)
                results.append(eval_fn(state, tokens, np.int32(len(results))))
        losses = np.concatenate([np.asarray(loss) for loss, _ in results])
        targets = np.concatenate([np.asarray(count) for _, count in results])
        if not targets.sum():
            raise UserError(
                f"train.mask_rate={train.mask_rate}: hides no position of the {len(losses)} validation "
                "sequences; raise it, train.eval_batches or train.sequence_length"
            )
        low, high = bootstrap_interval(losses, targets)
        mean = float(losses.sum(dtype=np.float64) / targets.sum(dtype=np.float64))
        return {"val_loss": mean, "val_loss_low": low, "val_loss_high": high, "val_sequences": len(losses)}

    def _meta(self, state, step: int, stage: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": step,
            "stage": stage,
            "depth": self.spec.stages[stage].depth,
            "lineage": np.asarray(state.lineage).tolist(),
            "born": np.asarray(state.born).tolist(),
            "model": architecture(self.spec.model),
            "config_hash": self.spec.config_hash,
            "data_hash": self.batches.data_hash,
            "seconds": self.clock.seconds,
            "window": self.window.sums,
            "evaluation": self.evaluation,
            "jax": jax.__version__,
        }

    def _save(self, state, step: int, stage: int) -> None:
        if step == self.saved:
            return
        with self.clock.measure("save"):
            self.checkpoints.save(step, states.to_items(state), self._meta(state, step, stage))
        self.saved = step

    # ---- the loop -----------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Trains to the end and returns what `DONE` holds.

        Raises:
          UserError: a checkpoint that does not belong to this run.
          Diverged: a loss or gradient that is not finite; nothing is saved after it.
          Preempted: asked to stop; the state is saved.
        """
        self.checkpoints = Checkpoints(
            self.directory / "checkpoints", keep=self.spec.checkpoint.keep, keep_steps=self.keep_steps
        )
        state, meta = first_state(self.setup, self.checkpoints, self.batches.data_hash)
        step, stage = meta["step"], meta["stage"]
        self.saved = step if self.checkpoints.latest() is not None else None
        self.clock, self.window = _Clock(meta["seconds"]), _Window(meta["window"])
        self.evaluation = meta["evaluation"]
        self.progress = Progress(self.spec.label, self.total, silent=not self.is_main)
        self.log = MetricsLog(self.directory, step) if self.is_main else None
        if self.saved:
            self.progress.line(f"resumes after step {step} at depth {self.spec.stages[stage].depth}")
        try:
            with StopRequest() as stop:
                while True:
                    while stage < growth.stage_at(self.spec.stages, step):
                        stage += 1
                        with self.clock.measure("grow"):
                            state = jax.block_until_ready(self._grow(state, stage))
                        depth = self.spec.stages[stage].depth
                        self.progress.line(f"grows to depth {depth} after step {step}")
                    if step >= self.total:
                        break
                    state, step = self._train_stage(state, step, stage, stop)
                # Asked during the last step: this run still finishes, what would follow does not start.
                self.checkpoints.wait()
                stops = stop.asked(step)
        finally:
            self.progress.close()
            if self.log:
                self.log.close()
            self.checkpoints.close()
        result = self._finish(state, stage)
        if stops:
            raise Preempted(f"{self.directory}: finished, then stopped as asked; the same command goes on")
        return result

    def _train_stage(self, state, step: int, stage: int, stop: StopRequest):
        """Steps `step..` of one stage; returns the state before growth, saved, and its step."""
        spec, end = self.spec, self.spec.stages[stage].stop
        with self.clock.measure("compile"):
            train_fn, eval_fn = self._compile(state)
        pending: list[tuple[int, Any]] = []
        self.line_step, self.line_seconds = step, self.clock.seconds["step"]
        started = time.perf_counter()
        batch = self._batch(step)
        while step < end:
            state, metrics = train_fn(state, batch)
            step += 1
            pending.append((step, metrics))
            if step < end:
                batch = self._batch(step)  # while the device works
            at_end = step == end
            evaluates = at_end and end == self.total
            evaluates |= bool(spec.train.eval_every) and step % spec.train.eval_every == 0
            saves = at_end or (bool(spec.checkpoint.every) and step % spec.checkpoint.every == 0)
            stops = stop.asked(step)
            pauses = evaluates or saves or stops
            while len(pending) > (0 if pauses else 1):
                done, values = pending.pop(0)
                self._record(done, stage, {name: float(v) for name, v in values.items()}, started)
            if not pauses:
                continue
            self.clock.seconds["step"] += time.perf_counter() - started
            if evaluates:
                with self.clock.measure("evaluate"):
                    self.evaluation = self._evaluate(eval_fn, state)
                if self.log:
                    self.log.write(step, self.evaluation)
                self.progress.line(f"step {step} validation loss {self.evaluation['val_loss']:.4f}")
            if saves or stops:
                self._save(state, step, stage)
            if stops and step < self.total:
                self.checkpoints.wait()
                raise Preempted(
                    f"{self.directory}: stopped after step {step}, saved; the same command goes on"
                )
            started = time.perf_counter()
        return state, step

    def _record(self, step: int, stage: int, metrics: dict[str, float], started: float) -> None:
        """Checks the metrics of one step, and writes a line of the log when one is due."""
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
        if bad:
            self.checkpoints.wait()
            latest = self.checkpoints.latest()
            good = "none" if latest is None else str(self.checkpoints.directory / str(latest))
            raise Diverged(f"{bad[0]} is {metrics[bad[0]]} at step {step}; last good checkpoint: {good}")
        self.window.add(metrics)
        if step % self.spec.train.log_every and step != self.total:
            return
        stage_plan = self.spec.plan["stages"][stage]
        tokens_per_step = self.spec.train.batch_size * self.spec.train.sequence_length
        seconds = self.clock.seconds["step"] + time.perf_counter() - started
        rate = (step - self.line_step) * tokens_per_step / max(seconds - self.line_seconds, 1e-9)
        self.line_step, self.line_seconds = step, seconds
        flops = growth.flops_done(self.spec.plan, step)
        per_token = stage_plan["flops"] / stage_plan["tokens"]
        means = self.window.means() | {"learning_rate": metrics["learning_rate"]}
        if self.log:
            self.log.write(
                step,
                means
                | {
                    "stage": stage + 1,
                    "depth": stage_plan["depth"],
                    "tokens": step * tokens_per_step,
                    "flops": flops,
                    "tokens_per_second": rate,
                },
            )
        self.progress.update(
            step,
            stage=f"{stage + 1}/{len(self.spec.stages)}",
            depth=stage_plan["depth"],
            loss=means["loss"],
            tokens_per_second=rate,
            seconds_left=(self.spec.plan["flops"] - flops) / max(rate * per_token, 1e-9),
        )

    def _finish(self, state, stage: int) -> dict[str, Any]:
        """Writes the `DONE` mark, the run's results; only the first process has them."""
        if not self.is_main:
            return {}
        # Mean over the last twentieth of the run: a single batch is too noisy to compare arms by.
        lines = [line for line in read_metrics(self.directory) if "loss" in line]
        if not lines or lines[-1]["step"] != self.total:
            raise UserError(
                f"{self.directory}/metrics.jsonl: does not reach step {self.total}; was it changed?"
            )
        tail = [line["loss"] for line in lines if line["step"] > 0.95 * self.total]
        result = {
            "steps": self.total,
            "depth": self.spec.stages[stage].depth,
            "params": num_params(state.params),
            "tokens": self.spec.plan["tokens"],
            "flops": self.spec.plan["flops"],
            "train_loss": sum(tail) / len(tail),
            **self.evaluation,
            "seconds": self.clock.seconds,
            "compilations": self.compilations,
            "config_hash": self.spec.config_hash,
            "data_hash": self.batches.data_hash,
        }
        write_json(self.directory / "DONE", result)
        return result


def finished(directory: pathlib.Path) -> dict[str, Any] | None:
    """What the `DONE` mark of a run directory holds, or None."""
    path = directory / "DONE"
    if not path.exists():
        return None
    result = read_json(path)
    if not isinstance(result, dict) or "config_hash" not in result:
        raise UserError(
            f"{path}: does not hold the results of a run; remove it to go on from the checkpoints"
        )
    return result
