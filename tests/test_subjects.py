"""A network read back is the one that was trained; everything else is refused in one line."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probe_runs import trained
from toys import stored

from depthgrow_jax import model
from depthgrow_jax.corpora import load_corpus
from depthgrow_jax.errors import UserError
from depthgrow_jax.rundir import read_metrics
from depthgrow_jax.subjects import load_subject
from depthgrow_jax.train.config import MeshConfig

ONE_DEVICE = MeshConfig(data=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.getbasetemp())


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


@pytest.mark.parametrize(("step", "depth", "gate"), [(2, 1, [1.0]), (4, 2, [0.5, 1.0]), (6, 2, [1.0, 1.0])])
def test_has_the_loss_that_training_logged(run, step, depth, gate):
    """At a boundary (before growth), with a gate half open, and at the end."""
    loaded = load_subject(run, step, mesh=ONE_DEVICE)
    subject = loaded.subject
    assert (loaded.step, subject.steps, loaded.meta["depth"]) == (step, depth, depth)
    assert sorted(np.asarray(subject.program.gate[:, 0]).tolist()) == gate
    corpus = load_corpus(loaded.config, {}, print)
    tokens = jnp.concatenate(list(corpus.validation_batches(2, 2)))
    logits = model.apply(subject.cfg, subject.params, tokens[:, :-1], program=subject.program).logits
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    loss = -np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()
    logged = {line["step"]: line["val_loss"] for line in read_metrics(run) if "val_loss" in line}
    assert abs(loss - logged[step]) < 1e-5


def test_newest_step_facts_and_dtype(run):
    loaded = load_subject(str(run), dtype="bfloat16", mesh=ONE_DEVICE)
    assert loaded.step == loaded.facts["step"] == 6
    assert loaded.subject.cfg.dtype == "bfloat16" and loaded.subject.cfg.remat == "none"
    assert loaded.subject.batch_sharding is None and loaded.subject.devices == 1
    assert loaded.facts["lineage"] == [[0, 0], [0, 1]] and loaded.facts["objective"] == "causal"
    leaf = loaded.subject.params["embed"]["table"]
    assert leaf.dtype == np.float32
    np.testing.assert_array_equal(leaf, stored(run, 6)["embed"]["table"])


def test_on_a_mesh(run):
    subject = load_subject(run, mesh=MeshConfig(fsdp=4)).subject
    assert subject.devices == 8 and subject.batch_sharding is not None
    table = subject.params["embed"]["table"]
    assert len(table.sharding.device_set) == 8 and not table.sharding.is_fully_replicated
    np.testing.assert_array_equal(table, stored(run, 6)["embed"]["table"])
    with pytest.raises(UserError, match=r"mesh.fsdp=3: must divide the 8 devices"):
        load_subject(run, mesh=MeshConfig(fsdp=3))


def test_refusals(run, copy, tmp_path):
    def refused(path, pattern, step=None):
        with pytest.raises(UserError, match=pattern) as error:
            load_subject(path, step, mesh=ONE_DEVICE)
        assert "\n" not in str(error.value)

    refused(tmp_path / "nowhere", r"--run='.*nowhere': no such directory")
    refused(run / "config.json", r"no such directory")
    refused(run / "checkpoints", r"is not a run; a run holds config.json and checkpoints/")
    for name in ("static/seed0", "midas/seed0", "midas/seed1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    # The copy is a run one level below.
    refused(tmp_path, r"is not a run; runs below it: copy, midas/seed0, midas/seed1, static/seed0$")
    refused(tmp_path / "static/seed0", r"seed0/config.json: is not the config of a run")
    refused(run, r"--step=3: not saved in .*checkpoints; legal: 2, 4, 6", step=3)

    content = json.loads((copy / "config.json").read_text())

    def rewrite(**changes):
        config = content["config"]
        config = {**config, "model": {**config["model"], **changes}}
        (copy / "config.json").write_text(json.dumps({**content, "config": config}))

    rewrite(width="x")
    refused(copy, r"config.json: model.width='x': must be of type int")
    rewrite(norm_placement="post")
    refused(copy, r"config.json: describes another architecture than its checkpoints")
    (copy / "config.json").write_text('{"config":')
    refused(copy, r"config.json: cannot be read")
    (copy / "config.json").write_text(json.dumps(content))
    for path in (copy / "checkpoints" / "6" / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    refused(copy, r"checkpoints/6: damaged")
    shutil.rmtree(copy / "checkpoints")
    refused(copy, r"holds no complete checkpoint")
