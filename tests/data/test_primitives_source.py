"""Reasoning primitives as training text."""

import collections
import dataclasses
import itertools
import re

import pytest

from depthgrow_jax.data import DataConfig, SourceConfig, load, primitive_text, validate
from depthgrow_jax.data.sources import documents
from depthgrow_jax.data.splits import SPLITS

BASIC = SourceConfig(source="primitives", name="assign_basic_0", max_bytes=20_000)


def read(**changes) -> list[str]:
    return documents(dataclasses.replace(BASIC, **changes), "data.")


def solved(document: str) -> list[dict[str, str]]:
    """The equations, question and answer of every example of `assign_basic_0` in a document."""
    found = []
    for text in document.split("\n\n"):
        match = re.fullmatch(r"Fill in blank:\n((?:[a-z]=\d+\n){5})([a-z])=___\. ->\nAnswer: (\d+)", text)
        assert match, text
        values = dict(line.split("=") for line in match[1].splitlines())
        assert values[match[2]] == match[3]
        found.append({**values, "?": match[2]})
    return found


def test_documents_are_six_solved_examples_and_none_comes_twice():
    texts = read()
    # The last one is cut at the limit.
    assert sum(len(text.encode()) for text in texts) == 20_000
    examples = [solved(text) for text in texts[:-1]]
    assert len(examples) > 50 and {len(of_one) for of_one in examples} == {6}
    flat = [tuple(example.items())[:5] for of_one in examples for example in of_one]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize("depth", [0, 1])
def test_several_questions_about_the_same_assignment(depth):
    texts = read(name=f"assign_basic_{depth}", examples=1, questions=20, max_bytes=200_000)[:-1]
    asked = collections.Counter()
    for text in texts:
        head, *questions = re.split(r"\n(?=[a-z]=___)", text)
        lines = dict(line.split("=") for line in head.removeprefix("Fill in blank:\n").splitlines())
        assert len(lines) == 5 * (depth + 1) and len(questions) == 20
        for question in questions:
            variable, answer = re.fullmatch(r"([a-z])=___\. ->\nAnswer: (\d+)", question).groups()
            asked[list(lines).index(variable)] += 1
            while variable in lines:
                variable = lines[variable]
            assert answer == variable
    # The last five, equally often: 4 standard deviations.
    assert sorted(asked) == list(range(5 * depth, 5 * depth + 5))
    total = sum(asked.values())
    assert all(abs(n - total / 5) < 4 * (total * 0.2 * 0.8) ** 0.5 for n in asked.values())


def test_further_questions_of_the_other_forms():
    (code, *_), (math, *_) = (
        read(name=f"assign_{form}_0", examples=1, questions=2) for form in ("code", "math")
    )
    assert re.fullmatch(r"(?s).*\nQuestion:(\nWhat is the value of [a-z]\?\nAnswer: \d+){2}", code)
    assert re.fullmatch(r"(?s).*=\d+(\nWhat is the numerical value of [a-z]\?\nAnswer: \d+){2}", math)


def test_examples_of_a_document_and_questions_about_each():
    for text in read(examples=3, questions=2)[:-1]:
        parts = text.split("\n\n")
        # A question and its answer, twice.
        assert len(parts) == 3 and [part.count("___. ->\nAnswer: ") for part in parts] == [2, 2, 2]


def test_fine_tuning_on_few_examples():
    """An equal share of each primitive, one example a document; the fewer are among the more."""
    few = {"name": "assign_code_1,assign_code_2", "examples": 1, "max_bytes": 0}
    most = read(**few, max_documents=512)
    assert len(set(most)) == 512
    for text, depth in zip(most, itertools.cycle((1, 2))):
        values = dict(re.findall(r"^([a-z]) = (\w+)$", text, re.M))
        asked, answer = re.search(r"value of ([a-z])\?\nAnswer: (\d+)$", text).groups()
        while asked in values:
            asked = values[asked]
        assert answer == asked and len(values) == 5 * (depth + 1)
    for count in (64, 128, 256):
        assert read(**few, max_documents=count) == most[:count]
    assert not set(most) & set(read(**few, max_documents=512, seed=1))


