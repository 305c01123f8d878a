"""Pretrained models on the command line: export, generate and probe agree; one line for broken ones."""

import json
import shutil

import numpy as np
import pytest
from probe_runs import trained, write_jsonl
from test_launch import assert_refused, contents, launched

from depthgrow_jax import results
from depthgrow_jax.corpora import corpus_of
from depthgrow_jax.interop import open_model
from depthgrow_jax.subjects import load_pretrained
from depthgrow_jax.train.config import MeshConfig

torch = pytest.importorskip("torch", reason="the models are written by torch")
pytest.importorskip("transformers", reason="the models are written by transformers")
pytest.importorskip("gguf", reason="GGUF files are read by the package gguf")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="shards are rewritten by it")

from test_subjects_pretrained import ROWS, save_pretrained, tiny_hf, write_texts  # noqa: E402  (needs all)

# 1 -> 2 layers after 2 of 4 steps, behind a gate that opens over 4 steps: half open at the end.
GROWN = """config.train.update(steps=4, sequence_length=64)
    config.optimizer.learning_rate = 0.02
    config.growth.update(operator="midas", schedule="explicit", boundaries=(2,))
    config.growth.update(gate="linear", gate_steps=4)"""
SHOWN = "--config.data.source=files --config.data.path=texts --config.data.cache_dir=cache"
SHOWN += " --config.data.validation_fraction=0.2 --config.probe.prompts.examples=3 --config.mesh.data=1"


