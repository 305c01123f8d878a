"""Arms and seeds in one process: all checked before the first trains, finished kept, broken resumed."""

import json
import shutil

import pytest
from toys import MASK, SEPARATOR, TINY, VOCABULARY, ToyBatches, lines_of, merged, stop_after

from depthgrow_jax import corpora
from depthgrow_jax import experiment as glue
from depthgrow_jax.config import base_config, parse
from depthgrow_jax.errors import Preempted, UserError
from depthgrow_jax.rundir import locked, read_json
from depthgrow_jax.train.signals import StopRequest


def experiment_of(seeds=(0,), arms=None, **changes):
    """Static and grown arms of two layers, one event after 2 of 4 steps."""
    base = merged(
        TINY,
        {
            "depth": 2,
            "growth": {"operator": "none", "boundaries": (2,)},
            "train": {"steps": 4, "log_every": 1, "eval_every": 0},
            "optimizer": {"decay_steps": 0},
            "data": {"tokenizer": "bytes"},
            **changes,
        },
    )
    config = base_config()
    config.update(base)
    config.seeds = seeds
    config.arms = {"static": {}, "midas": {"growth": {"operator": "midas"}}} if arms is None else arms
    return parse(config)


@pytest.fixture
def loads(monkeypatch):
    """Toy batches in the place of the data package; the list holds the arguments of every load."""
    calls = []

    class Checked(ToyBatches):
        def check_batches(self, batch_size):
            if batch_size > 64:
                raise UserError(f"batch_size={batch_size}: fewer tokens than one batch")

    def load(cfg, *, sequence_length, vocab_size, masked, log):
        calls.append((cfg, sequence_length, vocab_size, masked))
        return Checked(sequence_length)

    monkeypatch.setattr(corpora, "load", load)
    assert (SEPARATOR, MASK) < (VOCABULARY, VOCABULARY)
    return calls


@pytest.fixture
def trained(tmp_path_factory, loads):
    """A finished experiment of two arms."""
    directory = tmp_path_factory.mktemp("experiment")
    assert glue.train_experiment(experiment_of(), str(directory)) == 0
    return directory


def test_every_arm_and_seed_in_its_own_directory(trained, loads, capsys):
    found = {str(path.parent.relative_to(trained)) for path in trained.rglob("DONE")}
    assert found == {"static/seed0", "midas/seed0"}
    assert len(loads) == 1  # runs of the same data share it
    summary = read_json(trained / "summary.json")
    assert [(row["arm"], row["seeds"], row["steps"], row["depth"]) for row in summary["arms"]] == [
        ("static", [0], 4, 2),
        ("midas", [0], 4, 2),
    ]
    static, midas = summary["arms"]
    assert static["saved_flops"] is None and 0 < midas["saved_flops"] < 1
    text = (trained / "summary.md").read_text()
    assert "| static |" in text and "| midas |" in text
    plan = read_json(trained / "midas" / "seed0" / "plan.json")
    assert [stage["depth"] for stage in plan["stages"]] == [1, 2]

    # Once more: nothing is run again, and the summary is the same.
    stamps = {path: path.stat().st_mtime_ns for path in trained.rglob("metrics.jsonl")}
    capsys.readouterr()
    assert glue.train_experiment(experiment_of(), str(trained)) == 0
    assert capsys.readouterr().err.count("already done, not run again") == 2
    assert stamps == {path: path.stat().st_mtime_ns for path in trained.rglob("metrics.jsonl")}
    assert read_json(trained / "summary.json") == summary and len(loads) == 1

    # A lost arm is trained again, to the same numbers; the others are left alone.
    before = lines_of(trained / "midas" / "seed0")
    shutil.rmtree(trained / "midas" / "seed0")
    assert glue.train_experiment(experiment_of(), str(trained)) == 0
    assert lines_of(trained / "midas" / "seed0") == before


