"""`launch.py eval` as it is typed: results, sweeps, exits, a second call, refusals in one line."""

import json

import numpy as np
import pytest
from probe_runs import trained, write_jsonl
from test_launch import assert_refused, launched


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.getbasetemp())


@pytest.mark.slow
def test_a_task_file_from_command_to_table(run, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "foundry").mkdir()
    records = [{"context": "text num", "continuation": "ber"}] * 2 + [{"context": "te", "continuation": "zz"}]
    write_jsonl(tmp_path / "foundry" / "lambada_openai.jsonl", records)
    base = f"eval --run={run} --config.eval.data_dir={tmp_path} --config.mesh.data=1 --out={tmp_path / 'out'}"
    sweeps = "--config.eval.sweeps=('skip','repeat') --config.eval.exits=logit"
    sweeps += " --config.eval.keep_items=True"
    first = f"{base} --tasks=lambada,assign_basic_0 --limit=3 --config.eval.shots=0 {sweeps}"
    (done,) = launched(tmp_path, [first])
    assert done["code"] == 0, done["err"]
    result = json.loads((tmp_path / "out" / "lambada.json").read_text())
    assert result["n"] == 3 and set(result["metrics"]) == {"accuracy", "perplexity"}
    assert [s["operation"] for s in result["sweeps"]] == ["skip", "repeat", "repeat"]
    assert [len(s["results"]) for s in result["sweeps"]] == [2, 2, 1]
    # Two layers: the last exit is the model itself.
    exits = [r["metrics"]["perplexity"]["mean"] for r in result["exits"]["results"]]
    np.testing.assert_allclose(exits[-1], result["metrics"]["perplexity"]["mean"], rtol=1e-5)
    assert len(exits) == 3 and exits[0] != exits[1]
    lines = [json.loads(line) for line in (tmp_path / "out" / "lambada.jsonl").read_text().splitlines()]
    assert [line["item"]["prompt"] for line in lines] == ["text num", "text num", "te"]
    assert lines[0]["scores"] == lines[1]["scores"]
    assert "lambada accuracy, skip 1, by start" in done["out"] and "chance" in done["out"]
    # A context of 16 bytes holds the words of the file, not a program.
    assert done["out"].count("(cut)") == 2 and result["cut"] == 0
    assert "assign_basic_0: 3 of 3 items are longer than the context" in done["err"]
    second, changed = launched(tmp_path, [first, first.replace("--limit=3", "--limit=2")])
    assert second["code"] == 0 and second["err"].count("already done") == 2
    assert_refused(
        changed, r"lambada.json: was made with other settings \(.*limit was 3, now 2\); use --out=DIR"
    )


@pytest.mark.slow
def test_what_is_there_is_not_overwritten_nor_taken_for_another(run, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "foundry").mkdir()
    file = tmp_path / "foundry" / "lambada_openai.jsonl"
    write_jsonl(file, [{"context": "text num", "continuation": "ber"}])
    out = tmp_path / "out"
    command = (
        f"eval --run={run} --config.eval.data_dir={tmp_path} --config.mesh.data=1 --out={out} --tasks=lambada"
    )
    kept = f"{command} --config.eval.keep_items=True"
    out.mkdir()
    (out / "lambada.jsonl").write_text("my notes")
    foreign, done, without = launched(tmp_path, [kept, command, kept])
    assert_refused(foreign, r"lambada.jsonl: is there already, and not of this evaluation")
    assert (out / "lambada.jsonl").read_text() == "my notes" and done["code"] == 0
    assert_refused(without, r"lambada.jsonl: is there already, and not of this evaluation")
    (out / "lambada.jsonl").unlink()
    result = json.loads((out / "lambada.json").read_text())
    (out / "lambada.json").write_text(json.dumps({k: v for k, v in result.items() if k != "metrics"}))
    (partial,) = launched(tmp_path, [command])
    assert_refused(partial, r"lambada.json: is not the result of an evaluation")
    (out / "lambada.json").write_text(json.dumps(result))
    (without,) = launched(tmp_path, [kept])
    assert_refused(without, r"eval.keep_items=True: .*lambada.json was made without it")
    write_jsonl(file, [{"context": "text num", "continuation": "bar"}])
    (changed,) = launched(tmp_path, [command])
    assert_refused(changed, r"lambada.json: was made with other settings \(content was .*, now")


