"""Compiled programs are kept below the home directory, by processor, and the next process finds them."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest

from depthgrow_jax import executables
from depthgrow_jax.executables import keep_executables

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Two programs are compiled; prints where they are kept, and how many were found and how many not.
PROGRAM = """
import collections, json
import jax
from depthgrow_jax.executables import keep_executables

keep_executables()
threshold = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # these two take no time
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((5,), "float32")).compile()
jax.jit(lambda x: x - 7).lower(jax.ShapeDtypeStruct((5,), "float32")).compile()
print(json.dumps({
    "place": jax.config.values["jax_compilation_cache_dir"],
    "threshold": threshold,
    "found": events["/jax/compilation_cache/cache_hits"],
    "compiled": events["/jax/compilation_cache/cache_misses"],
}))
"""


def outcome(home: pathlib.Path, **variables) -> dict:
    unset = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_ENABLE_COMPILATION_CACHE", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment | {"HOME": str(home)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path):
    first, second = outcome(tmp_path), outcome(tmp_path)
    root = tmp_path / ".cache" / "depthgrow_jax" / "executables"
    (place,) = root.iterdir()
    assert first["place"] == second["place"] == str(place)
    assert (first["found"], first["compiled"]) == (0, 2)
    assert (second["found"], second["compiled"]) == (2, 0)
    assert 0 < first["threshold"] < 1  # JAX's own is a second, which none of a small model's programs takes


def test_the_user_s_own_choice_stays(tmp_path):
    chosen = outcome(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine"))
    assert chosen["place"] == str(tmp_path / "mine") and chosen["compiled"] == 2
    assert not (tmp_path / ".cache").exists()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A function from the text of /proc/cpuinfo (None: there is none) to where executables are kept."""
    names = ("dir", "min_compile_time_secs", "min_entry_size_bytes")
    fields = [f"jax_{'compilation' if name == 'dir' else 'persistent'}_cache_{name}" for name in names]
    before = {field: getattr(jax.config, field) for field in fields}
    monkeypatch.setenv("HOME", str(tmp_path))

    def chosen(cpuinfo: str | None) -> str:
        listed = tmp_path / "cpuinfo"
        listed.unlink(missing_ok=True)
        if cpuinfo is not None:
            listed.write_text(cpuinfo)
        elsewhere = types.SimpleNamespace(
            Path=lambda path: listed if path == "/proc/cpuinfo" else pathlib.Path(path)
        )
        monkeypatch.setattr(executables, "pathlib", elsewhere)
        jax.config.update("jax_compilation_cache_dir", None)
        keep_executables()
        return jax.config.values["jax_compilation_cache_dir"]

    yield chosen
    for field, value in before.items():
        jax.config.update(field, value)


def test_each_kind_of_processor_has_a_directory_of_its_own(place, monkeypatch):
    cpuinfo = "processor : 0\ncpu MHz : {}\nflags : fpu sse{}\n\nprocessor : 1\n"
    small, fast, large = (
        place(cpuinfo.format(*fields)) for fields in ((2000, ""), (3000, ""), (2000, " avx512f"))
    )
    assert small == fast != large
    arm = place("processor : 0\nFeatures : fp asimd sve\n")
    none = place(None)
    monkeypatch.setattr(executables.platform, "machine", lambda: "riscv64")
    assert len({small, large, arm, none, place(None)}) == 5
    assert {pathlib.Path(p).parent for p in (small, large, arm, none)} == {pathlib.Path(small).parent}
