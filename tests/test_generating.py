"""Texts are continued as transformers continues them; what cannot be continued is refused in one line."""

import json
import shutil

import jax
import pytest
import tokenizers
from test_subjects_pretrained import ROWS, save_pretrained, tiny_hf

from depthgrow_jax.errors import UserError
from depthgrow_jax.generating import continue_texts
from depthgrow_jax.model import Sampling

torch = pytest.importorskip("torch", reason="continuations are compared with those of torch")
transformers = pytest.importorskip("transformers", reason="continuations are compared with transformers")

PROMPTS = ["text number 7 text", "a", "x" * 9]
NEW = 20
SPACE = "▁"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("pretrained")
    save_pretrained(place, template="<s> $A", max_position_embeddings=64)
    return place


def theirs(directory, prompt, count=NEW):
    """What transformers makes of a prompt: ids, and text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    given = tokenizer(prompt, return_tensors="pt")
    made = network.generate(**given, do_sample=False, max_new_tokens=count, pad_token_id=0)[0].tolist()
    before = tokenizer.decode(given.input_ids[0], skip_special_tokens=False)
    text = tokenizer.decode(made, skip_special_tokens=False)
    return made[given.input_ids.shape[1] :], text[len(before) :]


def ours(capsys, place, prompts, **changes) -> str:
    """What is printed."""
    settings = {"sampling": Sampling(), "max_tokens": NEW, "seed": 0, "stops": (), "order": None}
    capsys.readouterr()
    assert continue_texts(f"hf:{place}", prompts, flag="--model", **{**settings, **changes}) == 0
    return capsys.readouterr().out


def test_prompts_of_unequal_length_are_continued_as_by_transformers(directory, capsys):
    want = [theirs(directory, prompt)[1] for prompt in PROMPTS]
    assert len(set(want)) == len(PROMPTS)
    lines = "".join(f"{prompt}{text}\n" for prompt, text in zip(PROMPTS, want, strict=True))
    assert ours(capsys, directory, PROMPTS) == lines


def test_an_end_token_ends_a_text_and_is_left_out(directory, capsys, tmp_path):
    ids, _ = theirs(directory, PROMPTS[0])
    place = shutil.copytree(directory, tmp_path / "ends")
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[6]}))
    stopped, text = theirs(place, PROMPTS[0])
    assert 0 < len(stopped) <= 7 and stopped[-1] == ids[6]
    spelt = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json")).decode([ids[6]])
    assert ours(capsys, place, PROMPTS[:1]) == f"{PROMPTS[0]}{text.removesuffix(spelt)}\n"


def test_a_stop_string_ends_a_text_and_is_left_out(directory, capsys):
    _, text = theirs(directory, PROMPTS[0])
    stop = text[5:8]  # across borders of tokens
    want = text[: text.index(stop)]
    assert ours(capsys, directory, PROMPTS[:1], stops=("not there", stop)) == f"{PROMPTS[0]}{want}\n"
    # Of several the first in the text, not the first that was given.
    assert ours(capsys, directory, PROMPTS[:1], stops=(stop, text[1:4])) == f"{PROMPTS[0]}{text[:1]}\n"


def test_a_space_at_the_border_is_kept(tmp_path, capsys):
    """SentencePiece tokenizers drop the space that a text begins with: a continuation is not a text."""
    tiny_hf.make(tmp_path, "llama", vocab_size=ROWS, max_position_embeddings=64)
    words = [SPACE + word for word in ("a", "b", "text")] + ["a", "b", "t", "e", "x", SPACE]
    rest = [f"<0x{byte:02X}>" for byte in range(256)]
    spelt = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *rest, *words])}
    # Ids of which each is a word with its space before it, for all that a random model can say.
    spelt |= {f"{SPACE}w{i}": i for i in range(len(spelt), ROWS)}
    merges = [(SPACE, "a"), (SPACE, "b")]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(spelt, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend(SPACE), tokenizers.normalizers.Replace(" ", SPACE)]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace(SPACE, " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    # The most likely token follows from the last one alone where nothing is added to the stream.
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # What follows "▁b" is "▁text", and so on.
        b, text = spelt[f"{SPACE}b"], spelt[f"{SPACE}text"]
        network.lm_head.weight.zero_()
        norm = network.model.norm.weight
        network.lm_head.weight[text] = network.model.embed_tokens.weight[b] * norm
        network.lm_head.weight[b] = network.model.embed_tokens.weight[text] * norm
    network.save_pretrained(tmp_path)
    assert theirs(tmp_path, "a b", 3)[1] == " text b text"
    assert ours(capsys, tmp_path, ["a b"], max_tokens=3) == "a b text b text\n"
    assert ours(capsys, tmp_path, ["a b"], max_tokens=3, stops=(" b",)) == "a b text\n"


def test_draws_follow_the_seed(directory, capsys):
    drawn = {"sampling": Sampling(1.0, top_k=50, top_p=0.9)}
    texts = [ours(capsys, directory, PROMPTS[:1], seed=seed, **drawn) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def refusal(place, prompts=("a",), **changes) -> str:
    settings = {"sampling": Sampling(), "max_tokens": 4, "seed": 0, "stops": (), "order": None}
    with pytest.raises(UserError) as caught:
        continue_texts(f"hf:{place}", prompts, flag="--model", **{**settings, **changes})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": Sampling(-0.5)}, "--temperature=-0.5: must be 0 (greedy) or at least 1e-06"),
        ({"sampling": Sampling(1.0, -1)}, "--top_k=-1: must be 0 (all) or more"),
        ({"sampling": Sampling(1.0, 0, 2.0)}, "--top_p=2.0: must lie in (0, 1]"),
        ({"max_tokens": 0}, "--max_tokens=0: must be at least 1"),
        ({"seed": -1}, "--seed=-1: must lie in [0, 2**32)"),
        ({"seed": 2**32}, f"--seed={2**32}: must lie in [0, 2**32)"),
        ({"stops": ("x", "")}, "--stop='': must not be empty"),
        ({"prompts": ()}, "--prompt is missing: a text to continue"),
        (
            {"prompts": ("x" * 9, "a"), "max_tokens": 55},
            "--max_tokens=55: must be at most 54 after a prompt of 10 tokens; the network is made for 64",
        ),
        (
            {"prompts": ("a", "y " * 40)},
            f"--prompt={'y ' * 40!r}: has 81 tokens; the network is made for 64 in all",
        ),
        (
            {"order": "0-2"},
            "--program='0-2': must be layers and ranges (7-4 runs backwards) such as 0-3,2-3,5, of 0 to 1",
        ),
    ],
)
def test_refusals(directory, changes, message):
    assert refusal(directory, **changes).startswith(message)


def test_without_a_tokenizer_or_a_token(tmp_path):
    save_pretrained(tmp_path / "no prefix")
    assert refusal(tmp_path / "no prefix", ["a", ""]) == (
        "--prompt='': is empty, and the tokenizer puts nothing before it"
    )
    tiny_hf.make(tmp_path / "bare", "llama")
    message = refusal(tmp_path / "bare")
    assert message == f"hf:{tmp_path / 'bare'}: comes without a tokenizer, which must lie beside the weights"


def test_nothing_but_the_prompt_where_the_first_token_is_an_end(directory, capsys, tmp_path):
    ids, _ = theirs(directory, PROMPTS[0])
    place = shutil.copytree(directory, tmp_path / "ends")
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[0]}))
    assert ours(capsys, place, PROMPTS[:1]) == f"{PROMPTS[0]}\n"
    assert jax.device_count() == 8  # a mesh of one was used all the same
