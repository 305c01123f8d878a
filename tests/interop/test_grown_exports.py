"""An imported model grows, and every stage is a model of its own for transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.growth.grow import grow_params
from depthgrow_jax.growth.source import explicit, lidas, midas
from depthgrow_jax.interop.export import export
from depthgrow_jax.interop.hf_files import open_hf
from depthgrow_jax.model import apply, layer_program

torch = pytest.importorskip("torch", reason="exports are read by transformers (requirements-dev.txt)")
transformers = pytest.importorskip("transformers", reason="exports are read by transformers")
safetensors = pytest.importorskip("safetensors", reason="exports are safetensors files")

import tiny_hf  # noqa: E402  (needs torch)

TOKENS = np.random.default_rng(2).integers(0, tiny_hf.VOCABULARY, (2, 24))
# Which original layer each layer of a stage is, by hand from the papers' definitions. Blocks of two layers:
# MIDAS repeats the middle block (the lower of two), LIDAS the two layers around the centre.
STAGES = {
    midas: [(0, 1, 2, 3), (0, 1, 0, 1, 2, 3), (0, 1, 0, 1, 0, 1, 2, 3)],
    lidas: [(0, 1, 2, 3), (0, 1, 2, 1, 2, 3), (0, 1, 2, 1, 2, 1, 2, 3)],
}


our_logits = jax.jit(lambda cfg, params: apply(cfg, params, jnp.asarray(TOKENS)).logits, static_argnums=0)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """(directory, model of transformers) of four different layers."""
    directory = tmp_path_factory.mktemp("original")
    return directory, tiny_hf.make(directory, "llama", num_hidden_layers=4, tie_word_embeddings=False)


def read_bits(directory):
    with safetensors.safe_open(directory / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name).view(np.int32) for name in file.keys()}  # noqa: SIM118


def export_stage(pretrained, params, depth, directory):
    """Exports a stage; returns the model that transformers reads."""
    export(
        pretrained.cfg,
        params,
        layer_program(pretrained.cfg, depth),
        directory,
        context=pretrained.context,
        vocabulary=None,
        lineage={"stage": depth},
    )
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("operator", STAGES)
def test_every_stage_holds_the_original_layers_of_the_source_map(operator, original, tmp_path):
    directory, _ = original
    pretrained = open_hf(f"hf:{directory}")
    bits = read_bits(directory)
    params = pretrained.params()
    for stage, sources in enumerate(STAGES[operator]):
        if stage:
            event = operator(len(STAGES[operator][stage - 1]), 2)
            params = grow_params(params, event, model=pretrained.cfg)
        place = tmp_path / str(stage)
        model = export_stage(pretrained, params, len(sources), place)

        expected = {name: value for name, value in bits.items() if ".layers." not in name}
        for layer, source in enumerate(sources):
            prefix = f"model.layers.{source}."
            of_layer = {name: value for name, value in bits.items() if name.startswith(prefix)}
            expected |= {name.replace(prefix, f"model.layers.{layer}."): v for name, v in of_layer.items()}
        exported = read_bits(place)
        assert exported.keys() == expected.keys() and len(expected) == 3 + 9 * len(sources)
        assert all(np.array_equal(exported[name], expected[name]) for name in expected)

        with jax.default_matmul_precision("highest"):
            want = np.asarray(our_logits(pretrained.cfg, params))
        assert np.abs(tiny_hf.logits(model, TOKENS) - want).max() <= 2e-5 * max(1, np.abs(want).max())


def test_identity_insertion_is_the_original_for_transformers(original, tmp_path):
    directory, model = original
    pretrained = open_hf(f"hf:{directory}")
    # LLaMA-Pro: a silenced copy after every second layer.
    event = explicit((0, 1, 1, 2, 3, 3))
    grown = grow_params(pretrained.params(), event, model=pretrained.cfg, init="identity")
    exported = export_stage(pretrained, grown, event.depth, tmp_path / "grown")
    assert exported.config.num_hidden_layers == 6
    assert np.array_equal(tiny_hf.logits(exported, TOKENS), tiny_hf.logits(model, TOKENS))
    # The copies are there, and only silent.
    layer = exported.model.layers[2]
    assert torch.equal(layer.self_attn.q_proj.weight, model.model.layers[1].self_attn.q_proj.weight)
    assert not layer.self_attn.o_proj.weight.any() and not layer.mlp.down_proj.weight.any()