@pytest.mark.slow
def test_items_that_a_killed_command_left_are_known_again(run, tmp_path):
    """Scored in other batches they differ by rounding; those of another network are another's."""
    (tmp_path / "home").mkdir()
    (tmp_path / "foundry").mkdir()
    records = [{"context": f"text {number}", "continuation": "ber"} for number in range(8)]
    write_jsonl(tmp_path / "foundry" / "lambada_openai.jsonl", records)
    out = tmp_path / "out"
    command = f"eval --run={run} --config.eval.data_dir={tmp_path} --tasks=lambada --out={out}"
    command += " --config.eval.keep_items=True"
    (done,) = launched(tmp_path, [command])
    assert done["code"] == 0, done["err"]
    (out / "lambada.json").unlink()
    kept = out / "lambada.jsonl"
    first = [json.loads(line) for line in kept.read_text().splitlines()]
    first[0]["scores"]["log_prob"] *= 1 + 1e-6
    kept.write_text("".join(json.dumps(line) + "\n" for line in first))
    (again,) = launched(tmp_path, [f"{command} --config.eval.batch_tokens=64"])
    assert again["code"] == 0, again["err"]
    (out / "lambada.json").unlink()
    first[0]["scores"]["log_prob"] += 0.5
    kept.write_text(text := "".join(json.dumps(line) + "\n" for line in first))
    (other,) = launched(tmp_path, [command])
    assert_refused(other, r"lambada.jsonl: is there already, and not of this evaluation")
    assert kept.read_text() == text


@pytest.mark.slow
def test_two_runs_and_an_order(run, tmp_path):
    (tmp_path / "home").mkdir()
    command = f"eval --run={run} --other={run} --step=4 --tasks=assign_basic_0 --limit=8"
    command += " --config.eval.shots=0 --config.mesh.data=1"
    more = (f"--out={tmp_path / 'a'}", f"--program=1,0,1 --out={tmp_path / 'b'}")
    for outcome in launched(tmp_path, [f"{command} {flags}" for flags in more]):
        assert outcome["code"] == 0, outcome["err"]
    result = json.loads((tmp_path / "a" / "assign_basic_0.json").read_text())
    assert result["paired"]["accuracy"]["n"] == 8 and result["chance"] == pytest.approx(0.2)
    assert json.loads((tmp_path / "b" / "assign_basic_0.json").read_text())["request"]["program"] == "1,0,1"


def test_wrong_commands_are_refused_in_one_line(run, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "foundry").mkdir()
    write_jsonl(tmp_path / "foundry" / "copa.jsonl", [{"query": "x", "choices": ["a", "b"], "gold": 2}])
    base = f"eval --run={run} --config.eval.data_dir={tmp_path}"
    cases = {
        "eval --tasks=primitives": [r"--run is missing"],
        f"eval --run={run} --tasks=lambda": [r"lambda.*lambada"],
        f"{base} --tasks=lambada": [r"foundry/lambada_openai.jsonl: no such .*; download it from https"],
        f"eval --run={run} --tasks=psm --config.eval.data_dir={tmp_path / 'no'}": [
            r"eval.data_dir='.*no': must be a directory"
        ],
        f"{base} --tasks=copa": [r"copa.jsonl:1.*gold"],
        f"{base} --tasks=primitives --limit=-1": [r"eval.limit=-1: must be 0 or more"],
        f"{base} --tasks=primitives --limit=abc": [r"--limit='abc': must be of type int"],
        f"{base} --tasks=primitives --config.eval.exits=tuned": [r"eval.lens='': must be given"],
        f"{base} --tasks=primitives --program=0-5": [r"--program='0-5': must be .* of 0 to 1"],
        f"{base} --tasks=primitives --config.eval.run_lengths=(3,) --config.eval.sweeps=('skip',)": [
            r"eval.run_lengths=\(3,\): none of them fits skip, which takes runs of 1 to 1"
        ],
        f"{base} --tasks=": [r"--tasks=: is empty"],
        f"{base} --tasks=primitives --out=": [r"--out=: is empty"],
        f"{base} --tasks=primitives --config.eval.run_lengths=(1,)": [
            r"eval.run_lengths=\(1,\): is for eval"
        ],
        "eval --model=hf:nowhere --tasks=primitives": [r"has no directory of its own"],
    }
    before = sorted(run.rglob("*"))
    for patterns, outcome in zip(cases.values(), launched(tmp_path, list(cases)), strict=True):
        assert_refused(outcome, *patterns)
    assert sorted(run.rglob("*")) == before