@pytest.fixture(autouse=True)
def offline_commands(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def run(offline_commands, tmp_path_factory):
    return trained(tmp_path_factory.getbasetemp(), GROWN)


@pytest.mark.slow
def test_a_run_is_exported_continued_and_probed(run, tmp_path):
    (tmp_path / "home").mkdir()
    text = write_texts(tmp_path)
    write_jsonl(tmp_path / "prompts.jsonl", [{"text": f"a text of its own, {n}"} for n in range(3)])
    prompt = ["--prompt=text number 1", "--prompt=t", "--max_tokens=32"]
    looped = "--program=0-1,0-1"
    probe = f"{SHOWN} --out=probes --probes=geometry,linear_maps --config.probe.prompts.length=16"
    commands = {
        "export": f"export --run={run} --out=~/exported",
        "run": ["generate", f"--run={run}", *prompt],
        "model": ["generate", "--model=hf:home/exported", *prompt],
        "export looped": f"export --run={run} --out=new/looped {looped}",
        "run looped": ["generate", f"--run={run}", looped, *prompt],
        "model looped": ["generate", "--model=hf:new/looped", *prompt],
        "probe": f"probe --model=hf:~/exported {probe} --other=hf:new/looped",
        "again": f"probe --model=hf:~/exported {probe} --other=hf:new/looped",
        "file": f"probe --model=hf:~/exported {SHOWN} --out=file --probes=geometry"
        " --config.probe.prompts.path=prompts.jsonl",
        "another": f"probe --model=hf:new/looped {probe}",
        "no other": f"probe --model=hf:~/exported {probe}",
    }
    outcomes = dict(zip(commands, launched(tmp_path, list(commands.values())), strict=True))
    refused = {name: outcomes.pop(name) for name in ("another", "no other")}
    assert all(outcome["code"] == 0 for outcome in outcomes.values()), outcomes
    out = {name: outcome["out"] for name, outcome in outcomes.items()}

    exported = f"out: 2 layers, float32, written to {tmp_path / 'home' / 'exported'}\n"
    assert out["export"] == exported
    assert out["export looped"] == "out: 4 layers, float32, written to new/looped\n"
    assert out["run"].startswith("text number 1") and len(out["run"]) > 40
    assert out["model"] == out["run"] != out["run looped"] == out["model looped"]

    assert "already done" not in outcomes["probe"]["err"] and outcomes["again"]["err"].count("done") == 2
    assert out["probe"] == out["again"] and out["probe"].startswith("hf:~/exported: probes\n")
    result, header = results.load(tmp_path / "probes" / "geometry.json")
    assert (result.steps, header["step"], header["depth"], result.examples) == (2, 0, 2, 3)
    exported, other = (f"hf:{tmp_path / place}" for place in ("home/exported", "new/looped"))
    assert header["config_hash"] == open_model(exported).fingerprint
    assert header["other"]["config_hash"] == open_model(other).fingerprint
    assert header["run"] == "hf:~/exported" and header["other"]["run"] == "hf:new/looped"
    shown = corpus_of(load_pretrained(exported, text, length=16, mesh=MeshConfig(data=1)), print)
    assert header["data_hash"] == shown.data_hash != ""
    assert header["prompts"]["source"] == "validation split of the text that it is shown"
    _, header = results.load(tmp_path / "file" / "geometry.json")
    # A byte is a token, and the separator comes first.
    assert header["prompts"]["source"].endswith("prompts.jsonl") and header["prompts"]["examples"] == 3
    assert header["prompts"]["length"] == 1 + len("a text of its own, 0")

    assert_refused(refused["another"], r"geometry.json: was made with other settings \(config_hash was '")
    assert_refused(refused["no other"], r"linear_maps.json: .*\(other was '\w+ step 0', now ''\)")


@pytest.mark.slow
def test_a_pretrained_model_is_exported_continued_and_probed(tmp_path):
    """The same for what was trained elsewhere, without a run: files in, files out."""
    (tmp_path / "home").mkdir()
    save_pretrained(tmp_path / "good", template="<s> $A", max_position_embeddings=40)
    tiny_hf.make(tmp_path / "another", "llama", seed=1, vocab_size=ROWS)
    shutil.copy(tmp_path / "good" / "tokenizer.json", tmp_path / "another")
    shutil.copy(tmp_path / "good" / "tokenizer_config.json", tmp_path / "another")
    write_texts(tmp_path)
    prompt = ["--prompt=text number 1", "--prompt=t", "--max_tokens=30"]
    probe = f"{SHOWN} --out=probes --probes=geometry --config.probe.prompts.length=16"
    export, model, exported, first, again, refused = launched(
        tmp_path,
        [
            "export --model=hf:good --out=out",
            ["generate", "--model=hf:good", *prompt],
            ["generate", "--model=hf:out", *prompt],
            f"probe --model=hf:good {probe}",
            f"probe --model=hf:good {probe}",
            f"probe --model=hf:another {probe}",
        ],
    )
    for outcome in (export, model, exported, first, again):
        assert outcome["code"] == 0, outcome
    assert export["out"] == "hf:good: 2 layers, float32, written to out\n"
    assert model["out"] == exported["out"] and len(model["out"]) > 40
    assert "already done" not in first["err"] and "geometry: already done" in again["err"]
    assert first["out"] == again["out"] and first["out"].startswith("hf:good: probes\n")
    _, header = results.load(tmp_path / "probes" / "geometry.json")
    assert header["config_hash"] == open_model(f"hf:{tmp_path / 'good'}").fingerprint
    assert_refused(refused, r"geometry.json: was made with other settings \(config_hash was '.*use --out=DIR")


def broken_models(place):
    """Directories and files that cannot be read, below `place`, and a good one."""
    network = save_pretrained(place / "good", max_position_embeddings=40)
    tiny_hf.make(place / "sharded", "llama", vocab_size=ROWS, max_shard_size="20KB")
    tiny_hf.make(place / "bare", "llama", vocab_size=ROWS)
    shards = sorted(path.name for path in (place / "sharded").glob("*.safetensors"))
    copied = lambda name, source="bare": shutil.copytree(place / source, place / name)  # noqa: E731
    (copied("missing", "sharded") / shards[1]).unlink()
    cut = copied("cut", "sharded") / shards[1]
    cut.write_bytes(cut.read_bytes()[:-1])
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    rewritten = {
        "shape": {"model.layers.1.mlp.up_proj.weight": torch.zeros(32, 48)},
        "infinite": {"model.layers.0.mlp.up_proj.weight": torch.full((48, 32), np.inf)},
    }
    for name, tensors in rewritten.items():
        safetensors_torch.save_file({**state, **tensors}, copied(name) / "model.safetensors")
    tiny_hf.edit_config(copied("rows"), vocab_size=ROWS + 1)
    shutil.copytree(place / "good", place / "ids")
    vocabulary = json.loads((place / "ids" / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["beyond"] = ROWS
    (place / "ids" / "tokenizer.json").write_text(json.dumps(vocabulary))
    tiny_hf.edit_config(copied("architecture"), architectures=["GPT2LMHeadModel"])
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    tiny_hf.edit_config(copied("rope"), rope_parameters=rope)
    (place / "not.gguf").write_text("no model")
    return shards


def test_wrong_commands_are_refused_in_one_line(place):
    shards = broken_models(place)
    (place / "full").mkdir()
    (place / "full" / "kept").write_text("kept")
    layer = r"model\.layers\.\d\.\S+"
    broken = {
        "hf:missing": [rf"missing/{shards[1]}: missing; .*index.json names it for tensor \S+"],
        "hf:cut": [rf"cut/{shards[1]}: cut short"],
        "hf:shape": [rf"shape/model.safetensors: tensor {layer} has shape \[32, 48\], must be \[48, 32\]"],
        "hf:infinite": [rf"hf:infinite: tensor {layer} holds values that are not finite"],
        "hf:rows": [r"rows/model.safetensors: tensor \S+ has shape \[300, 32\], must be \[301, 32\]"],
        "hf:ids": [r"ids/tokenizer.json: largest token id 300 is outside the embedding of vocab_size=300"],
        "hf:architecture": [r"architecture/config.json: architectures=\['GPT2LMHeadModel'\]: must be one of"],
        "hf:rope": [r"rope/config.json: rope_parameters.rope_type='yarn': must be one of default"],
        "gguf:not.gguf": [r"not.gguf: is not a GGUF file"],
        "hf:nowhere": [r"hf:nowhere: no such directory, and not of the form hf:org/name"],
        "hf:no/where": [r"hf:no/where: no such directory, not complete in the cache"],
        "gguf:nowhere": [r"gguf:nowhere: no such file and no such package"],
    }
    verbs = ("export --out=out", "generate --prompt=a", f"probe {SHOWN} --out=out")
    # Each model in one of the commands, and one of them in all.
    cases = {f"{verbs[i % 3]} --model={model}": line for i, (model, line) in enumerate(broken.items())}
    cases |= {f"{verb} --model=hf:missing": broken["hf:missing"] for verb in verbs}
    start = "train --config=run.py --workdir=out --config.init_from.path"
    cases[f"{start}=hf:rope"] = broken["hf:rope"]
    cases["plan --config=run.py --config.init_from.path=None"] = [r"init_from.path='None': is the word None"]
    cases["train --config=run.py --workdir=out --config.data.tokenizer=hf:bare"] = [
        r"data.tokenizer='hf:bare': comes without a tokenizer"
    ]
    good = "--model=hf:good"
    cases |= {
        f"export --run=x {good} --out=out": [r"--run and --model: one network at a time"],
        f"export {good}": [r"--out is missing"],
        "export --out=out": [r"--run is missing: .*; or --model"],
        f"export {good} --out=full": [r"--out='full': exists and is not empty"],
        f"export {good} --out=run.py": [r"--out='run.py': .*run.py is a file"],
        f"export {good} --out=out --dtype=int8": [r"--dtype='int8': must be one of float32, bfloat16"],
        f"export {good} --out=out --program=0-2": [
            r"--program='0-2': must be layers and ranges .* of 0 to 1"
        ],
        f"export {good} --out=out --step=1": [r"--step=1: is for --run; --model='hf:good' has no steps"],
        f"export {good} --out=out --distributed=auto": [r"--distributed=auto: export runs in one process"],
        f"generate {good}": [r"--prompt is missing"],
        f"generate {good} --prompt=": [r"--prompt='': is empty, and the tokenizer puts nothing before it"],
        f"generate {good} --prompt=a --max_tokens=40": [r"--max_tokens=40: must be at most 39 after"],
        f"generate {good} --prompt=a --max_tokens=4 --program=1,,0": [
            r"--program='1,,0': must be layers and ranges"
        ],
        f"generate {good} --prompt=a --max_tokens=4 --program=": [r"--program='': must be layers and ranges"],
        f"generate {good} --prompt=a --step=0": [r"--step=0: is for --run"],
        f"generate {good} --prompt=a --top_p=0": [r"--top_p=0.0: must lie in \(0, 1\]"],
        f"generate {good} --prompt=a --temperature=hot": [r"temperature.*hot"],
        "generate --model=hf:bare --prompt=a": [r"hf:bare: comes without a tokenizer, which must lie"],
        "generate --model=good --prompt=a": [r"--model='good': is no model; must be hf:DIR"],
        f"probe {SHOWN} {good}": [r"--model='hf:good': has no directory of its own.*--out"],
        f"probe {SHOWN} {good} --out=out --step=2": [r"--step=2: is for --run"],
        f"probe {SHOWN} {good} --out=out --config.probe.prompts.length=41": [
            r"probe.prompts.length=41: must be at most 40, the longest sequence that the network is made for"
        ],
        f"probe {SHOWN} {good} --out=out --other=hf:rope": broken["hf:rope"],
        f"probe {SHOWN} --model=hf:bare --out=out": [
            r"data.tokenizer='hf:bare': comes without a tokenizer; give a tokenizer.json with --config.data"
        ],
        f"probe --run=x {SHOWN} --out=out": [r"--config.data: is the text of a pretrained network"],
    }
    before = contents(place)
    for (command, patterns), outcome in zip(cases.items(), launched(place, list(cases)), strict=True):
        assert outcome["code"] == 2, (command, outcome)
        assert_refused(outcome, *patterns)
    assert contents(place) == before
