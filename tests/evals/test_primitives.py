"""Reasoning primitives against samples of the papers, an independent solver and counts made by hand."""

import hashlib
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from depthgrow_jax.data import primitive_text
from depthgrow_jax.data.primitive_text import GROUPS, NAMES, examples
from depthgrow_jax.data.primitive_words import WORDS
from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.items import example
from depthgrow_jax.evals.primitives import PRIMITIVES, generate

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSIGNMENTS = [name for name in NAMES if name.startswith("assign")]
CHANCE = {name: 0.1 if name.startswith("copy") else 0.2 for name in NAMES}
# Chi-square, 0.1% tails by degrees of freedom (Abramowitz and Stegun, table 26.8).
CRITICAL = {4: 18.47, 9: 27.88}

COPY = """Fill in the blank:
jic dqy sof uzg ewr oxw osp tkj rvw mnu jic dqy sof uzg ewr ___. ->
Answer: oxw"""
BASIC = """Fill in blank:
o=23
k=3
t=13
a=1
e=9
o=___. ->
Answer: 23"""
CODE = """The following is a very short Python program. Use the program to resolve the value of the variable in the question.
Program:
n = 22
r = 16
c = 4
x = 9
i = 18

Question:
What is the value of n?
Answer: 22"""  # noqa: E501
MATH = """The following is a set of simple mathematical equations.

n=22
r=16
c=4
x=9
i=18
What is the numerical value of n?
Answer: 22"""


def rebuilt(sample: str, pattern: str, text: str) -> str:
    """`sample` with what `pattern` finds in it replaced by what it finds in `text`, one to one, in order."""
    old, new = re.findall(pattern, sample), re.findall(pattern, text)
    assert len(old) == len(new), text
    mapping = dict(zip(old, new, strict=True))
    return re.sub(pattern, lambda found: mapping[found[0]], sample)


@pytest.mark.parametrize("name", ["copy_random", "copy_real"])
def test_copying_reads_as_the_sample_of_the_paper(name):
    words = r"(?<![A-Za-z_])[a-z]+(?= )|(?<=Answer: )[a-z]+"
    header, body = COPY.split(":\n", 1)
    from_the_start = 0
    for item in generate(name, 500, 0):
        shown_header, shown = example(item).split(":\n", 1)
        assert shown_header == header
        listed = re.findall(words, shown)
        # The sample repeats the words from the first on; only such items can be compared as a whole.
        if listed[10] == listed[0]:
            from_the_start += 1
            assert rebuilt(body, words, shown) == shown
    assert from_the_start > 60


@pytest.mark.parametrize(("name", "sample"), [("basic", BASIC), ("code", CODE), ("math", MATH)])
def test_assignment_reads_as_the_samples(name, sample):
    first_asked = 0
    for item in generate(f"assign_{name}_0", 500, 0):
        text = example(item)
        # A letter that is a variable, or a number.
        pieces = r"\b[a-z](?= ?=)|(?<=value of )[a-z](?=\?)|\b[0-9]+"
        asked = re.findall(pieces, text)[10]
        if asked == re.findall(pieces, text)[0]:
            first_asked += 1
            assert rebuilt(sample, pieces, text) == text
    assert first_asked > 60


def test_aliases_follow_the_bases_line_by_line():
    """The layers of the paper's samples: v=k c=e s=o y=t r=a, and b=r h=c f=y x=s g=v."""
    letter, number = "[a-z]", "[0-9]+"
    for depth in (1, 2):
        equations = [f"{letter}={number}"] * 5 + [f"{letter}={letter}"] * 5 * depth
        lines = ["Fill in blank:", *equations, f"{letter}=___. ->", f"Answer: {number}"]
        for item in generate(f"assign_basic_{depth}", 100, 0):
            assert re.fullmatch("\n".join(lines), example(item))


def test_preschool_math_reads_as_documented():
    for item in generate("psm", 100, 0):
        assert re.fullmatch(
            r"Fill in blank:\n[a-z]=\d+\n[a-z]=\d+\n([a-z])=[a-z][+-][a-z]\n\1=___\. ->\nAnswer: \d+",
            example(item),
        )


def solve(prompt: str) -> str:
    """The answer, by reading the prompt alone."""
    if prompt.startswith("Fill in the blank:"):
        words = prompt.split("\n")[1].removesuffix(" ___. ->").split(" ")
        listed, repeated = words[:10], words[10:]
        starts = [i for i in range(6) if listed[i : i + 5] == repeated]
        assert len(starts) == 1 and len(repeated) == 5
        return listed[starts[0] + 5]
    values: dict[str, int] = {}
    for variable, right in re.findall(r"^([a-z]) ?= ?([a-z0-9+-]+)$", prompt, re.M):
        assert variable not in values
        values[variable] = eval(right, {}, values)  # refuses what is not defined before it
    (asked,) = re.findall(r"^([a-z])=___\. ->$|value of ([a-z])\?$", prompt, re.M)
    return str(values["".join(asked)])


@pytest.mark.parametrize("name", NAMES)
def test_the_solver_agrees(name):
    items = generate(name, 500, 3)
    assert len(items) == 500
    for item in items:
        assert item.choices[item.gold] == " " + solve(item.prompt)
        assert item.group == name and not item.shown and item.prompt.endswith("\nAnswer:")


