"""`launch.py probe` as it is typed: presets, files of prompts, refusals in one line, Ctrl-C."""

import functools
import json
import re
import signal
import subprocess
import sys
import time

import pytest
from probe_runs import trained, write_jsonl
from test_launch import assert_refused, launched
from toys import ROOT

from depthgrow_jax import results


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.getbasetemp())


def test_wrong_commands_are_refused_in_one_line(run, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"question": "no answer"}\n')
    (tmp_path / "train.py").write_text(
        "from depthgrow_jax.config import base_config\ndef get_config():\n    return base_config()\n"
    )
    cases = {
        "probe": [r"--run is missing"],
        f"probe --run={run} --model=hf:x": [r"--run and --model: one network"],
        f"probe --model={run}": [r"--model='.*': is no model; must be hf:DIR"],
        "probe --model=hf:nowhere": [r"--model='hf:nowhere': has no directory of its own.*--out"],
        f"probe --run={run} --config.data.max_bytes=5": [r"--config.data: is the text of a pretrained"],
        "probe --run=nowhere": [r"--run='nowhere': no such directory"],
        f"probe --run={run.parent}": [r"is not a run; runs below it: out$"],
        f"probe --run={run} --step=5": [r"--step=5: not saved in .*; legal: 2, 4, 6"],
        f"probe --run={run} --step=five": [r"step.*five"],
        f"probe --run={run} --probes=geometri": [r"probe.probes='geometri': must be one of geometry, "],
        f"probe --run={run} --probes=geometry,geometry": [r"must not repeat"],
        f"probe --run={run} --preset=cs": [r"--preset='cs': must be one of default, csordas, paper"],
        f"probe --run={run} --preset=paper --config=train.py": [r"--preset=paper: is for probe without"],
        f"probe --run={run} --config=train.py": [r"--config: has .*; the config of probes has name, probe"],
        f"probe --run={run} --distributed=auto": [r"--distributed=auto: probe runs in one process"],
        f"probe --run={run} --config.probe.protct=1": [r"probe.protct: unknown field; legal: .*protect"],
        f"probe --run={run} --config.probe.protect=x": [r"probe.protect='x': must be of type int"],
        f"probe --run={run} --config.probe.pooling=x": [
            r"probe.pooling='x': must be one of tokens, examples"
        ],
        f"probe --run={run} --config.name=a/b": [r"name='a/b': must be the name of a directory"],
        f"probe --run={run} --config.mesh.data=99": [r"mesh.data=99: .*exceeds the 8 devices"],
        f"probe --run={run} --config.probe.prompts.length=17": [
            r"probe.prompts.length=17: must be at most 16"
        ],
        f"probe --run={run} --config.probe.prompts.path=bad.jsonl": [r"bad.jsonl:2: needs text, or prompt"],
        "train --preset=csordas --config=train.py": [r"--preset=csordas: is for probe"],
        "plan": [r"--config is missing"],
    }
    before = sorted(run.rglob("*"))
    for patterns, outcome in zip(cases.values(), launched(tmp_path, list(cases)), strict=True):
        assert_refused(outcome, *patterns)
    assert sorted(run.rglob("*")) == before


@pytest.mark.slow
def test_a_preset_on_questions_and_answers(run, tmp_path):
    """A file in the format of GSM8K, the probes' table, and the same command once more."""
    (tmp_path / "home").mkdir()
    records = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(4)]
    write_jsonl(tmp_path / "gsm8k.jsonl", records)
    command = f"probe --run={run} --preset=csordas --probes=geometry,logit_lens --out=out"
    command += " --config.probe.prompts.path=gsm8k.jsonl --config.probe.prompts.length=300"
    first, again, other = launched(tmp_path, [command, command, f"{command} --config.probe.protect=0"])
    assert first["code"] == again["code"] == 0, (first, again)
    assert "geometry: already done" in again["err"] and "logit_lens: already done" in again["err"]
    assert first["out"] == again["out"]
    # A row for each layer, with the maxima of the preset, which have no interval; scores have one.
    assert re.search(r"^ +1( +[-+\d.e]+){3}$", first["out"], re.MULTILINE), first["out"]
    assert re.search(r"^  lens_kl_area [\d.]+ \[", first["out"], re.MULTILINE)
    assert_refused(other, r"geometry.json: was made with other settings \(probe.protect was 1, now 0\)")
    result, header = results.load(tmp_path / "out" / "geometry.json")
    assert result.examples == header["prompts"]["examples"] == 4
    assert header["preset"] == "csordas" and header["prompts"]["cut"] == 0
    # A byte is a token: the template of the preset is there.
    assert header["prompts"]["length"] > len("Given the following problem, reason and give a final answer")
    assert "headline max" in result.conventions["reduction"]


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(run, tmp_path):
    command = [sys.executable, ROOT / "launch.py", "probe", f"--run={run}", f"--out={tmp_path / 'out'}"]
    # Many updates of a lens: time to interrupt.
    command += ["--probes=geometry,tuned_lens", "--config.probe.tuned_lens.steps=1000000"]
    # A shell that starts the tests in the background makes them, and so what they start, ignore the signal.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    try:
        deadline = time.monotonic() + 200
        while running.poll() is None and not (tmp_path / "out" / "geometry.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(2)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=200)
    finally:
        running.kill()
    assert running.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted; finished probes are kept" and "Traceback" not in err
    assert {p.name for p in (tmp_path / "out").iterdir()} == {".lock", "geometry.json", "geometry.npz"}
    assert json.loads((tmp_path / "out" / "geometry.json").read_text())["probe"] == "geometry"
