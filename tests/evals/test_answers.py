"""Extraction, normal forms and F1: by hand, and against lm-evaluation-harness's DROP."""

import importlib.util
import itertools
import pathlib

import pytest

from depthgrow_jax.evals import answers
from depthgrow_jax.evals.items import Question
from depthgrow_jax.evals.task import Task


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Half of 96 is 48.\n#### 48", "48"),
        ("#### 1,234", "1234"),
        ("####  $1,234.50.", "1234.5"),
        ("#### -7\nQuestion: next? #### 9", "-7"),
        ("so #### apples: 12", "12"),  # no number behind the mark
        ("The final answer is 72.", "72"),
        ("so the final answer is 15 * 8\nThe final answer is 120\nor 7", "120"),
        ("the final answer is: $18 a day for 3 days", "18"),
        ("If the answer is 3, ...\nThe FINAL answer is -0.50 degrees, of 90", "-0.5"),
        ("First 5, then 3. The final answer is\n8", "8"),
        ("5 apples and 3 pears make 8 fruits.", "8"),
        ("It costs $4.75.", "4.75"),
        ("10-3=7", "7"),
        ("10 - 3", "3"),
        ("10-3", "3"),  # the minus subtracts
        ("it is (-3)", "-3"),
        ("$-3", "-3"),
        ("-$3", "-3"),
        ("−3", "-3"),  # the Unicode minus
        ("about .5", "0.5"),
        ("1,2,3", "3"),
        ("007", "7"),
        ("-0.0", "0"),
        ("none", None),
        ("", None),
    ],
)
def test_number(text, expected):
    assert answers.number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("51.0", "51"), ("1,080", "1080"), (" $20. ", "20"), ("12 apples", None), ("1,08", None), ("", None)],
)
def test_canonical_number(text, expected):
    assert answers.canonical_number(text) == expected


def test_canonical_numbers_are_exact():
    digits = "1234567890" * 5
    assert answers.canonical_number(digits + "1") != answers.canonical_number(digits + "2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6 * 6\nThe final answer is 36 minutes\nQuestion:", "36 minutes"),
        ("The final answer is 1.\nThe final answer is", None),
        ("6 * 6\n36 minutes\n", "36 minutes"),
        ("The final answer is: x/2", "x/2"),
        ("\n", None),
    ],
)
def test_final_answer(text, expected):
    assert answers.final_answer(text) == expected


def test_normal_forms():
    assert answers.same_number(" Rs. 4,000 ") == "rs.4000"
    assert answers.same_number("$78.20") == answers.same_number("78.2") == "78.2"
    assert answers.squad_text("The U.S.A.'s  an-them") == "usas anthem"
    assert answers.squad_text("Theatre") == "theatre"
    assert answers.trivia_text("A ‘rock-and_roll’ (song)") == "rock and roll song"
    assert answers.drop_text("The 34-yard run, $1,000") == "34.0 yard run 1000.0"


@pytest.mark.parametrize(
    ("found", "gold", "expected"),
    [
        ("cat sat", "cat sat", 1.0),
        ("cat sat", "dog", 0.0),
        ("the cat sat there", "cat sat", 2 * (2 / 4) * (2 / 2) / (2 / 4 + 2 / 2)),
        # A word is shared as often as both have it.
        ("very very big", "very big", 2 * (2 / 3) * (2 / 2) / (2 / 3 + 2 / 2)),
        ("very very big", "very very good", 2 / 3),
        ("", "cat", 0.0),
    ],
)
def test_token_f1(found, gold, expected):
    assert answers.token_f1(found, gold) == pytest.approx(expected)


def test_drop_f1_by_hand():
    assert answers.drop_f1("34.0", "34.0 yard") == 0.67  # 2 * 1 * 0.5 / 1.5, rounded
    assert answers.drop_f1("35.0 yard", "34.0 yard") == 0.0  # another number
    assert answers.drop_f1("big big cat", "big cat") == 1.0  # sets


def test_drop_equals_the_harness():
    package = importlib.util.find_spec("lm_eval")
    if package is None or not package.submodule_search_locations:
        pytest.skip("lm_eval is not installed: there is nothing to compare DROP's metrics with")
    path = pathlib.Path(package.submodule_search_locations[0], "tasks", "drop", "utils.py")
    spec = importlib.util.spec_from_file_location("drop_utils", path)
    assert spec and spec.loader
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    texts = [
        "4",
        "4.0",
        "four",
        "the 34-yard run",
        "34 yards",
        "the 7-yard run",
        "$1,000",
        "1000",
        "5.5%",
        "55",
        "A. Smith",
        "smith",
    ]
    texts += ["in the 1st half", "half", "a b-c, d", "b c", "-3", "3", "inf", "Smith and Smith", "Ava / Eva"]
    for found, gold in itertools.product(texts, repeat=2):
        exact, f1 = theirs.get_metrics(found, gold)
        ours = answers.drop_text(found), answers.drop_text(gold)
        assert (float(ours[0] == ours[1]), answers.drop_f1(*ours)) == (exact, pytest.approx(f1)), (
            found,
            gold,
        )


def grade(text, *gold, **fields):
    task = Task("t", read=lambda path, seed: [], **fields)
    return answers.grade(task, text, Question("?", gold))


def test_grade_takes_the_best_answer():
    assert grade(" 72 apples, #### 72", "71", "72", extract=answers.number) == ("72", {"exact": 1.0})
    found, scores = grade(" a red car ", "blue", "the red bus", normalise=answers.squad_text, metric="f1")
    assert found == "a red car"
    assert scores == {"exact": 0.0, "f1": pytest.approx(0.5)}
    assert grade("34 yards", "34", normalise=answers.drop_text, metric="drop_f1")[1] == {
        "exact": 0.0,
        "drop_f1": 0.67,
    }


def test_no_answer_is_wrong():
    assert grade("nothing", "5", extract=answers.number, metric="f1") == (None, {"exact": 0.0, "f1": 0.0})
    assert grade(" ", "!", normalise=answers.trivia_text, metric="f1")[1] == {"exact": 0.0, "f1": 0.0}


def test_answers_that_normalisation_would_empty_are_compared_as_they_are():
    def scores(text):
        return grade(text, "The The", normalise=answers.squad_text, metric="f1")[1]

    assert scores("the the") == {"exact": 1.0, "f1": 1.0}
    assert scores("a") == {"exact": 0.0, "f1": 0.0}
