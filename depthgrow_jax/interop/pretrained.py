"""What a pretrained model is to this project, whatever file it comes from."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from depthgrow_jax.interop.tensors import stack
from depthgrow_jax.model import ModelConfig, Params


class Vocabulary(NamedTuple):
    """The tokenizer that came with a model.

    Attributes:
      json: a `tokenizer.json` of Hugging Face `tokenizers`.
      separator: the token that stands between documents; in the vocabulary.
      prefix: ids that the tokenizer puts before every text (beginning of sequence); often none.
      ends: ids that end a generated text.
      files: other files of the tokenizer, by name, to be handed on at export.
    """

    json: str
    separator: str
    prefix: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    files: Mapping[str, str] = {}


class Pretrained(NamedTuple):
    """A model that is described and checked; its weights are still in their files.

    Attributes:
      reference: what the user named, `hf:...` or `gguf:...`.
      cfg, depth: its architecture.
      context: the longest sequence it is defined for, in tokens.
      tensors: a function that reads the tensors, one at a time, as (name, array), in any order. Names and
        shapes are those of Hugging Face (`tensors.shapes`); float32, float16 or bfloat16.
      vocabulary: None where the files hold no tokenizer.
      fingerprint: hex digits that change with the weights.
    """

    reference: str
    cfg: ModelConfig
    depth: int
    context: int
    tensors: Callable[[], Iterator[tuple[str, np.ndarray]]]
    vocabulary: Vocabulary | None
    fingerprint: str

    def params(self, shardings: Params | None = None) -> Params:
        """Float32 parameters, on the devices that `shardings` names for each leaf (None: the default one).

        Memory: the model once, and one tensor. Raises `UserError` naming a tensor that is missing, unknown,
        given twice, of another shape or not finite.
        """
        stacked = stack(self.cfg, self.depth, self.tensors(), self.reference)
        if shardings is None:
            return jax.tree.map(jax.device_put, stacked)
        return jax.tree.map(jax.device_put, stacked, shardings)
