"""Configs that start from a pretrained model: legal runs at any depth, with what they say they do."""

import importlib
from typing import Any

import pytest

from depthgrow_jax.config import parse
from depthgrow_jax.data.sources import documents
from depthgrow_jax.data.splits import digest, held_out
from depthgrow_jax.experiment import plan_experiment, plan_of, run_spec
from depthgrow_jax.train.start import pretrained_model

pytest.importorskip("torch", reason="the models are written by torch")
pytest.importorskip("transformers", reason="the models are written by transformers")

from tests.interop import tiny_hf

grow_pretrained = importlib.import_module("configs.grow_pretrained")
finetune = importlib.import_module("configs.finetune_primitives")
# By hand from the docstring of the config. L = 4: a quarter is a layer, and so is an eighth, at least.
# L = 30: a quarter is 7 layers, an eighth 3; the copied ones are those around 15, the middle.
SOURCES = {
    4: {
        "plain": (0, 1, 2, 3),
        "solar": (0, 1, 2, 1, 2, 3),
        "pro": (0, 0, 1, 1, 2, 2, 3, 3),
        "lidas": (0, 1, 1, 2, 3),
    },
    30: {
        "plain": tuple(range(30)),
        "solar": (*range(23), *range(7, 30)),
        "pro": (*range(7), 6, *range(7, 14), 13, *range(14, 21), 20, *range(21, 28), 27, 28, 29),
        "lidas": (*range(16), 13, 14, 15, *range(16, 30)),
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function from a depth to the directory of a model."""

    def directory(depth):
        place = tmp_path_factory.mktemp("pretrained")
        fields: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 128}
        tiny_hf.make(place, "llama", num_hidden_layers=depth, **fields)
        return place

    return directory


@pytest.mark.parametrize("depth", SOURCES)
def test_the_stated_source_maps(saved, depth):
    reference = f"hf:{saved(depth)}"
    experiment = parse(grow_pretrained.get_config(reference))
    assert {arm for arm, _ in experiment.runs} == set(SOURCES[depth])
    for (arm, seed), cfg in experiment.runs.items():
        source = SOURCES[depth][arm]
        assert (cfg.depth, cfg.growth.start_depth, seed) == (len(source), depth, 0)
        last = plan_of(cfg)["stages"][-1]
        assert last["depth"] == len(source) and last["last_step"] == cfg.train.steps == 200
        if arm != "plain":
            assert tuple(last["source"]) == source
            assert last["first_step"] == (101 if arm == "lidas" else 1)
        assert cfg.growth.init == ("identity" if arm == "pro" else "copy")
        # The model is one that the run can start from, and read in its tokenizer.
        assert cfg.init_from.path == cfg.data.tokenizer == reference
        assert cfg.train.sequence_length == 128
        if arm == "plain":
            assert pretrained_model(run_spec(cfg, arm)).depth == depth
    text = plan_experiment(experiment)
    for arm, source in SOURCES[depth].items():
        operator = {"plain": "none", "lidas": "lidas"}.get(arm, "explicit")
        assert f"operator {operator}, depth {len(source)}\n" in text and f"{arm}: operator" in text


@pytest.mark.parametrize("depth", [1, 3, 28])
def test_other_depths_are_legal(saved, depth):
    """Among them that of Llama 3.2 3B and Qwen2 1.5B, which no eighth divides."""
    experiment = parse(grow_pretrained.get_config(f"hf:{saved(depth)}"))
    assert len(experiment.runs) == 4 and "saving" in plan_experiment(experiment)
    for (arm, _), cfg in experiment.runs.items():
        assert cfg.depth == depth if arm == "plain" else cfg.depth > depth, arm


def test_fine_tuning_on_about_as_many_examples_as_the_arm_says(saved):
    reference = f"hf:{saved(4)}"
    experiment = parse(finetune.get_config(reference))
    assert [arm for arm, _ in experiment.runs] == ["n064", "n128", "n256", "n512"]
    before: set[str] = set()
    for (arm, _), cfg in experiment.runs.items():
        count = int(arm[1:])
        assert cfg.depth == pretrained_model(run_spec(cfg, arm)).depth == 4
        assert cfg.init_from.path == cfg.data.tokenizer == reference
        assert len(plan_of(cfg)["stages"]) == 1
        texts = documents(cfg.data, "data.")
        kept = {digest(text) for text in texts} - held_out({"": [*map(digest, texts)]}, finetune.HELD_OUT)
        # A fifth of n / 0.8 is held out, by chance: 4 standard deviations of sqrt(n / 0.8 * 0.16).
        assert abs(len(kept) - count) < 4 * (0.2 * count) ** 0.5
        assert before < {*texts}
        before = {*texts}
        # One layer of aliases or two, in turn.
        assert [text.count(" = ") for text in texts[:4]] == [10, 15, 10, 15]
