"""Tiny files of each upstream schema, and the items they must become, character for character."""

import gzip
import json
from typing import Any

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.evals import readers
from depthgrow_jax.evals.items import Choice, Completion, Question, Substitution, example
from depthgrow_jax.evals.registry import FILE_TASKS


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def file(tmp_path):
    def write(text, name="file.jsonl"):
        path = tmp_path / name
        data = text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def read(task, path) -> list[Any]:
    return list(FILE_TASKS[task].read(path, 0))


def test_language_modelling(file):
    path = file(lines({"context": "I don't care about", "continuation": "signs"}))
    assert read("lambada", path) == [Completion("I don't care about", " signs")]


def test_half_a_character_is_refused_and_a_whole_one_read(file):
    path = file('{"context": "a \\ud83d\\ude00 face", "continuation": "b"}\n')
    assert read("lambada", path) == [Completion("a \U0001f600 face", " b")]
    path = file('{"context": "a", "continuation": "b"}\n{"context": "a \\ud83d face", "continuation": "b"}\n')
    with pytest.raises(UserError, match=r"file.jsonl:2: holds half of a surrogate pair \(\\ud800 to"):
        read("lambada", path)


def test_arithmetic_has_the_spaces_of_its_file(file):
    path = file(lines({"context": "25-759=", "continuation": "-734"}))
    assert read("simple_arithmetic_nospaces", path) == [Completion("25-759=", "-734")]
    path = file(lines({"context": "25 - 759 =", "continuation": " -734"}))
    assert read("simple_arithmetic_withspaces", path) == [Completion("25 - 759 =", " -734")]


@pytest.mark.parametrize(
    ("task", "query", "prompt"),
    [
        ("openbook_qa", "It is warm because", "It is warm because"),
        ("arc_easy", "Question: What burns?", "Question: What burns?\nAnswer:"),
        ("piqa", "Question: How to mix?\n", "Question: How to mix?\nAnswer:"),
        ("math_qa", "Question: 1 + 1 ?\nA. 3\nB. 2\nAnswer: ", "Question: 1 + 1 ?\nA. 3\nB. 2\nAnswer:"),
    ],
)
def test_multiple_choice(file, task, query, prompt):
    path = file(lines({"query": query, "choices": ["wood", "stone", "{ice}"], "gold": 1}))
    (item,) = read(task, path)
    assert item == Choice(prompt, (" wood", " stone", " {ice}"), 1)
    assert example(item) == prompt + " stone"


def test_winogrande_asks_for_what_follows(file):
    record = {"context_options": ["She told Ann that Ann", "She told Ann that she"], "gold": 1}
    (item,) = read("winogrande", file(lines(record | {"continuation": "was late."})))
    assert item == Substitution(("She told Ann that Ann", "She told Ann that she"), " was late.", 1)
    assert example(item) == "She told Ann that she was late."


def test_questions_take_every_alias_once(file):
    record = {"context": "Question: Who?\nAnswer:", "answer": "Ann", "aliases": ["Anna", "Ann"]}
    (item,) = read("triviaqa", file(lines(record)))
    assert (item.prompt, item.answers) == ("Question: Who?\nAnswer:", ("Ann", "Anna"))
    assert example(item) == "Question: Who?\nAnswer: Ann"


def test_quac_ends_with_the_last_question(file):
    context = "Title: A\n\nContext: B CANNOTANSWER\n\nQuestion: C?\nAnswer: D\n\nQuestion: E?"
    (item,) = read("quac", file(lines({"context": context, "answer": "F", "aliases": []})))
    assert item.prompt == context + "\nAnswer:"


def test_gsm8k(file):
    solution = "She has 1000*2=<<1000*2=2000>>2000.\n#### 2,000"
    (item,) = read("gsm8k", file(lines({"question": "How many?", "answer": solution})))
    prompt = "Question: How many?\nAnswer:"
    assert item == Question(prompt, ("2000",), "", f"{prompt} {solution}")


def test_aqua_shows_its_solution(file):
    record = {"context": "How long?", "answer": " 36 minutes", "chain_of_thought": "It is 6 * 6."}
    (item,) = read("aqua", file(lines(record)))
    assert item.answers == ("36 minutes",)
    assert example(item) == "Question: How long?\nAnswer: It is 6 * 6.\nThe final answer is 36 minutes"


def test_svamp(file):
    record = {"ID": "chal-1", "Body": "A pack costs 76 dollars. If 25 are off", "Question": "How much is it?"}
    record |= {"Equation": "( 76.0 - 25.0 )", "Answer": 51.0, "Type": "Common-Divison"}
    (item,) = read("svamp", file(json.dumps([record]), "SVAMP.json"))
    assert example(item) == "Question: A pack costs 76 dollars. If 25 are off How much is it?\nAnswer: 51"
    assert (item.answers, item.group) == (("51",), "Common-Division")


def test_drop_takes_the_answers_of_all_annotators(file):
    record = {
        "context": "Passage: P\nQuestion: Q?\nAnswer:",
        "completion": "  2",
        "ref_text": "  2|two yards",
    }
    (item,) = read("drop", file(lines(record), "drop.jsonl.gz"))
    assert item.answers == ("2", "two yards")
    assert example(item) == "Passage: P\nQuestion: Q?\nAnswer: 2"


