"""Training tests share a few whole runs."""

import pytest
from toys import tiny_config, tiny_run


@pytest.fixture(scope="session")
def _finished_runs():
    return {}


@pytest.fixture
def uninterrupted(_finished_runs, tmp_path_factory):
    """A function from changes of the tiny config to the directory of a finished run, trained once a session.

    Treat it as read-only.
    """

    def directory_of(changes: dict):
        if repr(changes) not in _finished_runs:
            directory = tmp_path_factory.mktemp("uninterrupted")
            tiny_run(directory, tiny_config(**changes)).train()
            _finished_runs[repr(changes)] = directory
        return _finished_runs[repr(changes)]

    return directory_of
