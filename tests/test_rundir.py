"""The run directory's files: whole or absent, continued after a kill, bound to one config."""

import json

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.rundir import (
    MetricsLog,
    bind_config,
    check_config,
    open_directory,
    read_json,
    read_metrics,
    resolve_directory,
    write_json,
)


def test_a_torn_last_line_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_a_torn_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read_metrics(tmp_path)


def test_a_resumed_log_has_no_lines_of_the_future(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 6):
        log.write(step, {"loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the kill
    log = MetricsLog(tmp_path, 3)
    log.write(4, {"loss": 40.0})
    log.close()
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 2.0, 3.0, 40.0]
    assert (tmp_path / "metrics.jsonl").read_text().endswith("\n")
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2


def test_metrics_of_a_fresh_directory_are_none(tmp_path):
    assert read_metrics(tmp_path) == []


def test_write_json_replaces_whole_files(tmp_path, monkeypatch):
    path = tmp_path / "DONE"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    monkeypatch.setattr("os.replace", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_json(path, {"a": 2})  # killed before the rename
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize("content", [None, "{", "\xff"])
def test_read_json_names_the_file(tmp_path, content):
    if content is not None:
        (tmp_path / "plan.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"plan\.json: (no such file|cannot be read)"):
        read_json(tmp_path / "plan.json")


def test_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_directory("a b/c") == tmp_path / "a b" / "c" and (tmp_path / "a b" / "c").is_dir()
    assert open_directory("~/runs") == tmp_path / "home" / "runs"
    assert resolve_directory("not made") == tmp_path / "not made" and not (tmp_path / "not made").exists()
    (tmp_path / "file").write_text("kept")
    for path in ("file", "file/below"):
        with pytest.raises(UserError, match=r"workdir='file.*' *: .*/file is a file"):
            open_directory(path)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_started_run_is_bound_to_its_config(tmp_path):
    bind_config(tmp_path, {"depth": 3, "seed": 0}, {"free": 1})
    MetricsLog(tmp_path, 0).close()
    bind_config(tmp_path, {"depth": 3, "seed": 0}, {"free": 2})
    assert read_json(tmp_path / "config.json")["config"] == {"free": 2}
    with pytest.raises(UserError, match=r"depth was 3, now 4; new was None, now 1; seed was 0, now None"):
        bind_config(tmp_path, {"depth": 4, "new": 1}, {"free": 3})
    assert read_json(tmp_path / "config.json")["config"] == {"free": 2}


def test_a_run_that_never_started_takes_another_config(tmp_path):
    """A config that failed before its first step may be mended in place."""
    bind_config(tmp_path, {"depth": 3}, {})
    bind_config(tmp_path, {"depth": 4}, {})
    assert json.loads((tmp_path / "config.json").read_text())["binding"] == {"depth": 4}
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(UserError, match="depth was 4, now 5"):
        check_config(tmp_path, {"depth": 5})
