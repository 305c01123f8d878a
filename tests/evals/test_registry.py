"""Names of tasks, where their files are looked for, and generators of reasoning-gym (a stand-in for it)."""

import json
import re
import sys

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.evals import files
from depthgrow_jax.evals.items import Choice, Question
from depthgrow_jax.evals.registry import FILE_TASKS, GROUPS, TASKS, resolve


def names(tasks):
    return [task.name for task in tasks]


def test_every_task_goes_by_its_name():
    assert all(task.name == name for name, task in TASKS.items())
    assert not set(GROUPS) & set(TASKS)
    assert {name for members in GROUPS.values() for name in members} >= set(FILE_TASKS)


def test_file_tasks_say_where_they_come_from():
    for task in FILE_TASKS.values():
        assert task.path and task.source.startswith("https://") and task.licence != "none"
        assert (task.shots_read is None) == (not task.shots_path)
        assert "\n" not in task.source


def test_primitives_are_the_five_of_the_paper():
    assert names(resolve(["primitives"])) == [
        "copy_random",
        "copy_real",
        "assign_basic_0",
        "assign_code_0",
        "assign_math_0",
    ]


def test_resolve_keeps_order_and_drops_repetitions():
    found = names(resolve(["svamp", "copy_real", "math", "primitives"]))
    assert found[:3] == ["svamp", "copy_real", "gsm8k"]
    assert len(found) == len(set(found)) == len(GROUPS["math"]) + 5


def test_unknown_names_are_refused_with_the_legal_ones():
    with pytest.raises(UserError) as error:
        resolve(["lambada", "hellaswag"])
    message = str(error.value)
    assert "tasks='hellaswag'" in message and "\n" not in message
    assert all(name in message for name in ("primitives", "lambada", "psm", "reasoning_gym:NAME"))
    with pytest.raises(UserError, match="names no task"):
        resolve([])


RECORD = json.dumps({"query": "Q, because", "choices": ["a", "b"], "gold": 1})


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.delenv("DEPTHGROW_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(directory):
    (directory / "foundry").mkdir(parents=True)
    (directory / "foundry" / "copa.jsonl").write_text(RECORD)
    return directory


def test_files_are_found_in_the_configured_directory(root, monkeypatch):
    (root / "other").mkdir()
    monkeypatch.setenv("DEPTHGROW_DATA", str(root / "other"))
    where = put(root / "data")
    assert files.read(FILE_TASKS["copa"], str(where)) == [Choice("Q, because", (" a", " b"), 1)]


@pytest.mark.parametrize("below", ["data", "data/evals"])
def test_files_are_found_below_the_environments_directory(root, monkeypatch, below):
    put(root / below)
    monkeypatch.setenv("DEPTHGROW_DATA", str(root / "data"))
    assert len(files.read(FILE_TASKS["copa"])) == 1


def test_a_configured_directory_is_the_only_one(root, monkeypatch):
    monkeypatch.setenv("DEPTHGROW_DATA", str(put(root / "data")))
    (root / "other").mkdir()
    with pytest.raises(UserError, match=r"other/foundry/copa\.jsonl"):
        files.read(FILE_TASKS["copa"], str(root / "other"))


def test_a_missing_file_says_what_to_download_and_where_to_put_it(root, monkeypatch):
    with pytest.raises(UserError) as error:
        files.read(FILE_TASKS["gsm8k"])
    message = str(error.value)
    assert message.startswith("gsm8k/test.jsonl: no such evaluation file") and "\n" not in message
    assert "https://github.com/openai/grade-school-math" in message
    assert "DIR/gsm8k/test.jsonl" in message and "DEPTHGROW_DATA" in message
    monkeypatch.setenv("DEPTHGROW_DATA", str(root))
    with pytest.raises(UserError, match=f"put it at {root}/gsm8k/test.jsonl"):
        files.read(FILE_TASKS["gsm8k"])


def test_examples_come_from_their_own_file(root):
    (root / "gsm8k").mkdir()
    for split, number in (("test", 1), ("train", 2)):
        record = {"question": "Q", "answer": f"#### {number}"}
        (root / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(record))
    task = FILE_TASKS["gsm8k"]
    (item,), examples = files.read(task, str(root)), files.read_examples(task, str(root))
    assert isinstance(item, Question) and item.answers == ("1",)
    assert examples and isinstance(examples[0], Question) and examples[0].answers == ("2",)
    assert files.read_examples(FILE_TASKS["svamp"], str(root)) is None


def test_generated_tasks_need_no_file(root):
    assert len(files.read(TASKS["copy_random"], seed=3)) == 1000


@pytest.mark.usefixtures("gym")
def test_a_generator_is_a_task():
    (task,) = resolve(["reasoning_gym:sums"])
    items = task.read(None, 0)
    assert (task.name, len(items)) == ("reasoning_gym:sums", 500)
    a = re.fullmatch(r"Question: (\d+) \+ 1 = \?\nAnswer:", items[0].prompt)[1]
    answer = str(int(a) + 1)
    assert items[0] == Question(items[0].prompt, (answer,), shown=f"{items[0].prompt} {answer}")


@pytest.mark.usefixtures("gym")
def test_examples_of_a_generator_are_never_asked():
    for name, different in (("sums", 500), ("few", 20)):
        (task,) = resolve([f"reasoning_gym:{name}"])
        asked = {item.prompt for item in task.read(None, 0)}
        shown = {item.prompt for seed in (0, 1) for item in task.shots_read(None, seed)}
        assert len(asked) + len(shown) >= different and not asked & shown


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"reasoning_gym:sums: needs the package reasoning-gym \(pip install"):
        resolve(["reasoning_gym:sums"])
