"""Many `launch.py` commands at the price of one start: `python tests/forked_launch.py COMMANDS.json`.

Everything is imported once; then every command runs in a fork with its own standard streams, as if it had
been typed. JAX has started no device yet when the fork happens. Prints a JSON list of `{"code", "out",
"err"}`.
"""

import importlib
import json
import os
import pathlib
import sys
import tempfile
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402

# What the verbs import when they run: once, before the forks.
for name in ("evaluating", "experiment", "exporting", "generating", "probing"):
    importlib.import_module(f"depthgrow_jax.{name}")


def run(argv: list[str], cwd: str) -> dict:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.chdir(cwd)
                sys.argv = [str(ROOT / "launch.py"), *argv]
                code = launch.main(sys.argv)
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return {"code": code, "out": out.read().decode(), "err": err.read().decode()}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*fork.*")
    print(json.dumps([run(c["argv"], c["cwd"]) for c in json.loads(pathlib.Path(sys.argv[1]).read_text())]))
