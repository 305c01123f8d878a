"""The life of a probe command: checked first, written one by one, gone on with, never mixed."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from probe_runs import MASKED, trained, write_jsonl
from toys import ROOT

from depthgrow_jax import probe_job, probing, results
from depthgrow_jax.corpora import corpus_of
from depthgrow_jax.errors import UserError
from depthgrow_jax.probe_plan import TEXT, Plan, base_config, parse
from depthgrow_jax.probes.config import PRESETS, PROBES, ProbeConfig, validate
from depthgrow_jax.probes.result import Result, constant, layer_axis
from depthgrow_jax.rundir import locked
from depthgrow_jax.subjects import load_subject
from depthgrow_jax.train.config import MeshConfig

ONE_DEVICE, ALL_DEVICES = MeshConfig(data=1), MeshConfig()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.getbasetemp())


@pytest.fixture
def stubs(monkeypatch):
    """Probes that only note that they ran; `stubs["x"] = error` makes one fail."""
    ran, failing = [], {}

    def stub(name):
        def run_stub(job, watch):
            ran.append(name)
            if name in failing:
                raise failing[name]
            axes = {"layer": layer_axis(job.subject.steps)}
            values = constant(("layer",), "", np.arange(job.subject.steps) + len(job.prompts.inputs))
            return Result(name, job.subject.steps, axes, {"x": values}, {}, 2, 3)

        return run_stub

    for name in PROBES:
        monkeypatch.setitem(probe_job.RUN, name, stub(name))
    return ran, failing


def configured(*probes, **fields) -> ProbeConfig:
    prompts = dataclasses.replace(ProbeConfig().prompts, examples=3)
    return dataclasses.replace(ProbeConfig(), **({"prompts": prompts} | fields), probes=probes)


def probed(run, out, *probes, **fields) -> int:
    name, step, other = (
        fields.pop(key, default) for key, default in (("name", "default"), ("step", None), ("other", None))
    )
    mesh = fields.pop("mesh", ONE_DEVICE)
    plan = Plan(name, configured(*probes, **fields), TEXT, mesh)
    return probing.probe_network(str(run), plan, step=step, out=out and str(out), other=other)


def test_runs_all_in_order_then_nothing_again(run, tmp_path, stubs, capsys):
    ran, _ = stubs
    assert probed(run, tmp_path / "out") == 0
    assert ran == list(PROBES)
    assert {p.name for p in (tmp_path / "out").glob("*.json")} == {f"{name}.json" for name in PROBES}
    assert probed(run, tmp_path / "out", batch_size=1, lanes=2, chunk_bytes=999) == 0
    assert ran == list(PROBES)
    assert capsys.readouterr().err.count("already done") == len(PROBES)


def test_goes_on_after_a_failure_and_after_an_interrupt(run, tmp_path, stubs):
    ran, failing = stubs
    failing["ablation"] = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        probed(run, tmp_path, "geometry", "ablation", "logit_lens")
    failing["ablation"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        probed(run, tmp_path, "geometry", "ablation", "logit_lens")
    failing.clear()
    assert probed(run, tmp_path, "geometry", "ablation", "logit_lens") == 0
    assert ran == ["geometry", "ablation", "ablation", "ablation", "logit_lens"]


def test_sigkill_keeps_what_is_finished(run, tmp_path):
    program = (
        "import os, signal; from depthgrow_jax import probe_job, probing\n"
        "from depthgrow_jax.probe_plan import TEXT, Plan\n"
        "from depthgrow_jax.train.config import MeshConfig\n"
        "probe_job.RUN['gradients'] = lambda job, watch: os.kill(os.getpid(), signal.SIGKILL)\n"
        "config = probing.ProbeConfig(probes=('geometry', 'gradients'))\n"
        "plan = Plan('x', config, TEXT, MeshConfig(data=1))\n"
        f"probing.probe_network({str(run)!r}, plan, out={str(tmp_path)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -9, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {".lock", "geometry.json", "geometry.npz"}
    result, header = results.load(tmp_path / "geometry.json")
    assert result.probe == "geometry" and header["seconds"] > 0


def test_header(run, tmp_path, stubs):
    assert probed(run, None, "geometry", name="mine", step=4) == 0
    try:
        _, header = results.load(run / "probes" / "step4-mine" / "geometry.json")
    finally:
        shutil.rmtree(run / "probes")
    meta = json.loads((run / "checkpoints" / "4" / "meta" / "metadata").read_text())
    assert header["step"] == 4 and header["depth"] == 2 and header["lineage"] == meta["lineage"]
    assert header["config_hash"] == meta["config_hash"] and header["data_hash"] == meta["data_hash"]
    assert header["prompts"]["source"] == "validation split of the run's data"
    assert header["prompts"]["examples"] == 3 and header["prompts"]["length"] == 16
    assert header["versions"]["jax"] == jax.__version__ and header["dtype"] == "float32"
    assert header["preset"] == "mine" and header["operator"] == "midas" and header["seed"] == 0


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"uncounted": 2}, r"geometry.json: was made with other settings \(probe.uncounted was 1, now 2\)"),
        ({"dtype": "bfloat16"}, r"\(probe.dtype was 'float32', now 'bfloat16'\); use --out=DIR"),
        ({"step": 4}, r"\(step was 6, now 4\)"),
        (
            {"prompts": dataclasses.replace(ProbeConfig().prompts, examples=2)},
            r"\(probe.prompts.examples was 3, now 2; prompts was '\w+', now '\w+'\)",
        ),
    ],
)
def test_other_settings_are_refused(run, tmp_path, stubs, fields, pattern):
    ran, _ = stubs
    probed(run, tmp_path, "geometry")
    with pytest.raises(UserError, match=pattern):
        probed(run, tmp_path, "geometry", "gradients", **fields)
    assert ran == ["geometry"]


def test_only_a_probe_s_own_group_matters(run, tmp_path, stubs):
    ran, _ = stubs
    probed(run, tmp_path, "geometry", "ablation")
    changed = dataclasses.replace(ProbeConfig().ablation, splits=2)
    assert probed(run, tmp_path, "geometry", "logit_lens", ablation=changed) == 0
    with pytest.raises(UserError, match=r"ablation.json: .*\(probe.ablation.splits was 4, now 2\)"):
        probed(run, tmp_path, "ablation", ablation=changed)
    assert ran == ["geometry", "ablation", "logit_lens"]


def test_scores_alone_take_finished_results(run, tmp_path, stubs):
    ran, _ = stubs
    with pytest.raises(UserError, match=r"scores are made of geometry, logit_lens too"):
        probed(run, tmp_path, "scores", "ablation")
    assert not ran and not list(tmp_path.iterdir())
    probed(run, tmp_path, "geometry", "ablation", "logit_lens")
    assert probed(run, tmp_path, "scores") == 0
    assert ran[3:] == ["scores"]
    # With the gradients there is more to say; without news, nothing.
    probed(run, tmp_path, "gradients", "scores")
    probed(run, tmp_path, "scores")
    assert ran[4:] == ["gradients", "scores"]
    fewer = dataclasses.replace(ProbeConfig().ablation, modes=("current",))
    with pytest.raises(
        UserError, match=r"probe.ablation.modes=\('current',\): must have future for the scores"
    ):
        probed(run, tmp_path / "new", "scores", "ablation", "geometry", "logit_lens", ablation=fewer)


def test_everything_is_checked_before_the_first_probe(run, tmp_path, stubs):
    ran, _ = stubs
    short = write_jsonl(tmp_path / "short.jsonl", [{"text": "a longer text than 13"}, {"text": "short"}])
    prompts = dataclasses.replace(ProbeConfig().prompts, path=str(short))
    cases = [
        ("ablation", {"prompts": prompts}, r"prompts: prompt 2 has 6 tokens, too short"),
        (
            "order",
            {"order": dataclasses.replace(ProbeConfig().order, run_lengths=(3,))},
            r"run_lengths=\(3,\)",
        ),
        (
            "weights",
            {"similarity": dataclasses.replace(ProbeConfig().similarity, block_size=3)},
            r"probe.similarity.block_size=3: must divide depth 2; legal: \[1, 2\]",
        ),
        ("geometry", {"mesh": MeshConfig(fsdp=3)}, r"mesh.fsdp=3: must divide the 8 devices"),
        ("geometry", {"other": str(tmp_path)}, rf"--other='{tmp_path}': is not a run"),
        ("geometry", {"prompts": dataclasses.replace(prompts, path="x.jsonl")}, r"no such file"),
    ]
    for probe, fields, pattern in cases:
        with pytest.raises(UserError, match=pattern) as error:
            probed(run, tmp_path / "out", "geometry", probe, **fields)
        assert "\n" not in str(error.value)
    assert not ran and not (tmp_path / "out").exists()


def test_other_data_are_refused(run, tmp_path, stubs):
    text = run.parent / "texts" / "00.txt"
    before = text.read_text()
    text.write_text("changed " * 30)
    try:
        with pytest.raises(UserError, match=r"was trained on other data \(hash \w{12}, now \w{12}\)"):
            probed(run, tmp_path, "geometry")
    finally:
        text.write_text(before)


def test_a_directory_in_use_is_refused(run, tmp_path, stubs):
    with locked(tmp_path), pytest.raises(UserError, match=r"in use by another process"):
        probed(run, tmp_path, "geometry")


def test_an_other_run(run, tmp_path, stubs, monkeypatch, tmp_path_factory):
    """It reaches the probes of two networks, and binds their results only."""
    found = {}

    def keep(job, watch):
        found["job"] = job
        return Result("linear_maps", job.subject.steps, {}, {}, {}, 2, 3)

    monkeypatch.setitem(probe_job.RUN, "linear_maps", keep)
    probed(run, tmp_path, "geometry", "linear_maps", other=str(run))
    job = found["job"]
    assert job.other is not None and job.twin is job.other.subject and job.grown_block == 1
    assert probed(run, tmp_path, "geometry") == 0
    with pytest.raises(UserError, match=r"linear_maps.json: .*\(other was '\w+ step 6', now ''\)"):
        probed(run, tmp_path, "geometry", "linear_maps")


@pytest.mark.slow
def test_masked_run(tmp_path_factory, tmp_path, monkeypatch):
    """Prompts are hidden, and so is what a tuned lens is trained on."""
    found = {}

    def keep(job, watch):
        found["job"] = job
        return Result("tuned_lens", job.subject.steps, {}, {}, {}, 2, 3)

    monkeypatch.setitem(probe_job.RUN, "tuned_lens", keep)
    run = trained(tmp_path_factory.getbasetemp(), MASKED)
    assert probed(run, tmp_path, "tuned_lens") == 0
    job = found["job"]
    assert (job.prompts.inputs == 257).any() and 0.1 < job.prompts.scored.mean() < 0.5
    texts = job.training_text()
    batch, following = next(texts), next(texts)
    assert batch.shape == (4, 17) and (batch[:, :-1] == 257).mean() > 0.1
    assert (batch != following).any()
    assert (job.held_out().inputs == 257).any()


@pytest.mark.slow
def test_a_mesh_gives_the_same_numbers(run, tmp_path):
    for name, mesh in (("one", ONE_DEVICE), ("eight", ALL_DEVICES), ("split", MeshConfig(fsdp=4))):
        assert probed(run, tmp_path / name, "geometry", mesh=mesh) == 0
    one, eight, split = (
        results.load(tmp_path / name / "geometry.json") for name in ("one", "eight", "split")
    )
    assert (one[1]["devices"], eight[1]["devices"], split[1]["devices"]) == (1, 8, 8)
    for name, q in one[0].quantities.items():
        for other in (eight[0], split[0]):
            for statistic, values in q.statistics.items():
                theirs = other.quantities[name].statistics[statistic]
                np.testing.assert_allclose(
                    theirs, values, rtol=1e-5, atol=1e-5, err_msg=f"{name}/{statistic}"
                )


def test_automatic_settings(run, monkeypatch):
    loaded = load_subject(run, mesh=ONE_DEVICE)
    subject, corpus = loaded.subject, corpus_of(loaded, print)
    prompts = probing.from_corpus(corpus, 50, 16)
    chosen = probe_job.resolve_settings(ProbeConfig(protect=1, headline="max"), subject, prompts)
    assert (chosen.batch_size, chosen.lanes, chosen.chunk_bytes) == (128, 1, 4 * 256 * 258)
    assert (chosen.protect, chosen.headline) == (1, "max")
    given = probe_job.resolve_settings(ProbeConfig(batch_size=5, lanes=6, chunk_bytes=7), subject, prompts)
    assert (given.batch_size, given.lanes, given.chunk_bytes) == (5, 6, 7)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    chosen = probe_job.resolve_settings(ProbeConfig(), subject, prompts)
    # 1024 sequences of 16 fit, 50 are there: 32768 / (50 * 16) lanes.
    assert (chosen.batch_size, chosen.lanes, chosen.chunk_bytes) == (1024, 40, 256 << 20)
    # 3 copies of 3 points of 16 x 16 float32 are 9216 bytes; a quarter of 100 kB holds 2.
    monkeypatch.setattr(probe_job, "_device_bytes", lambda: 100_000)
    assert probe_job.resolve_settings(ProbeConfig(), subject, prompts).batch_size == 2


def test_out_of_memory_names_the_fields(run, tmp_path, stubs):
    _, failing = stubs
    failing["geometry"] = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating")
    with pytest.raises(UserError, match=r"geometry: does not fit .*probe.batch_size=128, probe.lanes=1"):
        probed(run, tmp_path, "geometry")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    name, config, text, mesh = parse(base_config(preset))
    assert (name, text, mesh) == (preset, TEXT, MeshConfig())
    validate(config)
    default = ProbeConfig()
    for field, value in PRESETS[preset].items():
        group = getattr(config, field)
        if isinstance(value, dict):
            assert {key: getattr(group, key) for key in value} == value
            rest = {f.name for f in dataclasses.fields(group)} - set(value)
            assert all(getattr(group, key) == getattr(getattr(default, field), key) for key in rest)
        else:
            assert group == value
    if preset == "default":
        assert config == default
