"""A task asked of a network: prompts, boundaries, chance, sweeps and exits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import forward

from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.data.tokenizer import BytesTokenizer, SubwordTokenizer, train_bpe
from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.config import EvalConfig, validate
from depthgrow_jax.evals.interventions import repeat, sweeps
from depthgrow_jax.evals.items import Choice, Completion, Question, Substitution
from depthgrow_jax.evals.outcomes import Outcome, outcome_of
from depthgrow_jax.evals.prompting import Encoder, few_shot
from depthgrow_jax.evals.running import (
    ask,
    compared,
    outcomes,
    outcomes_by_exit,
    outcomes_by_program,
    summarise,
)
from depthgrow_jax.evals.scoring import Likelihood
from depthgrow_jax.evals.task import Task
from depthgrow_jax.model import ModelConfig, init, layer_program, reorder
from depthgrow_jax.probes.inputs import Subject

BYTES = BytesTokenizer(DataConfig().separator, DataConfig().mask_token)
ENCODER = Encoder(BYTES, (256,), 257, 64)
CFG = ModelConfig(vocab_size=258, width=16, heads=2, mlp_dim=24)
ITEMS = [
    Choice("2+2=", (" 4", " 22", " 5 "), 0, group="sum"),
    Choice("the sky is", (" blue", " green"), 0, group="sky"),
    Completion("to be or not to", " be", group="sum"),
    Substitution(("The cup", "The table, which was brown,"), " fell off it", 1, group="sky"),
]


def task_of(**fields):
    return Task("toy", lambda path, seed: ITEMS, **fields)


def subject_of(seed=0, depth=2):
    params = init(CFG, jax.random.key(seed), depth)
    # Larger than at initialisation, so that predictions differ.
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    return Subject(CFG, params, layer_program(CFG, depth))


def uniform():
    subject = subject_of()
    params = {**subject.params, "embed": jax.tree.map(jnp.zeros_like, subject.params["embed"])}
    return subject._replace(params=params)


def log_prob(subject, prompt, continuation):
    """From one pass of the float64 network over the bytes."""
    ids = [256, *prompt.encode(), *continuation.encode()]
    logits = forward(CFG, subject.params, np.array([ids])).logits[0]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    first = len(ids) - len(continuation.encode())
    return sum(logits[i - 1, ids[i]] for i in range(first, len(ids)))


def nothing_written(subject, task, prompts):
    raise AssertionError("no question was asked")


def test_scores_by_hand():
    subject = subject_of()
    asked = ask(task_of(), ITEMS, None, ENCODER, shots=0)
    found = outcomes(asked, subject, nothing_written)
    for item, outcome in zip(ITEMS, found, strict=True):
        if isinstance(item, Choice):
            want = [log_prob(subject, item.prompt, c) for c in item.choices]
            norm = [w / len(c.strip()) for w, c in zip(want, item.choices, strict=True)]
            assert outcome.scores["accuracy"] == float(np.argmax(want) == item.gold)
            assert outcome.scores["accuracy_norm"] == float(np.argmax(norm) == item.gold)
            assert outcome.prediction == item.choices[int(np.argmax(want))]
            assert outcome.scores["log_prob"] == pytest.approx(want[item.gold], abs=1e-3)
        elif isinstance(item, Substitution):
            want = [log_prob(subject, prompt, item.target) for prompt in item.prompts]
            assert outcome.scores["accuracy"] == float(np.argmax(want) == 1)
        else:
            assert outcome.scores["log_prob"] == pytest.approx(
                log_prob(subject, item.prompt, item.target), abs=1e-3
            )


def test_a_model_without_preference_is_at_chance():
    same = [Choice("q", (" a", " b", " c", " d"), gold) for gold in range(4)]
    asked = ask(task_of(), same, None, ENCODER, shots=0)
    summary = summarise(asked, outcomes(asked, uniform(), nothing_written))
    assert summary["metrics"]["accuracy"]["mean"] == summary["chance"] == 0.25
    (found,) = outcomes(ask(task_of(), ITEMS[2:3], None, ENCODER, shots=0), uniform(), nothing_written)
    assert found.scores["log_prob"] == pytest.approx(-3 * np.log(258), abs=1e-4)


def test_groups_and_json():
    asked = ask(task_of(), ITEMS[:2], None, ENCODER, shots=0)
    found = outcomes(asked, subject_of(), nothing_written)
    summary = summarise(asked, found)
    assert set(summary["groups"]) == {"sum", "sky"}
    for outcome, group in zip(found, ("sum", "sky"), strict=True):
        alone = summary["groups"][group]["metrics"]["accuracy"]
        assert (alone["mean"], alone["n"], alone["low"]) == (outcome.scores["accuracy"], 1, None)
    assert summary["chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    one = ask(task_of(), ITEMS[2:3], None, ENCODER, shots=0)
    summary = summarise(one, outcomes(one, subject_of(), nothing_written))
    assert summary["chance"] is None and summary["metrics"]["perplexity"]["mean"] > 1
    hopeless = summarise(one, [Outcome({"accuracy": 0.0, "log_prob": -800.0}, "")])
    assert hopeless["metrics"]["perplexity"]["mean"] is None  # JSON has no infinity


def test_questions_are_written_extracted_and_compared():
    items = [Question("1+1=", ("2",)), Question("3+4=", ("7", "seven"))]
    task = task_of(extract=lambda text: text.split("#")[-1] or None, metric="exact", max_tokens=8)
    seen = []

    def write(subject, asked_task, prompts):
        seen.extend(prompts)
        return ["it is #2", "#9"]

    asked = ask(task, items, None, ENCODER, shots=0)
    found = outcomes(asked, subject_of(), write)
    assert [o.scores["exact"] for o in found] == [1.0, 0.0] and found[1].prediction == "9"
    assert seen == [(256, *b"1+1="), (256, *b"3+4=")]
    with pytest.raises(UserError, match="toy: generates its answers"):
        outcomes_by_exit(asked, subject_of())


def test_sweeps_and_exits_are_the_networks_they_name():
    subject = subject_of(depth=3)
    asked = ask(task_of(), ITEMS, None, ENCODER, shots=1)
    orders = [[1, 0, 2], [0, 2, 1]]
    programs = [reorder(subject.program, order) for order in orders]
    by_program = outcomes_by_program(asked, subject, programs, nothing_written)
    for program, found in zip(programs, by_program, strict=True):
        alone = outcomes(asked, subject._replace(program=program), nothing_written)
        for a, b in zip(found, alone, strict=True):
            assert a.scores["log_prob"] == pytest.approx(b.scores["log_prob"], abs=1e-4)
    by_exit = outcomes_by_exit(asked, subject)
    assert len(by_exit) == 4
    shallow = subject._replace(program=reorder(subject.program, [0, 1]))
    for a, b in zip(by_exit[2], outcomes(asked, shallow, nothing_written), strict=True):
        assert a.scores["log_prob"] == pytest.approx(b.scores["log_prob"], abs=1e-4)


def test_examples_before_an_item():
    items = [Choice(f"q{i}", (" a", " b"), i % 2) for i in range(6)]
    shown = few_shot(items, None, 2, "\n", seed=0)
    for index, text in enumerate(shown):
        assert text.count("\n") == 2 and f"q{index}" not in text
    assert len(set(shown)) <= 4  # the usual one, and one for each item that is an example
    pool = [Choice(f"p{i}", (" a", " b"), 0) for i in range(3)]
    (same,) = set(few_shot(items, pool, 3, "\n\n", seed=1))
    assert sorted(same.split("\n\n")) == ["", "p0 a", "p1 a", "p2 a"]
    assert few_shot(items, None, 0, "\n", 0) == [""] * 6
    with pytest.raises(
        UserError, match=r"eval.shots=6: there are \d items to take examples from; legal: 0 to 5"
    ):
        few_shot(items, None, 6, "\n", 0)


def test_where_a_continuation_begins():
    """A token that spans the border belongs to the continuation."""
    backend = train_bpe(["abab abab cdcd"] * 50, 270, ("<s>", "<m>"))
    tokenizer = SubwordTokenizer(backend, 270, 0, 1, "x")
    encoder = Encoder(tokenizer, (0,), 1, 64)
    context, continuation, cut = next(encoder.requests([("aba", "b cdcd")]))
    assert cut == 0
    whole = (0, *tokenizer.encode("abab cdcd"))
    alone = (0, *tokenizer.encode("aba"))
    assert context + continuation == whole and whole[: len(alone)] != alone
    assert alone[: len(context)] == context
    assert next(encoder.requests([("", "abab")])) == ((0,), tuple(tokenizer.encode("abab")), 0)
    bare = encoder._replace(prefix=())
    assert next(bare.requests([("", "abab")])) == ((1,), tuple(tokenizer.encode("abab")), 0) and bare.prompt(
        ""
    ) == (
        (1,),
        0,
    )
    assert next(bare.requests([("ab", " cdcd")]))[0][0] not in (0, 1)


def test_long_texts_lose_their_beginning():
    encoder = Encoder(BYTES, (256,), 257, 8)
    context, continuation, cut = next(encoder.requests([("0123456789", "ab")]))
    # 8 tokens are read: seven of context, and a, from which b is predicted.
    assert bytes(context) == b"3456789" and bytes(continuation) == b"ab"
    assert cut == 4  # the prefix, and 0 to 2
    assert encoder.prompt("0123456789", room=3) == (tuple(b"56789"), 6)
    assert encoder.prompt("01") == ((256, 48, 49), 0)
    with pytest.raises(UserError, match=r"continuation of 9 tokens: does not fit into the 8"):
        next(encoder.requests([("x", "123456789")]))
    with pytest.raises(UserError, match="adds no token"):
        next(encoder.requests([("x", "")]))


def test_items_that_lost_their_beginning_are_counted():
    items = [Choice("01234", (" a", " b"), 0), Choice("012345", (" a", " b"), 0), Question("01234", ("x",))]
    encoder = Encoder(BYTES, (256,), 257, 8)
    task = dataclasses.replace(task_of(), max_tokens=2)
    # Read are the prefix, the prompt, and all but the last token of a choice; a question leaves room for two.
    assert ask(task, items, None, encoder, shots=0).cut == 0
    assert ask(task, items, None, encoder._replace(context=7), shots=0).cut == 2
    with pytest.raises(UserError, match="toy, item 2: an answer of up to 8 tokens fills the context of 8"):
        ask(dataclasses.replace(task, max_tokens=8), items, None, encoder, shots=0)


def test_orders_of_sweeps():
    found = {
        (s.operation, s.run_length): s for s in sweeps(("skip", "swap", "reverse", "repeat"), 4, (1, 2), 2)
    }
    assert found["skip", 1].orders[0] == (1, 2, 3) and found["skip", 1].starts == (0, 1, 2, 3)
    assert found["swap", 2].orders == ((2, 3, 0, 1),)
    assert found["reverse", 2].orders == ((1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2))
    assert ("reverse", 1) not in found
    assert found["repeat", 2].orders[1] == (0, 1, 2, 1, 2, 1, 2, 3)
    assert repeat(3, 2, 1, 1) == (0, 1, 2, 2)
    assert [s.run_length for s in sweeps(("swap",), 8)] == [1, 2, 4]
    with pytest.raises(
        UserError, match=r"eval.run_lengths=\(5,\): none of them fits skip, .* 1 to 3 of 4 layers"
    ):
        sweeps(("skip",), 4, (5,))
    with pytest.raises(UserError, match=r"eval.run_lengths=\(2, 3\): \[3\] fit none of swap of 4 layers"):
        sweeps(("swap",), 4, (2, 3))


def test_ties_and_lengths():
    item = Choice("q", (" yes", " certainly"), 1)
    tie = outcome_of(item, [Likelihood(-2.0, False), Likelihood(-2.0, False)])
    assert tie.scores["accuracy"] == 0.5 and tie.scores["accuracy_norm"] == 1.0


def test_two_networks():
    asked = ask(task_of(), ITEMS[:2], None, ENCODER, shots=0)
    a, b = (outcomes(asked, subject_of(seed), nothing_written) for seed in (0, 5))
    found = compared(a, b)
    assert set(found) == {"accuracy", "accuracy_norm", "log_prob"}
    want = np.mean([x.scores["accuracy"] - y.scores["accuracy"] for x, y in zip(a, b, strict=True)])
    assert found["accuracy"]["difference"] == want


def test_settings():
    validate(EvalConfig())
    for fields, message in (
        ({"tasks": ()}, "eval.tasks"),
        ({"limit": -1}, "eval.limit=-1"),
        ({"shots": -2}, "eval.shots=-2"),
        ({"sweeps": ("skp",)}, "eval.sweeps='skp': must be one of skip, swap"),
        ({"exits": "x"}, "eval.exits='x': must be one of none, logit, tuned"),
        ({"exits": "tuned"}, "eval.lens=''"),
        ({"lens": "x"}, "eval.lens='x'"),
        ({"run_lengths": (0,)}, "eval.run_lengths"),
        ({"dtype": "int8"}, "eval.dtype='int8'"),
    ):
        with pytest.raises(UserError, match=message):
            validate(EvalConfig(**fields))