def test_seeds_are_runs_of_one_arm(loads, tmp_path):
    """Each draws its own parameters and data order; the summary shows their spread."""
    assert glue.train_experiment(experiment_of(arms={}, seeds=(0, 1), depth=1), str(tmp_path)) == 0
    (row,) = read_json(tmp_path / "summary.json")["arms"]
    assert row["seeds"] == [0, 1] and len(set(row["val_loss"])) == len(set(row["train_loss"])) == 2
    assert "±" in (tmp_path / "summary.md").read_text().splitlines()[2]
    assert {path.parent.name for path in tmp_path.rglob("DONE")} == {"seed0", "seed1"}


def test_names_of_run_directories():
    names = lambda e: [glue.run_name(e, arm, seed) for arm, seed in e.runs]  # noqa: E731
    assert names(experiment_of()) == ["static/seed0", "midas/seed0"]
    assert names(experiment_of(arms={})) == ["."]
    assert names(experiment_of(arms={}, seeds=(3, 4))) == ["seed3", "seed4"]
    assert names(experiment_of(seeds=(3, 4)))[:2] == ["static/seed3", "static/seed4"]


def test_stopped_in_one_arm_the_next_does_not_start(loads, tmp_path, monkeypatch):
    """...and the same call goes on where it was stopped."""
    monkeypatch.setattr(StopRequest, "asked", stop_after(3))
    with pytest.raises(Preempted, match="static/seed0: stopped after step 3, saved"):
        glue.train_experiment(experiment_of(), str(tmp_path))
    assert not (tmp_path / "midas" / "seed0").exists() and not (tmp_path / "summary.json").exists()
    monkeypatch.setattr(StopRequest, "asked", stop_after(None))
    assert glue.train_experiment(experiment_of(), str(tmp_path)) == 0
    assert [json.loads(line)["step"] for line in lines_of(tmp_path / "static" / "seed0")] == [1, 2, 3, 4, 4]


