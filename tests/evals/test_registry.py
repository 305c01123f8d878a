"""Names of tasks, where their files are looked for, and generators of reasoning-gym (a stand-in for it)."""

import json
import sys
import types

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.evals import files, reasoning_gym
from depthgrow_jax.evals.items import Choice, Question, example
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


class Sums:
    """Item i of seed s is drawn from s + i, as in reasoning-gym."""

    def __init__(self, name, size, seed):
        if name not in ("sums", "few", "empty"):
            raise ValueError(f"Dataset '{name}' not registered")
        self.name, self.size, self.seed = name, size, seed
        self.different = 3 if name == "few" else 10**12

    def __iter__(self):
        for index in range(self.size):
            a = (self.seed + index) % self.different
            answer = None if self.name == "empty" else str(a + 1)
            yield {"question": f" {a} + 1 = ?\n", "answer": answer, "metadata": {}}


@pytest.fixture
def gym(monkeypatch):
    module = types.ModuleType("reasoning_gym")
    registered = types.SimpleNamespace(DATASETS={"sums": None, "few": None, "empty": None})
    module.__dict__.update(create_dataset=Sums, factory=registered)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


@pytest.mark.usefixtures("gym")
def test_a_generator_is_a_task():
    (task,) = resolve(["reasoning_gym:sums"])
    items = task.read(None, 0)
    assert (task.name, len(items)) == ("reasoning_gym:sums", 500)
    prompt = "Question: 7 + 1 = ?\nAnswer:"
    assert items[7] == Question(prompt, ("8",), shown=prompt + " 8")


@pytest.mark.usefixtures("gym")
def test_seeds_and_splits_of_a_generator_share_nothing():
    (task,) = resolve(["reasoning_gym:sums"])
    assert task.shots_read is not None
    items = [read(None, seed) for seed in (0, 1, 2047) for read in (task.read, task.shots_read)]
    assert len({example(item) for part in items for item in part}) == 6 * 500
    with pytest.raises(UserError, match="seed=2048: must be from 0 to 2047"):
        task.read(None, 2048)


@pytest.mark.usefixtures("gym")
def test_documents_of_a_generator():
    texts = reasoning_gym.documents("sums", 20, seed=0)
    assert len(set(texts)) == 20 and texts[0] == f"Question: {2**31} + 1 = ?\nAnswer: {2**31 + 1}"
    assert len(reasoning_gym.documents("few", 3, seed=0)) == 3
    with pytest.raises(UserError, match="count=4: finds only 3 different questions"):
        reasoning_gym.documents("few", 4, seed=0)
    held_out = {"Question: 0 + 1 = ?\nAnswer:"}
    assert all("0 + 1" not in text for text in reasoning_gym.documents("few", 2, 0, held_out))


@pytest.mark.usefixtures("gym")
def test_generators_that_cannot_be_used():
    with pytest.raises(UserError, match=r"reasoning_gym:none: .*not registered; names: empty, few, sums"):
        resolve(["reasoning_gym:none"])
    (task,) = resolve(["reasoning_gym:empty"])
    with pytest.raises(UserError, match="item 0 has answer=None"):
        task.read(None, 0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"reasoning_gym:sums: needs the package reasoning-gym \(pip install"):
        resolve(["reasoning_gym:sums"])
