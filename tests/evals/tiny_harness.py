"""Checkpoints that both the harness's own `hf` model and ours read, and harness tasks on local files."""

import functools
import json
import pathlib

import jax
import numpy as np
import tokenizers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from depthgrow_jax.data.tokenizer import train_bpe
from depthgrow_jax.interop.export import export
from depthgrow_jax.interop.pretrained import Vocabulary
from depthgrow_jax.model import ModelConfig, abstract_params, layer_program, reorder

DEPTH, CONTEXT, VOCABULARY = 2, 48, 320
CFG = ModelConfig(
    vocab_size=VOCABULARY, width=32, heads=4, kv_heads=2, mlp_dim=48, tie_embeddings=False, rope_theta=1e4
)
TEXTS = [
    "the cat sat on the mat, and the hat sat on the cat",
    "  two  spaces\n\ttab 123 1999\nQuestion: what sat? Answer: the cat",
    "naïve — émigré 日本 🙂",
]
END, BEGIN = "<|end|>", "<|begin|>"


def vocabulary(prefix: bool) -> Vocabulary:
    """`END` is id 0 and `BEGIN` id 1. With `prefix` texts follow the latter; without, nobody names it."""
    backend = train_bpe([text * 20 for text in TEXTS], VOCABULARY, (END, BEGIN))
    if prefix:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=[BEGIN, "$A"], special_tokens=[(BEGIN, 1)]
        )
    return Vocabulary(backend.to_str(), END, prefix=(1,) if prefix else (), ends=(0,))


@functools.cache
def _params():
    rng = np.random.default_rng(5)

    def draw(path, leaf):
        if path[-1].key == "scale":
            return np.asarray(1 + rng.uniform(-0.5, 0.5, leaf.shape), np.float32)
        return np.asarray(rng.standard_normal(leaf.shape) * leaf.shape[-2] ** -0.5, np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(CFG, DEPTH))


def checkpoint(
    directory: pathlib.Path, *, prefix: bool = False, order: tuple[int, ...] | None = None, end_like: int = 0
) -> pathlib.Path:
    """An exported random network.

    Args:
      order: its layers; None as they are.
      end_like: an id that it would say; it ends the text instead.
    """
    params = _params()
    if end_like:
        kernel = params["head"]["kernel"].copy()
        kernel[:, 0] = 2 * kernel[:, end_like]
        params = {**params, "head": {**params["head"], "kernel": kernel}}
    program = layer_program(CFG, DEPTH)
    program = program if order is None else reorder(program, order)
    export(
        CFG,
        params,
        program,
        directory,
        context=CONTEXT,
        vocabulary=vocabulary(prefix),
        lineage={"run": "toy"},
    )
    return directory


def hf(directory: pathlib.Path, **arguments) -> HFLM:
    """The harness's own model of it.

    Without its cache of logits: of requests that read the same tokens, whose continuations are of unequal
    length, lm_eval 0.4.13 scores the shorter at the place of the longer.
    """
    arguments = {"batch_size": 4, **arguments}
    return HFLM(str(directory), device="cpu", dtype="float32", logits_cache=False, **arguments)


def instances(kind: str, requests: list) -> list[Instance]:
    """Requests of the harness, in its form."""
    return [Instance(kind, {}, arguments, index) for index, arguments in enumerate(requests)]  # pyright: ignore


def write_tasks(place: pathlib.Path) -> pathlib.Path:
    """A directory with three harness tasks on local files: `toy_choice`, `toy_answer`, `toy_text`."""
    records = [
        {"question": f"what sat on the {noun}?", "choices": [" the cat", " a hat", f" {noun}"], "gold": i % 3}
        for i, noun in enumerate(["mat", "hat", "cat", "spaces", "tab", "Question", "1999"])
    ]
    data = place / "toy.json"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    common = f"""dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {place / "datasets"}
test_split: test
"""
    tasks = {
        "toy_choice": """output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
        "toy_answer": """output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}, {metric: chrf}]
""",
        "toy_text": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}{{choices[1]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    }
    for name, lines in tasks.items():
        (place / f"{name}.yaml").write_text(f"task: {name}\n{common}{lines}")
    return place
