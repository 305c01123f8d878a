"""The table in the terminal says what the result files hold, and names the test that was made."""

import re

from depthgrow_jax.report.eval_table import eval_table


def value(mean, low, high, stderr):
    return {"mean": mean, "low": low, "high": high, "stderr": stderr}


def result(metrics, **more):
    facts = {"n": 40, "shots": 5, "cut": 0, "chance": None, "metrics": metrics, "sweeps": []}
    return facts | more


def moved(metric, *means):
    return [{"metrics": {metric: {"mean": mean}}} for mean in means]


def test_a_row_for_every_metric():
    table = eval_table(
        {
            "copa": result({"accuracy": value(0.625, 0.475, 0.775, 0.0766)}, chance=0.5),
            "lambada": result(
                {"accuracy": value(0.25, 0.125, 0.4, 0.0693), "perplexity": value(None, None, None, None)},
                cut=3,
                shots=0,
            ),
        }
    )
    assert [re.sub(" +", " ", line) for line in table.splitlines()] == [
        "task items shots metric value 95% interval stderr chance",
        "copa 40 5 accuracy 0.625 0.475 - 0.775 0.077 0.5",
        "lambada 40 0 (cut) accuracy 0.25 0.125 - 0.4 0.069 -",
        "lambada 40 0 (cut) perplexity - - - -",  # too large for a float
    ]
    head, copa, *_ = table.splitlines()
    assert head.index("stderr") == copa.index("0.077")


def test_sweeps_and_exits_by_place():
    sweep = {"operation": "skip", "run_length": 2, "results": moved("accuracy", 0.2, 0.4)}
    exits = {"lens": "logit", "results": moved("accuracy", 0.1, 0.2, 0.625)}
    of_choice = result({"accuracy": value(0.625, 0.4, 0.8, 0.07)}, chance=0.2, sweeps=[sweep], exits=exits)
    lines = eval_table({"assign": of_choice}).splitlines()
    assert lines[2:] == [
        "",
        "assign accuracy (chance 0.2), skip 2, by start: 0.20 0.40",
        "assign accuracy (chance 0.2), logit exit after 0, 1, ... layers: 0.10 0.20 0.62",
    ]


def test_two_networks_by_the_test_that_was_made():
    paired = {"difference": -0.25, "low": -0.5, "high": 0.0, "p": 0.0312}
    of_choice = result({"exact": value(0.5, 0.4, 0.6, 0.05)}, paired={"exact": paired}, other={"run": "b"})
    of_overlap = result({"f1": value(0.5, 0.4, 0.6, 0.05)}, paired={"f1": paired}, other={"run": "b"})
    lines = eval_table({"gsm8k": of_choice, "quac": of_overlap}).splitlines()
    assert lines[3:] == [
        "gsm8k exact, less that of b: -0.25, 95% -0.5 - 0, McNemar p = 0.031",
        "quac f1, less that of b: -0.25, 95% -0.5 - 0, sign test p = 0.031",
    ]
