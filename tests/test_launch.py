"""The command line: wrong inputs get one line and exit code 2 and change nothing on disk; right ones run.

Commands run in forks of one process (`forked_launch.py`), the shipped smoke config as a program of its own.
"""

import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from toys import ROOT


def launched(place: pathlib.Path, commands: list[str | list[str]], cwd: str = ".") -> list[dict]:
    """Outcomes of commands; a string is split at blanks."""
    wanted = [{"argv": c.split() if isinstance(c, str) else c, "cwd": str(place / cwd)} for c in commands]
    (place / "commands.json").write_text(json.dumps(wanted))
    environment = os.environ | {"HOME": str(place / "home")}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "forked_launch.py", place / "commands.json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def contents(place: pathlib.Path) -> dict[str, str]:
    """Hashes of all files, and the names of all directories."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(place.rglob("*"))
        if not {"commands.json", "__pycache__", "cache", ".cache", ".config"} & set(path.parts)
    }


def assert_refused(outcome: dict, *patterns: str) -> None:
    """One line of error on stderr, exit code 2, and all the patterns in the line.

    Only the data may have reported before it what it was doing.
    """
    assert outcome["code"] == 2, outcome
    assert outcome["out"] == ""
    lines = [line for line in outcome["err"].splitlines() if not re.fullmatch(r"encoding \d+ \w+", line)]
    assert len(lines) == 1 and lines[0].startswith("error: "), outcome["err"]
    for pattern in patterns:
        assert re.search(pattern, lines[0]), (pattern, lines[0])


# What is typed after `train --config=run.py --workdir=out`, and what the answer must say.
REFUSED = {
    "--config.depth=3 --config.growth.operator=stack": [r"depth=3: ", r"legal depths: 1, 2, 4"],
    "--config.depth=7 --config.growth.operator=midas --config.growth.block_size=4": [
        r"depth=7: midas from depth 4 with growth.block_size=4 cannot reach it",
        r"legal depths: 4, 8, 12",
    ],
    "--config.depth=5 --config.growth.operator=midas": [r"growth.steps=0: stage 1 of 5 .*gets 0 steps"],
    "--config.growth.operator=midas --config.growth.schedule=explicit --config.growth.boundaries=4": [
        r"growth.boundaries=\(4,\): stage 2 of 2 \(depth 2\) gets 0 steps of train.steps=4"
    ],
    "--config.growth.operator=midsa": [r"growth.operator='midsa': must be one of none, midas, lidas"],
    "--config.model.kv_heads=3": [r"model.kv_heads=3: must divide heads=2; legal: \[1, 2\]"],
    "--config.model.heads=3": [r"model.heads=3: must divide width=16"],
    "--config.optimizer.learning_rate=nan": [r"optimizer.learning_rate=nan: must be a finite number"],
    "--config.optimizer.learning_rate=inf": [r"optimizer.learning_rate=inf: must be a finite number"],
    "--config.optimizer.learning_rate=-1": [r"optimizer.learning_rate=-1.0: must be above 0"],
    "--config.optimizer.lr=1": [r"optimizer.lr: unknown field; legal: .*learning_rate"],
    "--config.optimiser.learning_rate=1": [r"optimiser: unknown field; legal: .*optimizer"],
    "--config.depth.x=1": [r"depth.x: unknown field"],
    "--config.train.steps=1e3": [r"train.steps='1e3': must be of type int"],
    "--config.train.steps=ten": [r"train.steps='ten': must be of type int"],
    "--config.model.causal=maybe": [r"model.causal='maybe': must be of type bool"],
    "--config.train=3": [r"train='3': is a group of fields: .*batch_size"],
    "--config.growth.boundaries=1,x": [r"growth.boundaries\[0\]='1,x': must be of type int"],
    "--config.seeds=0.5,1": [r"seed=0.5: must be of type int"],
    "--config.seeds=1,1": [r"seeds=\(1, 1\): must not repeat"],
    "--config.data.path=None": [r"data.path='None': is the word None; leave it empty"],
    "--config.init_from.path=None": [r"init_from.path='None': is the word None"],
    "--config.data.path=nowhere/x.txt": [r"data.path='nowhere/x.txt': no such file or directory"],
    "--config.data.path=run.py": [r"data.path='run.py': must be a .txt"],
    "--config.data.tokenizer=nothing.json": [r"data.tokenizer='nothing.json': no such file"],
    "--config.model.vocab_size=200": [r"largest token id 257 .*vocabulary of 200"],
    "--config.train.objective=masked": [r"model.causal=True: .*needs model.causal=False"],
    "--config.train.sequence_length=100000": [r"sequence_length=100000: .*fewer than one sequence"],
    "--config.train.batch_size=100000": [r"batch_size=100000: .*fewer tokens than one batch"],
    "--config.train.accumulation=3": [r"train.accumulation=3: must divide train.batch_size=2"],
    "--config.mesh.data=2 --config.train.accumulation=2": [r"mesh.data=2: .*must divide"],
    "--config.mesh.fsdp=5": [r"mesh.fsdp=5: must divide the 8 devices"],
    "--config.init_from.path=nowhere": [r"init_from.path='nowhere': no run with checkpoints there"],
    "--confg=x": [r"confg"],
    "--arms=midas": [r"--arms=midas: not an arm of this config; legal: none"],
}


def test_wrong_fields_are_refused_in_one_line(place):
    before = contents(place)
    commands = [f"train --config=run.py --workdir=out {typed}" for typed in REFUSED]
    for patterns, outcome in zip(REFUSED.values(), launched(place, commands), strict=True):
        assert_refused(outcome, *patterns)
    assert contents(place) == before


BROKEN = {
    "syntax.py": ("def get_config(:\n", [r"syntax.py line 1: SyntaxError: "]),
    "raises.py": (
        "def get_config():\n    return 1 / 0\n",
        [r"raises.py line 2: ZeroDivisionError: division"],
    ),
    "lines.py": ("def get_config():\n    raise OSError('one\\ntwo')\n", [r"lines.py line 2: OSError: one"]),
    "none.py": ("def get_config():\n    pass\n", [r"returned NoneType, not a ConfigDict"]),
    "empty.py": ("", [r"empty.py has no function get_config"]),
    "variant.py": (
        "VARIANTS = ('a', 'b')\ndef get_config(variant):\n    pass\n",
        [r"missing 1 required positional argument: 'variant'; legal: a, b"],
    ),
    "typo.py": (
        "from depthgrow_jax.config import base_config\ndef get_config():\n"
        "    config = base_config()\n    config.dpeth = 3\n",
        [r"typo.py line 4: AttributeError: .*dpeth"],
    ),
    "arm.py": (
        "from depthgrow_jax.config import base_config\ndef get_config():\n    config = base_config()\n"
        "    config.arms = {'a': {'growth': {'operatr': 'midas'}}}\n    return config\n",
        [r"arms.a.growth.operatr: unknown field; legal: .*operator"],
    ),
    "wrong_arm.py": (
        "from depthgrow_jax.config import base_config\ndef get_config():\n"
        "    config = base_config()\n    config.arms = {'a': {'depth': 'x'}}\n    return config\n",
        [r"depth='x': must be of type int, not str \(in arm 'a'\)"],
    ),
}


def test_broken_commands_and_config_files_are_refused_in_one_line(place):
    for name, (text, _) in BROKEN.items():
        (place / name).write_text(text)
    (place / "a file").write_text("kept")
    before = contents(place)
    cases = [(f"train --workdir=out --config={name}", patterns) for name, (_, patterns) in BROKEN.items()]
    cases += [
        ("train --workdir=out --config=missing.py", [r"--config=missing.py: no such file"]),
        ("train --workdir=out --config=", [r"--config=: no such file"]),
        ("train --workdir=out --config=run.py:arm", [r"takes 0 positional arguments but 1 was given"]),
        ("train --workdir=out", ["--config is missing"]),
        ("train --config=run.py", ["--workdir is missing"]),
        ("plan", ["--config is missing"]),
        ("fly --config=run.py", [r"expected one verb, got fly; legal: .*train.*plan|plan.*train"]),
        ("--config=run.py", [r"expected one verb, got none; legal: "]),
        ("train plan --config=run.py", [r"expected one verb, got train plan"]),
        ("plan --config run.py --config.train.steps 1e3", [r"train.steps='1e3': must be of type int"]),
        (["train", "--config=run.py", "--workdir=a file"], [r"workdir='a file': .*is a file"]),
        (["train", "--config=run.py", "--workdir=a file/below"], [r"workdir='a file/below': .*is a file"]),
    ]
    outcomes = launched(place, [command for command, _ in cases])
    for (_, patterns), outcome in zip(cases, outcomes, strict=True):
        assert_refused(outcome, *patterns)
    assert contents(place) == before


def test_runs_resumes_and_refusals_that_need_a_run(place):
    """Workdirs relative, with spaces and `~`; a finished run; other configs; a start at another depth."""
    (place / "else where").mkdir()
    train = ["train", "--config=../run.py"]
    first, home, again, plan = launched(
        place,
        [
            [*train, "--workdir=my runs/é 1"],
            [*train, "--workdir=~/run", "--config.growth.operator=midas"],
            [*train, "--workdir=my runs/é 1", "--config.train.log_every=2", "--config.name=renamed"],
            ["plan", "--config=../run.py", "--config.growth.operator=midas"],
        ],
        cwd="else where",
    )
    assert first["code"] == home["code"] == again["code"] == plan["code"] == 0, (first, home, again, plan)
    directory = place / "else where" / "my runs" / "é 1"
    names = {path.name for path in directory.iterdir()}
    assert names > {"config.json", "plan.json", "metrics.jsonl", "checkpoints", "DONE", "summary.json"}
    assert {"summary.md", "loss_vs_flops.png", "loss_vs_steps.png"} < names
    assert (place / "home" / "run" / "DONE").exists()
    assert "| launched | 2 | 4 |" in first["out"]
    assert "already done, not run again" in again["err"] and "step" not in again["err"]
    assert re.search(r"^ +2 +2 +2-4 +48 +0 -> 1", plan["out"], re.MULTILINE) and "saving" in plan["out"]

    before = contents(place)
    cases = [
        (
            [*train, "--workdir=my runs/é 1", "--config.optimizer.learning_rate=0.5", "--config.depth=3"],
            [r"another config \(depth was 2, now 3; optimizer.learning_rate was 0.001, now 0.5\)"],
        ),
        (
            [*train, "--workdir=new", "--config.init_from.path=~/run", "--config.init_from.step=1"],
            [r"init_from.path='~/run': step 1 has depth 1, this run starts at depth 2", "start_depth=1"],
        ),
        (
            [*train, "--workdir=new", "--config.init_from.path=~/run", "--config.depth=3"],
            [r"step 4 has depth 2, this run starts at depth 3"],
        ),
        (
            [*train, "--workdir=new", "--config.init_from.path=~/run", "--config.init_from.step=3"],
            [r"init_from.step=3: not saved in .*; legal: \[1, 2, 4\]"],
        ),
    ]
    outcomes = launched(place, [command for command, _ in cases], cwd="else where")
    for (_, patterns), outcome in zip(cases, outcomes, strict=True):
        assert_refused(outcome, *patterns)
    assert contents(place) == before


def test_a_loss_that_is_not_finite_exits_with_3(place):
    typed = "--config.optimizer.name=sgd --config.optimizer.learning_rate=1e30 --config.optimizer.clip_norm=0"
    (outcome,) = launched(place, [f"train --config=run.py --workdir=out {typed}"])
    assert outcome["code"] == 3 and "Traceback" not in outcome["err"]
    errors = [line for line in outcome["err"].splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.fullmatch(
        r"error: launched: (loss|grad_norm) is (nan|inf) at step \d; last good checkpoint: .*", errors[0]
    )


@pytest.mark.slow
def test_smoke_config_through_the_real_command(tmp_path):
    """SIGTERM in the second arm: saved, exit code 75; the same command goes on and runs the third."""
    workdir, one_device = tmp_path / "smoke", os.environ | {"XLA_FLAGS": ""}
    command = [sys.executable, ROOT / "launch.py", "train", f"--config={ROOT / 'configs' / 'smoke.py'}"]
    command += [f"--workdir={workdir}", f"--config.data.cache_dir={tmp_path / 'cache'}"]
    running = subprocess.Popen(
        command, cwd=tmp_path, env=one_device, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    written = workdir / "lidas" / "seed0" / "metrics.jsonl"
    # A line of it: the run's steps have begun.
    while running.poll() is None and not (written.exists() and written.stat().st_size):
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=300)
    assert running.returncode == 75, err
    assert re.search(r"lidas/seed0: stopped after step \d+, saved; the same command goes on\n$", err)
    assert (workdir / "static" / "seed0" / "DONE").exists() and not (
        workdir / "lidas" / "seed0" / "DONE"
    ).exists()
    assert not (workdir / "midas" / "seed0").exists()

    done = subprocess.run(command, cwd=tmp_path, env=one_device, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (
        "static/seed0: already done, not run again" in done.stderr
        and "lidas/seed0: resumes after step" in done.stderr
    )
    summary = json.loads((workdir / "summary.json").read_text())
    assert [row["arm"] for row in summary["arms"]] == ["static", "lidas", "midas"]
    assert {row["depth"] for row in summary["arms"]} == {6}
    assert done.stdout.count("\n| ") == 3  # a row for every arm
    for name in ("loss_vs_flops.png", "loss_vs_steps.png"):
        assert (workdir / name).stat().st_size > 10_000