def test_primitives_take_turns():
    texts = read(name="copy_real, assign_math_1,psm")[:-1]
    starts = [text.split("\n")[0] for text in texts]
    expected = [
        "Fill in the blank:",
        "The following is a set of simple mathematical equations.",
        "Fill in blank:",
    ]
    assert starts == list(itertools.islice(itertools.cycle(expected), len(starts))) and len(starts) > 12


def test_groups_stand_for_their_primitives():
    five = "copy_random,copy_real,assign_basic_0,assign_code_0,assign_math_0"
    assert read(name="primitives") == read(name=five)
    # As many headers as there are forms; two of the forms are asked in the same words.
    assert len({text.split("\n")[0] for text in read(name="all")[:-1]}) == 4


def test_seed_decides_the_text():
    assert read() == read() and read(seed=1) == read(seed=1)
    assert not {*read()[:-1]} & {*read(seed=1)[:-1]}


def test_text_is_of_the_training_split(monkeypatch):
    """So few letters and numbers that chance would repeat questions of the other split."""
    monkeypatch.setattr(primitive_text, "_LETTERS", "abcde")
    monkeypatch.setattr(primitive_text, "_LARGEST", 5)
    asked = {}
    for split in SPLITS:
        found = itertools.islice(primitive_text.examples("assign_basic_0", 5, split), 2000)
        asked[split] = {example.prompt.split(":\n")[1].split("___")[0][:-2] for example in found}
    seen = {
        "".join(f"{name}={value}\n" for name, value in example.items() if name != "?")
        for text in read(max_bytes=100_000)[:-1]
        for example in solved(text)
    }
    assert seen & asked["train"] and not seen & asked["test"]


def test_component_of_a_mixture(tmp_path):
    parts = (("easy", BASIC), ("hard", dataclasses.replace(BASIC, name="assign_basic_1", weight=0.5)))
    cfg = DataConfig(mixture=parts, tokenizer="bytes", validation_fraction=0.1, cache_dir=str(tmp_path))
    corpus = load(cfg, sequence_length=64, vocab_size=258)
    assert [(c.name, round(c.share, 3)) for c in corpus.components] == [("easy", 0.667), ("hard", 0.333)]
    assert corpus.stats["bytes"] == {"easy": 20_000, "hard": 20_000}
    other = dataclasses.replace(cfg, mixture=(parts[0], ("hard", dataclasses.replace(parts[1][1], seed=1))))
    assert load(other, sequence_length=64, vocab_size=258).data_hash != corpus.data_hash


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": ""}, "data.name='': must be one of primitives, all, copy_random"),
        ({"name": "psm,assign"}, "data.name='assign': must be one of primitives, all, copy_random"),
        ({"name": "primitives,copy_real"}, "data.name='primitives,copy_real': must name a primitive once"),
        ({"max_bytes": 0}, "data.max_bytes=0: primitives has no end: must be above 0, or max_documents"),
        ({"max_documents": -1}, "data.max_documents=-1: must be 0 (all) or at least 2"),
        ({"max_documents": 1}, "data.max_documents=1: must be 0 (all) or at least 2"),
        ({"examples": 0}, "data.examples=0: must lie between 1 and 1000"),
        ({"examples": 10**9}, "data.examples=1000000000: must lie between 1 and 1000"),
        ({"questions": 2}, "data.questions=2: must be 1 unless all primitives are named assign_*"),
        ({"questions": 0, "name": "assign_math_0"}, "data.questions=0: must lie between 1 and 1000"),
        ({"seed": -1}, "data.seed=-1: must be 0 or more"),
    ],
)
def test_bad_field_is_named(changes, expected, fails):
    fields = {"source": "primitives", "name": "psm", "max_bytes": 1000}
    validate(DataConfig(**fields))
    assert fails(validate, DataConfig(**(fields | changes))).startswith(expected)


def test_bad_field_of_a_component_is_named(fails):
    cfg = DataConfig(mixture=(("a", dataclasses.replace(BASIC, max_bytes=0)),))
    assert fails(validate, cfg).startswith("data.mixture.a.max_bytes=0: ")