@pytest.mark.parametrize("name", NAMES)
def test_candidates(name):
    """As many as the paper's chance level says, all in the question, none the beginning of another."""
    for item in generate(name, 500, 4):
        assert len(item.choices) * CHANCE[name] == 1
        for choice in item.choices:
            assert [other for other in item.choices if other.startswith(choice)] == [choice]
        texts = {choice[1:] for choice in item.choices}
        if name == "psm":
            numbers = sorted(map(int, texts))
            assert numbers == list(range(numbers[0], numbers[0] + 5)) and numbers[0] >= 1
        elif name.startswith("copy"):
            assert texts == set(item.prompt.split("\n")[1].split(" ")[:10])
        else:
            assert texts == set(re.findall(r"= ?([0-9]+)", item.prompt))
            assert all(1 <= int(text) <= 25 for text in texts)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_layers_of_aliases_map_one_to_one(name):
    depth = int(name[-1])
    for item in generate(name, 200, 5):
        equations = re.findall(r"^([a-z]) ?= ?([a-z0-9]+)$", item.prompt, re.M)
        assert len({variable for variable, _ in equations}) == len(equations) == 5 * (depth + 1)
        layers = [equations[i : i + 5] for i in range(0, len(equations), 5)]
        for above, layer in itertools.pairwise(layers):
            assert {target for _, target in layer} == {variable for variable, _ in above}
        (asked,) = re.findall(r"^([a-z])=___|value of ([a-z])\?", item.prompt, re.M)
        assert "".join(asked) in {variable for variable, _ in layers[-1]}


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("name", NAMES)
def test_the_place_of_the_answer_says_nothing(name):
    items = generate(name, 2000, 6)
    places = [item.gold for item in items]
    size = round(1 / CHANCE[name])
    assert chi_square([places.count(place) for place in range(size)]) < CRITICAL[size - 1]
    answers = [item.choices[item.gold][1:] for item in items]
    if name == "psm":
        ranks = [
            sorted(int(choice) for choice in item.choices).index(int(solve(item.prompt))) for item in items
        ]
    elif name.startswith("copy"):  # which of the five words that may follow
        listed = [item.prompt.split("\n")[1].split(" ") for item in items]
        ranks = [words.index(answer) - 5 for words, answer in zip(listed, answers, strict=True)]
    else:  # which of the five bases
        bases = [re.findall(r"= ?([0-9]+)", item.prompt) for item in items]
        ranks = [values.index(answer) for values, answer in zip(bases, answers, strict=True)]
    assert chi_square([ranks.count(rank) for rank in range(5)]) < CRITICAL[4]


@pytest.mark.parametrize("name", NAMES)
def test_items_are_a_function_of_seed_and_index(name):
    items = generate(name, 40, 7)
    assert items == generate(name, 40, 7) and items[:15] == generate(name, 15, 7)
    assert len({item.prompt for item in items}) == 40
    assert not {item.prompt for item in items} & {item.prompt for item in generate(name, 40, 8)}


def test_another_process_makes_the_same_items():
    """Whatever it salts its hashes with."""
    code = (
        "import hashlib; from depthgrow_jax.evals.primitives import generate, NAMES; "
        "print(hashlib.sha256(repr([generate(n, 20, 1) for n in NAMES]).encode()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = hashlib.sha256(repr([generate(name, 20, 1) for name in NAMES]).encode()).hexdigest()
    assert other.stdout.strip() == here


@pytest.fixture
def few_contents(monkeypatch):
    """So few letters and numbers that every seed meets the same contents again."""
    monkeypatch.setattr(primitive_text, "_LETTERS", "abcde")
    monkeypatch.setattr(primitive_text, "_LARGEST", 6)


def contents(names, seeds, split, count):
    """Those of each seed; generated texts are their contents with words around them."""
    found = []
    for seed in seeds:
        for name in names:
            stream = examples(name, seed, split)
            own = [next(stream).content for _ in range(count)]
            assert len(set(own)) == count  # no content twice in a list
            found.append(set(own))
    return found


@pytest.mark.parametrize("names", [("psm",), ("assign_basic_0", "assign_code_0", "assign_math_0")])
def test_splits_are_disjoint_for_all_seeds_and_forms(names, few_contents):
    train, test = contents(names, (0, 1, 2), "train", 700), contents(names, (0, 1, 2, 3), "test", 700)
    # Chance alone would not keep them apart: within a split, two lists do share contents.
    assert train[0] & train[1] and test[0] & test[1]
    assert not set.union(*train) & set.union(*test)


@pytest.mark.parametrize("name", NAMES)
def test_tasks_ask_one_split_and_show_the_other(name):
    train, test = (generate(name, 1000, 9, split) for split in ("train", "test"))
    assert not {item.prompt for item in train} & {item.prompt for item in test}
    task = PRIMITIVES[name]
    assert task.read(None, 9) == test and task.shots_read is not None and task.shots_read(None, 9) == train


def test_what_runs_out_says_so(monkeypatch):
    """Of the numbers 1 to 3 few results are 5 or more."""
    monkeypatch.setattr(primitive_text, "_LETTERS", "abc")
    monkeypatch.setattr(primitive_text, "_LARGEST", 3)
    with pytest.raises(
        UserError, match=r"^primitive='psm': has no more than about \d+ different examples$"
    ) as e:
        generate("psm", 1000, 0)
    # 2+3, 3+2, 3+3 with 6 orders of the letters, in 2 orders of the lines: 36, of which half are `test`.
    assert 5 <= int(re.findall(r"\d+", str(e.value))[0]) <= 31


def test_tasks_are_those_of_the_paper():
    assert GROUPS["primitives"] == (
        "copy_random",
        "copy_real",
        "assign_basic_0",
        "assign_code_0",
        "assign_math_0",
    )
    assert {*PRIMITIVES} == {*NAMES} and len(NAMES) == 12
    for name, task in PRIMITIVES.items():
        assert (task.name, task.shots, task.metric, task.separator) == (name, 5, "accuracy", "\n\n")
        assert len(task.read(None, 0)) == 1000


def test_words_are_words():
    assert len(set(WORDS)) == len(WORDS) > 300 and all(re.fullmatch("[a-z]+", word) for word in WORDS)
