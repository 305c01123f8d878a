"""The published files, read whole: set DEPTHGROW_EVALS_TEST_DATA to their directory."""

import ast
import itertools
import json
import operator
import os
import pathlib
import re

import numpy as np
import pytest

from depthgrow_jax.evals import answers, files
from depthgrow_jax.evals.items import Choice, Completion, Question, Substitution, example
from depthgrow_jax.evals.registry import FILE_TASKS

# As their owners count them.
COUNTS = {
    "lambada": 5153,
    "openbook_qa": 500,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "piqa": 1838,
    "copa": 100,
    "winogrande": 1267,
    "commonsense_qa": 1221,
    "bigbench_strategy_qa": 2289,
    "bigbench_qa_wikidata": 20321,
    "triviaqa": 3000,
    "natural_questions_closed": 824,
    "boolq": 3270,
    "drop": 9536,
    "quac": 1000,
    "natural_questions_open": 824,
    "gsm8k": 1319,
    "svamp": 1000,
    "svamp_300": 300,
    "aqua": 245,
    "math_qa": 2983,
    "simple_arithmetic_nospaces": 1000,
    "simple_arithmetic_withspaces": 1000,
    "proofwriter": 600,
    "prontoqa": 500,
    "logical_deduction": 300,
    "folio": 204,
    "entailment_easy": 5000,
    "entailment_hard": 5000,
    "entailment_big": 1696,
    "entailment_massive": 2230,
    "entailment_exam": 100,
    "bigbench_logical_deduction": 1500,
    "bigbench_dyck_languages": 1000,
    "bigbench_cs_algorithms": 1320,
    "bigbench_operators": 210,
    "bigbench_repeat_copy_logic": 32,
}
EXAMPLES = {"gsm8k": 7473, "proofwriter": 3000, "logical_deduction": 1200, "folio": 1004} | {
    name: 5000 for name in COUNTS if name.startswith("entailment")
}
# Items that offer a text twice, never the right one.
REPEATED = {"arc_easy": 7, "arc_challenge": 4, "bigbench_logical_deduction": 300}


@pytest.fixture(scope="module")
def data():
    root = os.environ.get("DEPTHGROW_EVALS_TEST_DATA")
    if not root:
        pytest.skip("DEPTHGROW_EVALS_TEST_DATA does not name a directory of the published files")
    return root


def test_every_file_task_is_counted():
    assert set(COUNTS) == set(FILE_TASKS)


@pytest.mark.parametrize("name", COUNTS)
def test_a_file_is_read_whole(data, name):
    task = FILE_TASKS[name]
    items = files.read(task, data)
    assert len(items) == COUNTS[name]
    pool = files.read_examples(task, data)
    assert (len(pool) if pool else None) == EXAMPLES.get(name)
    repeated = 0
    for item in [*items, *(pool or ())]:
        assert example(item) == example(item).strip()
        if isinstance(item, Choice):
            texts = [item.prompt, *item.choices]
            assert 0 <= item.gold < len(item.choices) >= 2
            assert item.choices.count(item.choices[item.gold]) == 1
            repeated += len(set(item.choices)) < len(item.choices)
        elif isinstance(item, Substitution):
            texts = [*item.prompts, item.target]
            assert 0 <= item.gold < len(set(item.prompts)) == 2
        elif isinstance(item, Completion):
            texts = [item.prompt, item.target]
        else:
            texts = [item.prompt, *item.answers]
            # A gold answer, generated as examples show it, is found and right.
            assert item.shown.startswith(item.prompt)
            _, scores = answers.grade(task, item.shown.removeprefix(item.prompt), item)
            assert scores["exact"] == 1.0 and scores.get(task.metric) == 1.0
        assert all(text.strip() for text in texts)
    assert repeated == REPEATED.get(name, 0)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gold_solution_of_gsm8k_gives_its_answer(data, split):
    path = pathlib.Path(data, "gsm8k", f"{split}.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        # Upstream: after the mark, without commas.
        gold = record["answer"].split("#### ")[1].replace(",", "")
        assert answers.number(record["answer"]) == gold
        assert answers.number(record["answer"].replace("####", "The final answer is")) == gold


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(text):
    def visit(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](visit(node.left), visit(node.right))
        return ast.literal_eval(node)

    return visit(ast.parse(text.strip(), mode="eval").body)


@pytest.mark.parametrize("name", ["simple_arithmetic_nospaces", "simple_arithmetic_withspaces"])
def test_sums_are_right(data, name):
    for item in files.read(FILE_TASKS[name], data):
        assert isinstance(item, Completion)
        assert value(item.prompt.removesuffix("=")) == int(item.target)


def test_equations_of_svamp_give_its_answers(data):
    items = files.read(FILE_TASKS["svamp"], data)
    records = json.loads(pathlib.Path(data, "mwp/SVAMP.json").read_text())
    for item, record in zip(items, records, strict=True):
        assert isinstance(item, Question)
        right = value(record["Equation"]) == float(item.answers[0])
        assert right == (record["ID"] != "chal-680")  # 4 - 2 + 3 is 1 there


def entails(a, b):
    """By truth table: Python's operators on arrays of truth values, `>` rewritten into `<=` of 0 and 1."""
    variables = sorted(set(re.findall("[a-z]", a + b)))
    table = np.array(list(itertools.product([False, True], repeat=len(variables)))).T
    rows = dict(zip(variables, table, strict=True))
    truth_a, truth_b = (eval(text.replace(">", "<="), {}, rows) for text in (a, b))
    return not np.any(truth_a & ~truth_b)


@pytest.mark.parametrize("name", ["entailment_exam", "entailment_easy"])
def test_entailments_hold(data, name):
    for item in files.read(FILE_TASKS[name], data)[:1000]:
        assert isinstance(item, Choice)
        a, b = item.prompt.removesuffix("\nAnswer:").split(" entails ")
        assert item.choices[item.gold] == (" yes" if entails(a, b) else " no")


def test_brackets_close(data):
    pairs = {"(": ")", "[": "]", "{": "}", "<": ">"}
    for item in files.read(FILE_TASKS["bigbench_dyck_languages"], data):
        assert isinstance(item, Completion)
        open_ones = []
        for bracket in item.prompt.partition("Input:")[2].removesuffix("\nOutput:").split():
            if bracket in pairs:
                open_ones.append(pairs[bracket])
            else:
                assert open_ones.pop() == bracket
        assert item.target.split() == open_ones[::-1]
