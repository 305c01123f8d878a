"""Every stage of a grown run, exported: transformers reads network and tokenizer as they were trained."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from probe_runs import trained

from depthgrow_jax import exporting, generating
from depthgrow_jax.corpora import tokenizer_of
from depthgrow_jax.errors import UserError
from depthgrow_jax.exporting import export_network
from depthgrow_jax.generating import continuations, continue_texts
from depthgrow_jax.model import Sampling, apply
from depthgrow_jax.subjects import load_subject
from depthgrow_jax.train.config import MeshConfig, TrainConfig

torch = pytest.importorskip("torch", reason="exports are read by torch")
transformers = pytest.importorskip("transformers", reason="exports are read by transformers")

from tests.interop import tiny_hf  # noqa: E402  (needs both)

pytestmark = pytest.mark.slow

ONE_DEVICE = MeshConfig(data=1)
NEW = 32
PROMPT = "text number 1"
# 1 -> 2 layers after 2 of 6 steps, behind a gate that opens over 4 steps: it is half open at step 4.
GROWN = """config.model.vocab_size = 280
    config.train.update(steps=6, sequence_length=64)
    config.optimizer.learning_rate = 0.02
    config.growth.update(operator="midas", schedule="explicit", boundaries=(2,), gate="linear", gate_steps=4)
    config.checkpoint.keep = 9"""
RUNS = {"bytes": GROWN, "bpe": f'{GROWN}\n    config.data.tokenizer = "bpe"'}
STAGES = [("bytes", 2), ("bytes", 4), ("bytes", 6), ("bpe", 4)]
TEXTS = ["text number 7 text", "  two  spaces\n\ttab", "naïve – 日本語 🙂", "\x00\x7f", ""]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function from a stage (and an order) to (run, step, exported directory); each is written once."""
    made = {}
    place = tmp_path_factory.mktemp("exported")

    def directory(tokenizer, step, order=None):
        run = trained(tmp_path_factory.getbasetemp(), RUNS[tokenizer])
        if (tokenizer, step, order) not in made:
            out = made[tokenizer, step, order] = place / str(len(made))
            assert export_network(str(run), str(out), step=step, order=order) == 0
        return run, step, made[tokenizer, step, order]

    return directory


def opened(directory):
    """(model, tokenizer) as transformers reads them."""
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return network, transformers.AutoTokenizer.from_pretrained(directory)


def printed(capsys, place, step=None, order=None, flag="--run") -> str:
    capsys.readouterr()
    continue_texts(
        str(place),
        [PROMPT, "t"],
        flag=flag,
        step=step,
        sampling=Sampling(),
        max_tokens=NEW,
        seed=0,
        stops=(),
        order=order,
    )
    return capsys.readouterr().out


@pytest.mark.parametrize(("tokenizer", "step"), STAGES)
def test_a_stage_is_the_same_network(exported, tokenizer, step):
    run, step, directory = exported(tokenizer, step)
    subject = load_subject(run, step, mesh=ONE_DEVICE).subject
    network, _ = opened(directory)
    assert network.config.num_hidden_layers == subject.steps == (1 if step == 2 else 2)
    gates = np.asarray(subject.program.gate)
    assert (gates == 0.5).any() == (step == 4)
    tokens = np.random.default_rng(1).integers(0, 280, (2, 64))
    with jax.default_matmul_precision("highest"):
        want = apply(subject.cfg, subject.params, jax.numpy.asarray(tokens), program=subject.program).logits
    np.testing.assert_allclose(tiny_hf.logits(network, tokens), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("tokenizer", "step"), STAGES)
def test_a_stage_continues_alike(exported, tokenizer, step, capsys):
    """Greedy, 32 tokens: transformers, the run, and the import of its export."""
    run, step, directory = exported(tokenizer, step)
    network, theirs = opened(directory)
    given = theirs(PROMPT, return_tensors="pt")
    made = network.generate(**given, do_sample=False, max_new_tokens=NEW)[0, given.input_ids.shape[1] :]
    loaded = load_subject(run, step, mesh=ONE_DEVICE)
    ours = tokenizer_of(loaded, print)
    ids = [ours.separator_id, *ours.encode(PROMPT)]
    assert given.input_ids[0].tolist() == ids
    (text,) = continuations(
        loaded.subject,
        ours,
        [ids],
        ends=(ours.separator_id,),
        sampling=Sampling(),
        max_tokens=NEW,
    )
    assert theirs.decode(made, skip_special_tokens=True) == text.text
    assert len(made) == NEW or text.reason == "end"
    lines = printed(capsys, run, step)
    assert lines.startswith(f"{PROMPT}{text.text}\n")
    assert printed(capsys, f"hf:{directory}", flag="--model") == lines


