"""Scores and texts are those of lm-evaluation-harness's own `hf` model, on the same checkpoints."""

import functools
import runpy
import sys

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is optional (requirements-dev.txt)")
torch = pytest.importorskip("torch", reason="the harness's own model runs on torch (requirements-dev.txt)")
torch.set_num_threads(1)

import tiny_harness as tiny  # noqa: E402  (needs both)
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from probe_runs import trained  # noqa: E402

from depthgrow_jax.errors import UserError  # noqa: E402
from depthgrow_jax.evals import harness  # noqa: E402
from depthgrow_jax.evals.harness import DepthgrowLM  # noqa: E402
from depthgrow_jax.exporting import export_network  # noqa: E402
from depthgrow_jax.model import Sampling  # noqa: E402

LONG = " ".join(tiny.TEXTS) * 3
PAIRS = [
    ("the cat sat", " on the mat"),
    ("the cat sat ", "on the mat"),  # the space goes to the continuation
    ("the cat sat on\n\n", "the"),
    ("the c", "at sat on"),  # a token lies across the boundary
    ("", "the cat"),
    ("", f"{tiny.END}the cat"),  # where there is no prefix: the first token is its own context
    ("", f"{tiny.BEGIN}the cat"),
    (f"{tiny.BEGIN}the cat", " sat"),  # not twice
    (f"the cat{tiny.END}", " 日本"),
    ("naïve", " — émigré 🙂"),
    ("the hat", " cat"),
    ("the hat", " mat"),
    ("the cat sat", " on the mat"),
    (LONG, " the cat"),
    ("the", LONG[:60]),
]
DOCUMENTS = ["the cat sat on the mat", "", LONG, f"{tiny.BEGIN}the hat", "🙂", LONG[:80]]
CONTEXTS = ["the cat sat", "Question: what", LONG, "naïve 日", "the cat sat", f"{tiny.BEGIN}the hat"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("plain") / "out")


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("prefixed") / "out", prefix=True)


def ours(directory, **arguments):
    return DepthgrowLM(model=f"hf:{directory}", **arguments)


def both(kind, directory, requests, **arguments):
    """(ours, theirs) of the same requests."""
    return tuple(
        getattr(model, kind)(tiny.instances(kind, requests), disable_tqdm=True)
        for model in (ours(directory, **arguments), tiny.hf(directory, **arguments))
    )