def logic(options, answer):
    return {
        "id": "1",
        "context": "Bob is cold.",
        "question": "Is it true?",
        "options": options,
        "answer": answer,
    }


def test_options_are_scored_as_texts(file):
    path = file(json.dumps([logic(["A) True", "B) False", "C) Unknown"], "C")]), "a.json")
    assert read("proofwriter", path) == [
        Choice("Bob is cold.\nIs it true?\nAnswer:", (" True", " False", " Unknown"), 2)
    ]


def test_different_numbers_of_options_are_groups(file):
    records = [logic(["A) x", "B) y"], "A"), logic(["A) x", "B) y", "C) z"], "B")]
    items = read("logical_deduction", file(json.dumps(records), "a.json"))
    assert [item.group for item in items] == ["2 options", "3 options"]


def test_entailment(file):
    items = read("entailment_exam", file("(p>q),(~(q)>~(p)),1,0,0,0\n(p|q),p,0,1,1,1", "a.txt"))
    assert items == [
        Choice("(p>q) entails (~(q)>~(p))\nAnswer:", (" no", " yes"), 1),
        Choice("(p|q) entails p\nAnswer:", (" no", " yes"), 0),
    ]


GOOD = lines({"query": "Q", "choices": ["a", "b"], "gold": 0})


@pytest.mark.parametrize(
    ("task", "text", "name", "place", "what"),
    [
        ("copa", GOOD + "{", "f.jsonl", "f.jsonl:2", "not JSON"),
        ("copa", "\n" + GOOD + "[1]", "f.jsonl", "f.jsonl:3", "must be a JSON object"),
        ("copa", GOOD.replace('"gold"', '"label"'), "f.jsonl", "f.jsonl:1", "has no gold; it has query"),
        ("copa", GOOD.replace("0", "2"), "f.jsonl", "f.jsonl:1", "gold=2: must be an integer from 0 to 1"),
        ("copa", GOOD.replace("0", "-1"), "f.jsonl", "f.jsonl:1", "gold=-1"),
        ("copa", GOOD.replace("0", "true"), "f.jsonl", "f.jsonl:1", "gold=True"),
        ("copa", GOOD.replace('"Q"', '" "'), "f.jsonl", "f.jsonl:1", "query=' ': must be a text, not empty"),
        ("copa", GOOD.replace('"b"', '""'), "f.jsonl", "f.jsonl:1", "none empty"),
        ("copa", GOOD.replace(', "b"', ""), "f.jsonl", "f.jsonl:1", "a list of at least 2"),
        ("copa", "\n\n", "f.jsonl", "f.jsonl", "holds no record"),
        ("gsm8k", lines({"question": "Q", "answer": "72"}), "f.jsonl", "f.jsonl:1", "must end with '#### '"),
        ("drop", lines({"context": "P", "ref_text": "2||3"}), "f.jsonl", "f.jsonl:1", "no empty answer"),
        ("folio", json.dumps([logic(["A) x", "C) y"], "A")]), "f.json", "f.json: record 1", "in this order"),
        ("folio", json.dumps([logic(["A) x", "B) y"], "C")]), "f.json", "f.json: record 1", "answer='C'"),
        ("folio", "{}", "f.json", "f.json", "must be a list"),
        ("svamp", '[{"Answer": "many"}]', "f.json", "f.json: record 1", "Answer='many': must be a number"),
        ("entailment_easy", "p,q,1,0,0,0\np,q,1", "f.txt", "f.txt:2", "A,B,entails,h1,h2,h3"),
        ("entailment_easy", "p,q,2,0,0,0", "f.txt", "f.txt:1", "entails='2': must be 0 or 1"),
    ],
)
def test_what_is_wrong_with_a_record_is_said_in_one_line(file, task, text, name, place, what):
    with pytest.raises(UserError) as error:
        read(task, file(text, name))
    message = str(error.value)
    assert f"/{place}: " in message and what in message and "\n" not in message


def test_long_values_are_cut(file):
    with pytest.raises(UserError, match=r"\.\.\.: must be") as error:
        read("copa", file(lines({"query": "Q", "choices": ["a", "b"], "gold": "z" * 1000})))
    assert len(str(error.value).partition(": ")[2]) < 150


def test_files_that_cannot_be_read(tmp_path):
    broken = tmp_path / "f.jsonl.gz"
    broken.write_bytes(gzip.compress(GOOD.encode() * 100)[:-20])
    with pytest.raises(UserError, match=r"f\.jsonl\.gz: cannot be read"):
        read("copa", broken)
    (tmp_path / "f.jsonl").write_bytes(GOOD.encode() + b"\xff\n")
    with pytest.raises(UserError, match=r"f\.jsonl:2: not UTF-8"):
        read("copa", tmp_path / "f.jsonl")


def test_a_line_separator_inside_a_text_does_not_end_a_record(file):
    path = file(GOOD.replace("Q", "first\u2028second"))
    assert readers.choices()(path, 0)[0] == Choice("first\u2028second", (" a", " b"), 0)