def test_a_diverged_arm_does_not_stop_the_others(loads, tmp_path, capsys):
    wild = {"name": "sgd", "learning_rate": 1e30, "clip_norm": 0.0}
    arms = {"a_wild": {"optimizer": wild, "depth": 1}, "static": {}}
    assert glue.train_experiment(experiment_of(arms=arms), str(tmp_path)) == 3
    assert "error: a_wild/seed0: " in capsys.readouterr().err
    assert (
        not (tmp_path / "a_wild" / "seed0" / "DONE").exists()
        and (tmp_path / "static" / "seed0" / "DONE").exists()
    )
    summary = read_json(tmp_path / "summary.json")
    assert [row["arm"] for row in summary["arms"]] == ["static"]
    assert "- a_wild/seed0 diverged: " in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"train": {"batch_size": 128}}, "batch_size=128: fewer tokens than one batch"),
        ({"mesh": {"fsdp": 5}}, "mesh.fsdp=5: must divide the 8 devices"),
        ({"init_from": {"path": "nowhere"}}, "init_from.path='nowhere': no run"),
    ],
)
def test_what_would_stop_the_last_arm_stops_the_first(loads, tmp_path, arm, message):
    """Nothing is trained, nothing is written."""
    with pytest.raises(UserError, match=message):
        glue.train_experiment(experiment_of(arms={"static": {}, "z": arm}), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_another_config_is_refused_before_any_arm_trains(loads, tmp_path, monkeypatch):
    monkeypatch.setattr(StopRequest, "asked", stop_after(1))
    last = {"z": {"growth": {"operator": "midas"}}}
    with pytest.raises(Preempted):
        glue.train_experiment(experiment_of(arms=last), str(tmp_path))
    kept = (tmp_path / "z" / "seed0" / "config.json").read_text()
    last["z"]["optimizer"] = {"learning_rate": 0.5, "b1": 0.5}
    message = r"z/seed0: holds a run of another config \(optimizer.b1 was 0.9, now 0.5; optimizer"
    with pytest.raises(UserError, match=message):
        glue.train_experiment(experiment_of(arms={"static": {}, **last}), str(tmp_path))
    assert (
        not (tmp_path / "static" / "seed0").exists()
        and (tmp_path / "z" / "seed0" / "config.json").read_text() == kept
    )


@pytest.mark.slow
def test_free_fields_may_change_at_a_resume(loads, tmp_path, monkeypatch):
    monkeypatch.setattr(StopRequest, "asked", stop_after(1))
    with pytest.raises(Preempted):
        glue.train_experiment(experiment_of(arms={}), str(tmp_path))
    monkeypatch.setattr(StopRequest, "asked", stop_after(None))
    free = {"name": "renamed", "checkpoint": {"every": 1}, "mesh": {"data": 2}}
    assert glue.train_experiment(experiment_of(arms={}, **free), str(tmp_path)) == 0
    stored = read_json(tmp_path / "config.json")
    assert stored["config"]["name"] == "renamed" and "name" not in stored["binding"]


def test_runs_of_different_data_load_twice(loads, tmp_path, monkeypatch):
    monkeypatch.setattr(StopRequest, "asked", stop_after(1))
    arms = {"a": {}, "b": {}, "c": {"data": {"max_bytes": 10}}, "d": {"train": {"sequence_length": 9}}}
    with pytest.raises(Preempted):
        glue.train_experiment(experiment_of(arms=arms), str(tmp_path))
    assert [(cfg.max_bytes, length) for cfg, length, _, _ in loads] == [(0, 8), (10, 8), (0, 9)]


def test_plans_are_shown_once_an_arm():
    text = glue.plan_experiment(experiment_of(seeds=(0, 1)))
    static, midas = text.split("\n\n")
    assert static.startswith("static: operator none, depth 2, 2 seeds\n")
    assert midas.startswith("midas: operator midas, depth 2, 2 seeds\n")
    assert "1 compilations" in static and "2 compilations" in midas and "0 -> 1" in midas


def test_the_summary_covers_arms_that_are_not_chosen(trained):
    before = read_json(trained / "summary.json")
    assert glue.train_experiment(experiment_of(), str(trained), ["midas"]) == 0
    assert read_json(trained / "summary.json") == before


@pytest.mark.slow
def test_more_seeds_join_those_that_are_there(trained):
    kept = (trained / "static" / "seed0" / "DONE").stat().st_mtime_ns
    assert glue.train_experiment(experiment_of(seeds=(0, 1)), str(trained)) == 0
    assert [row["seeds"] for row in read_json(trained / "summary.json")["arms"]] == [[0, 1], [0, 1]]
    assert (trained / "static" / "seed0" / "DONE").stat().st_mtime_ns == kept


def test_arms_on_other_data_do_not_share_a_summary(trained, monkeypatch):
    """The text was edited between two arms: the finished one is not comparable any more."""
    shutil.rmtree(trained / "midas")
    monkeypatch.setattr(ToyBatches, "data_hash", "another")
    with pytest.raises(UserError, match=r"static.seed0: is finished, on other data"):
        glue.train_experiment(experiment_of(), str(trained))
    assert not (trained / "midas").exists()


@pytest.mark.parametrize("lost", ["DONE", "config.json"])
def test_another_config_is_refused_without_its_file(trained, lost):
    """The hash in the results, or in the checkpoint, tells."""
    (trained / "static" / "seed0" / "config.json").unlink()
    if lost == "DONE":
        (trained / "static" / "seed0" / "DONE").unlink()
    with pytest.raises(UserError, match="another config"):
        glue.train_experiment(experiment_of(optimizer={"decay_steps": 1}), str(trained), ["static"])


def test_a_second_writer_is_refused(trained):
    with locked(trained), pytest.raises(UserError, match="in use by another process"):
        glue.train_experiment(experiment_of(), str(trained))


@pytest.mark.parametrize("content", ["[]", "{}", "3"])
def test_a_done_mark_that_is_none(trained, content):
    (trained / "static" / "seed0" / "DONE").write_text(content)
    with pytest.raises(UserError, match="does not hold the results of a run"):
        glue.train_experiment(experiment_of(), str(trained))
