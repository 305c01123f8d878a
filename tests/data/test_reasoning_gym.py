"""Questions of reasoning-gym (a stand-in for it) as training text, and what is never trained on."""

import itertools

import pytest

from depthgrow_jax.data import SourceConfig, reasoning_gym
from depthgrow_jax.data.config import DataConfig, validate
from depthgrow_jax.data.sources import documents
from depthgrow_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("gym")


def found(name="sums", seed=0, split="train", count=300):
    return list(itertools.islice(reasoning_gym.questions(name, seed, split, "field"), count))


def read(**changes):
    fields = {"source": "reasoning_gym", "name": "sums", "max_bytes": 5000}
    return documents(SourceConfig(**(fields | changes)), "data.")


def test_questions_are_those_of_the_generator():
    for solved in found():
        a = int(solved.prompt.removeprefix("Question: ").removesuffix(" + 1 = ?\nAnswer:"))
        assert solved.answer == str(a + 1) and solved.text == f"{solved.prompt} {a + 1}"


def test_splits_and_seeds_share_nothing():
    sets = [set(found(seed=seed, split=split)) for seed in (0, 1, 4095) for split in ("train", "test")]
    assert len(set.union(*sets)) == 6 * 300
    # Twenty questions: every seed meets all of them, and deals them out in the same way.
    train, test = ({set_of for seed in (0, 7) for set_of in found("few", seed, s)} for s in ("train", "test"))
    assert len(train) + len(test) == 20 and not train & test


def test_a_generator_of_few_questions_ends():
    assert len(found("few", split="train")) + len(found("few", split="test")) == 20


def test_documents():
    texts = read()
    assert sum(len(text.encode()) for text in texts) == 5000
    assert texts[:-1] == [solved.text for solved in found()][: len(texts) - 1]
    assert read() == texts and read(seed=1)[0] != texts[0]


def test_what_cannot_be_read(fails):
    unknown = fails(read, name="none")
    assert unknown.startswith("data.name='none': ") and unknown.endswith("names: empty, few, sums")
    assert "has answer=None: must be a text" in fails(read, name="empty")
    assert "seed=4096: must be from 0 to 4095" in fails(read, seed=4096)
    for changes, message in (
        ({"name": "", "max_bytes": 9}, "data.name=''"),
        ({"name": "sums"}, "data.max_bytes=0"),
    ):
        with pytest.raises(UserError, match=message):
            validate(DataConfig(source="reasoning_gym", **changes))
