"""Batches hold every prompt once, in order, and say which rows only fill the shape."""

import numpy as np
import pytest
from toy_models import ragged, subject, text

from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.inputs import batches, check_prompts, num_batches, windows


@pytest.mark.parametrize(
    ("size", "shape", "real"), [(2, 2, [2, 2, 1]), (5, 5, [5]), (9, 5, [5]), (3, 3, [3, 2])]
)
def test_batches_cover_the_prompts(size, shape, real):
    network, prompts = subject(1), text(5)
    made = list(batches(network, prompts, size))
    assert [b.real for b in made] == real and len(made) == num_batches(network, prompts, size)
    assert all(b.prompts.inputs.shape[0] == shape for b in made)
    kept = np.concatenate([b.prompts.inputs[: b.real] for b in made])
    assert (kept == prompts.inputs).all()
    assert all(len(set(batch.indices)) == shape for batch in made)


def test_rows_are_a_multiple_of_the_devices():
    network = subject(1)._replace(devices=4)
    assert [b.prompts.inputs.shape[0] for b in batches(network, text(5), 2)] == [4, 4]
    assert [b.prompts.inputs.shape[0] for b in batches(network, text(2), 8)] == [4]


def test_windows_predict_the_next_token():
    prompts = windows(np.arange(12).reshape(2, 6))
    assert prompts.inputs.tolist() == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]]
    assert prompts.targets.tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]
    assert prompts.scored.all() and prompts.valid.all() and (prompts.answer == 5).all()


def test_ids_outside_the_vocabulary_are_refused():
    prompts = text(2)
    prompts.inputs[1, 3] = 37
    with pytest.raises(UserError, match="token id 37 is outside the vocabulary of 37"):
        check_prompts(subject(1), prompts)


def test_a_bidirectional_model_takes_no_padding():
    check_prompts(subject(1), ragged())
    with pytest.raises(UserError, match="bidirectional"):
        check_prompts(subject(1, causal=False), ragged())