@pytest.mark.parametrize("tokenizer", RUNS)
def test_the_tokenizer_is_the_run_s_with_the_separator_in_front(exported, tokenizer):
    run, _, directory = exported(tokenizer, 4)
    ours = tokenizer_of(load_subject(run, mesh=ONE_DEVICE), print)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ids == [ours.separator_id, *ours.encode(text)], text
        assert theirs.decode(ids, skip_special_tokens=True) == text
    # Text that spells the separator is text, where transformers is asked to take it so.
    spelt = theirs("a<|endoftext|>", add_special_tokens=False, split_special_tokens=True).input_ids
    assert spelt == ours.encode("a<|endoftext|>") and ours.separator_id not in spelt
    assert theirs.eos_token == theirs.bos_token == "<|endoftext|>"
    assert theirs.eos_token_id == ours.separator_id and theirs.model_max_length == 64


def test_a_looped_program_is_unrolled(exported, capsys):
    """`--program` of generate and of export agree; the half-open gate of a layer goes with its copies."""
    run, step, directory = exported("bytes", 4, "0-1,0-1")
    network, _ = opened(directory)
    weights = [layer.mlp.down_proj.weight for layer in network.model.layers]
    assert len(weights) == 4
    assert torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[0], weights[1])
    looped = printed(capsys, run, step, order="0-1,0-1")
    assert printed(capsys, f"hf:{directory}", flag="--model") == looped != printed(capsys, run, step)
    plain, _ = opened(exported("bytes", 4)[2])
    plain.config.num_hidden_layers = 4
    plain.model.layers = torch.nn.ModuleList([*plain.model.layers, *plain.model.layers])
    tokens = np.random.default_rng(1).integers(0, 280, (1, 64))
    np.testing.assert_array_equal(tiny_hf.logits(network, tokens), tiny_hf.logits(plain, tokens))
    assert json.loads((directory / "depthgrow.json").read_text())["program"] == "0-1,0-1"


def test_an_import_is_exported_as_it_is(exported, tmp_path):
    """Weights to the bit; the tokenizer's files as they are."""
    _, _, directory = exported("bpe", 4)
    assert export_network(f"hf:{directory}", str(tmp_path / "again"), flag="--model") == 0
    (one, _), (two, _) = opened(directory), opened(tmp_path / "again")
    for (name, first), second in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(first, second), name
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads(
            (directory / name).read_text()
        )


def test_where_it_comes_from(exported):
    run, step, directory = exported("bytes", 4)
    found = json.loads((directory / "depthgrow.json").read_text())
    meta = json.loads((run / "checkpoints" / str(step) / "meta" / "metadata").read_text())
    for name in ("lineage", "config_hash", "data_hash"):
        assert found[name] == meta[name]
    assert (found["run"], found["step"], found["depth"], found["operator"]) == ("out", 4, 2, "midas")
    assert found["program"] is None


def test_refusals_leave_nothing_behind(exported, tmp_path, monkeypatch, capsys):
    run, _, directory = exported("bytes", 4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("kept")
    before = sorted(tmp_path.rglob("*"))

    def refused(pattern, place=str(run), out="out", **settings):
        with pytest.raises(UserError, match=pattern) as caught:
            export_network(place, str(tmp_path / out), **settings)
        assert "\n" not in str(caught.value) and sorted(tmp_path.rglob("*")) == before

    refused(r"^--dtype='int8': must be one of float32, bfloat16, float16$", dtype="int8")
    refused(r"^--out='.*full': exists and is not empty", out="full")
    refused(r"^--program='0-2': must be layers and ranges .* of 0 to 1$", order="0-2")
    refused(r"^--program='': must be layers", order="")
    refused(r"^--step=3: not saved in .*; legal: 2, 4, 6$", step=3)
    refused(
        r"^--step=4: is for --run; --model='hf:.*' has no steps$", f"hf:{directory}", step=4, flag="--model"
    )
    loaded = load_subject(run, mesh=ONE_DEVICE)
    config = dataclasses.replace(loaded.config, train=TrainConfig(objective="masked"))
    subject = loaded.subject._replace(cfg=dataclasses.replace(loaded.subject.cfg, causal=False))
    both_ways = loaded._replace(config=config, subject=subject)
    for module in (exporting, generating):
        monkeypatch.setattr(module, "load_network", lambda *_, **__: both_ways)
    refused(r"^--run='.*': is a bidirectional model; no Llama-like class holds one$")
    with pytest.raises(UserError, match=r"^--run='.*': is a bidirectional model, which does not continue"):
        printed(capsys, run)