@pytest.mark.parametrize(
    ("which", "add_bos_token"),
    [("plain", None), ("plain", False), ("prefixed", None), ("prefixed", True), ("prefixed", False)],
)
def test_log_likelihoods(which, add_bos_token, request):
    directory = request.getfixturevalue(which)
    # What the network would say, so that some continuations are greedy.
    made = tiny.instances("generate_until", [(word, {"max_gen_toks": 1}) for word in LONG.split()[:12]])
    said = tiny.hf(directory).generate_until(made, disable_tqdm=True)
    requests = [
        *PAIRS,
        *((instance.args[0], text) for instance, text in zip(made, said, strict=True) if text),
    ]
    got, want = both("loglikelihood", directory, requests, add_bos_token=add_bos_token)
    np.testing.assert_allclose([a for a, _ in got], [a for a, _ in want], rtol=0, atol=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert got[0] == got[12] and [type(part) for part in got[0]] == [float, bool]
    if add_bos_token is None:
        assert {greedy for _, greedy in got} == {True, False}


@pytest.mark.parametrize("which", ["plain", "prefixed"])
def test_rolling_log_likelihoods(which, request):
    requests = [(text,) for text in DOCUMENTS]
    got, want = both("loglikelihood_rolling", request.getfixturevalue(which), requests)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert got[1] == 0 or which == "prefixed"


def test_windows_and_batches_of_another_size(plain):
    """Two windows of eight tokens at once."""
    requests = [(text,) for text in DOCUMENTS]
    got, want = both("loglikelihood_rolling", plain, requests, max_length=8, batch_size=2)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def texts_of(directory, requests):
    """(ours, theirs). `hf` gets one text at a time: it encodes all texts of a batch as it must the first."""
    requests = tiny.instances("generate_until", requests)
    return tuple(
        model.generate_until(requests, True) for model in (ours(directory), tiny.hf(directory, batch_size=1))
    )


@pytest.mark.slow
@pytest.mark.parametrize("which", ["plain", "prefixed"])
def test_generated_texts(which, request):
    directory = request.getfixturevalue(which)
    free = [(text, {"max_gen_toks": 12}) for text in CONTEXTS]
    got, want = texts_of(directory, free)
    assert got == want and len(set(got)) > 3

    # Texts that appear in the middle of what is said, over one token and over several.
    stops = [got[0][len(got[0]) // 2 :][:3], got[1][2:4]]
    stopped = [
        *((text, {"until": stops, "max_new_tokens": 12, "do_sample": False}) for text in CONTEXTS),
        *((text, {"until": stops[0], "max_gen_toks": 5, "temperature": 0.0}) for text in CONTEXTS),
        (CONTEXTS[0], {"until": ["zzz"], "max_tokens": 12, "num_beams": 1}),
    ]
    cut, want = texts_of(directory, stopped)
    assert cut == want
    assert cut[0] == got[0].split(stops[0])[0] and cut[1] == got[1][:2]
    assert got[0].startswith(cut[len(CONTEXTS)]) and 0 < len(cut[len(CONTEXTS)]) < len(got[0])
    assert cut[-1] == got[0], "alone and among others"


def test_a_text_ends_on_the_end_token(tmp_path, plain):
    model = ours(plain)
    requests = [(text, {"max_gen_toks": 12}) for text in CONTEXTS]
    said = model.generate_until(tiny.instances("generate_until", requests), True)
    ends = tiny.checkpoint(tmp_path / "out", end_like=model.tok_encode(said[0])[4])
    got, want = texts_of(ends, requests)
    assert got == want
    assert any(0 < len(model.tok_encode(text)) < 12 for text in got)


@pytest.mark.slow
def test_a_program_is_the_network_whose_layers_lie_in_its_order(tmp_path, plain):
    order = tiny.checkpoint(tmp_path / "out", order=(1, 0, 1))
    requests = tiny.instances("loglikelihood", PAIRS[:4])
    want = tiny.hf(order).loglikelihood(requests, True)
    given = {"model": f"hf:{plain}", "program": "1-0,1", "batch_size": 3}
    for model, size in (
        (DepthgrowLM.create_from_arg_string(f"model=hf:{plain},program=1-0+1", {"device": "cuda:0"}), "auto"),
        # The command passes a batch size of its own, whatever the arguments say.
        (DepthgrowLM.create_from_arg_obj(given, {"batch_size": 1, "max_batch_size": None}), 3),
    ):
        assert model.batch_size == size
        got = model.loglikelihood(requests, True)
        np.testing.assert_allclose([a for a, _ in got], [a for a, _ in want], rtol=0, atol=1e-4)
        assert model.get_model_info()["depthgrow"]["program"] in ("1-0+1", "1-0,1")
    generated = tiny.instances("generate_until", [("the", {"max_gen_toks": 12})])
    assert model.generate_until(generated, True) == tiny.hf(order).generate_until(generated, True)


@pytest.mark.slow
def test_a_run_is_its_export(tmp_path_factory, tmp_path):
    """Of a step at which the gate of a new layer is half open."""
    run = trained(tmp_path_factory.getbasetemp())
    assert export_network(str(run), str(tmp_path / "out"), step=4) == 0
    theirs, model = tiny.hf(tmp_path / "out"), DepthgrowLM(run=str(run), step=4)
    assert (model.max_length, theirs.max_length) == (16, 16)
    assert (model.eot_token_id, model.prefix_token_id) == (theirs.eot_token_id, theirs.prefix_token_id)
    for kind, requests in {
        "loglikelihood": [("text number", " 7"), ("", "text"), ("text number 3 " * 4, "text")],
        "loglikelihood_rolling": [("text number 3 " * 4,)],
        "generate_until": [("text num", {"max_gen_toks": 6})],
    }.items():
        asked = tiny.instances(kind, requests)
        got, want = (getattr(lm, kind)(asked, disable_tqdm=True) for lm in (model, theirs))
        if kind == "generate_until":
            assert got == want
        else:
            np.testing.assert_allclose(np.array(got), np.array(want), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_tasks_have_equal_metrics(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # a fork below JAX's threads, for intervals of chrf
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # runs pip for seconds
    monkeypatch.setattr("lm_eval.models.huggingface.HFLM.get_model_info", lambda self: {})  # asks the Hub
    manager = TaskManager(include_path=str(tiny.write_tasks(tmp_path)), include_defaults=False)
    tasks = ["toy_choice", "toy_answer", "toy_text"]
    got, want = (
        simple_evaluate(
            model=model, model_args=arguments, tasks=tasks, task_manager=manager, num_fewshot=2, batch_size=2
        )
        for model, arguments in (
            ("depthgrow", f"model=hf:{plain},batch_size=auto"),
            ("hf", f"pretrained={plain},device=cpu,dtype=float32,logits_cache=False"),
        )
    )
    assert got["config"]["depthgrow"]["depth"] == tiny.DEPTH
    for task in tasks:
        numbers = {name: value for name, value in want["results"][task].items() if name != "alias"}
        assert len(numbers) >= 5
        for name, value in numbers.items():
            close = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert got["results"][task][name] == close, (task, name)
        for mine, theirs in zip(got["samples"][task], want["samples"][task], strict=True):
            assert mine["arguments"] == theirs["arguments"]
    answers = [[sample["filtered_resps"] for sample in out["samples"]["toy_answer"]] for out in (got, want)]
    assert answers[0] == answers[1] and len(set(map(tuple, answers[0]))) > 1


@pytest.mark.slow
def test_sampling(plain):
    """It follows the seed, and repeats of a context differ."""
    model = ours(plain)
    settings = {"do_sample": True, "temperature": 0.7, "max_gen_toks": 12}

    def texts():
        requests = tiny.instances("generate_until", [(CONTEXTS[0], settings)] * 4)
        return model.generate_until(requests, True)

    np.random.seed(3)
    first, second = texts(), texts()
    np.random.seed(3)
    assert texts() == first != second and len(set(first)) == 4
    # transformers draws among 50 tokens where nothing else is said.
    assert model._settings(settings).sampling == Sampling(0.7, 50, 1.0)
    assert model._settings({**settings, "top_k": 3, "top_p": 0.9}).sampling == Sampling(0.7, 3, 0.9)
    assert model._settings({**settings, "do_sample": False}).sampling == Sampling()
    assert model._settings({"temperature": 0.5, "max_gen_toks": 3}).sampling.temperature == 0.5


def test_answers_go_to_the_cache_of_the_harness(plain, tmp_path):
    model = ours(plain)
    calls = []
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        method = getattr(model, kind)
        setattr(model, kind, lambda asked, method=method: calls.append(len(asked)) or method(asked))
    requests = {
        "loglikelihood": [("the cat", " sat"), ("the", " hat")],
        "loglikelihood_rolling": [("the cat sat",)],
        "generate_until": [("the cat", {"max_gen_toks": 12})],
    }
    for kind, pairs in requests.items():
        asked = tiny.instances(kind, pairs)
        # The first one is answered by the hook alone, as after a run that was stopped.
        CachingLM(model, str(tmp_path / "cache.db"))
        first = getattr(model, kind)(asked[:1])
        got = getattr(CachingLM(model, str(tmp_path / "cache.db")), kind)(asked)
        assert got[:1] == first and calls == ([1, 1] if len(asked) == 2 else [1])
        calls.clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", r"run=None, model=None: must be one of the two"),
        ("run=a,model=hf:b", r"run='a', model='hf:b': must be one of the two"),
        ("run=nowhere", r"run='nowhere': no such directory"),
        ("model=nowhere", r"model='nowhere': is no model; must be hf:DIR"),
        ("{model},step=2", r"--step=2: is for --run"),
        ("{model},step=x", r"step='x': must be the number of a checkpoint"),
        ("{model},program=0-3", r"program='0-3': must be layers .* of 0 to 1"),
        ("{model},program=0-1,2-1", r"2-1='': is no argument .* joined by \+"),
        ("{model},pretrained=b", r"pretrained='b': is no argument of depthgrow; legal: run, model, step"),
        ("{model},dtype=int8", r"dtype='int8': must be one of float32, bfloat16"),
        ("{model},batch_size=0", r"batch_size=0: must be auto, 1 or more"),
        ("{model},max_length=49", r"max_length=49: must be 1 to 48, the context of the network"),
        ("{model},max_gen_toks=0", r"max_gen_toks=0: must be 1 or more"),
        ("{model},add_bos_token=True", r"add_bos_token=True: the tokenizer has no such token"),
        ("{model},add_bos_token=2", r"add_bos_token=2: must be True or False"),
    ],
)
def test_arguments_that_are_refused(arguments, message, plain):
    with pytest.raises(UserError, match=message) as error:
        DepthgrowLM.create_from_arg_string(arguments.format(model=f"model=hf:{plain}"))
    assert "\n" not in str(error.value)


def test_requests_that_are_refused(plain):
    model = ours(plain, max_length=16)

    def refused(kind, arguments, message):
        with pytest.raises(UserError, match=message) as error:
            getattr(model, kind)(tiny.instances(kind, [arguments]), True)
        assert "\n" not in str(error.value)

    refused("loglikelihood", ("the c", "at"), r"continuation='at' after context='the c': has 0 tokens")
    refused("loglikelihood", ("", ""), r"has 0 tokens of its own; must have 1 to max_length=16")
    refused("loglikelihood", ("the", LONG), r"has \d\d+ tokens of its own; must have 1 to max_length=16")
    for settings, message in (
        ({"max_gen_toks": 16}, r"max_gen_toks=16: must be 1 to 15"),
        ({}, r"max_gen_toks=256: must be 1 to 15"),
        ({"max_gen_toks": 4, "num_beams": 2}, r"num_beams=2 is not supported; legal: until"),
        ({"max_gen_toks": 4, "do_sample": True}, r"temperature=0.0: must be above 0 to sample"),
        ({"max_gen_toks": 4, "temperature": 1.0, "top_p": 0}, r"generation_kwargs: top_p=0: must lie in"),
    ):
        refused("generate_until", ("the", settings), message)
    with pytest.raises(UserError, match="--apply_chat_template"):
        model.apply_chat_template([{"role": "user", "content": "the cat"}])


@pytest.mark.slow
def test_the_command(plain, tmp_path, monkeypatch, capsys):
    """It is lm_eval's, and knows the model; what a user can mend is one line."""
    assert get_model("depthgrow") is DepthgrowLM
    tiny.write_tasks(tmp_path)

    def command(arguments):
        words = [
            "--model",
            "depthgrow",
            "--model_args",
            arguments,
            "--tasks",
            str(tmp_path / "toy_choice.yaml"),
        ]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words, "--limit", "3"])
        code = harness.main()
        return code, *capsys.readouterr()

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr(harness, "keep_executables", lambda: None)
    # Thousands of task files are read for seconds otherwise.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    code, out, _ = command(f'model=hf:{plain},program="1-0"')
    assert code == 0 and "toy_choice" in out and "acc_norm" in out
    code, _, err = command("run=nowhere")
    assert code == 2 and err.splitlines()[-1].startswith("error: run='nowhere': no such directory")


def test_without_the_harness_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(harness.__file__, run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: lm-evaluation-harness cannot be imported") and "lm-eval==0.4.13" in line
    with pytest.raises(UserError, match=r"pip install lm-eval==0.4.13"):
        runpy.run_path(harness.__file__)
