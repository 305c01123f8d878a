"""Two processes, as two hosts would be, train one run; one process goes on with what they saved."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from toys import ROOT

from depthgrow_jax.rundir import read_metrics

pytestmark = pytest.mark.slow


def launch(tmp_path, workdir, *flags):
    """A process of `launch.py train` on the grown arm of the smoke config."""
    arguments = ["--config=configs/smoke.py", f"--workdir={tmp_path / workdir}", "--arms=lidas"]
    arguments += [f"--config.data.cache_dir={tmp_path / 'cache'}", "--config.train.log_every=1"]
    environment = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return subprocess.Popen(
        [sys.executable, "launch.py", "train", *arguments, *flags],
        cwd=ROOT,
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def free_port():
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def losses(directory):
    """Training losses by step."""
    return {line["step"]: line["loss"] for line in read_metrics(directory) if "loss" in line}


def test_two_processes_stop_together_and_one_goes_on(tmp_path):
    whole = launch(tmp_path, "whole")
    assert whole.wait(timeout=300) == 0, whole.communicate()[1]

    address = f"127.0.0.1:{free_port()}"
    pair = [
        launch(tmp_path, "shared", "--config.mesh.fsdp=2", f"--distributed={address},2,{index}")
        for index in (0, 1)
    ]
    metrics = tmp_path / "shared" / "lidas" / "seed0"
    for _ in range(1200):
        if len(losses(metrics)) >= 8 or pair[0].poll() is not None:
            break
        time.sleep(0.1)
    pair[1].send_signal(signal.SIGTERM)
    errors = [process.communicate(timeout=300)[1] for process in pair]
    assert [process.returncode for process in pair] == [75, 75], errors
    stopped = max(losses(metrics))
    assert 8 <= stopped < 40

    alone = launch(tmp_path, "shared")
    assert alone.wait(timeout=300) == 0, alone.communicate()[1]
    expected, got = losses(tmp_path / "whole" / "lidas" / "seed0"), losses(metrics)
    assert sorted(got) == sorted(expected) == list(range(1, 41))
    np.testing.assert_allclose([got[s] for s in expected], list(expected.values()), rtol=2e-4)
