"""Validation of the data config."""

import math

import pytest

from depthgrow_jax.data import DataConfig, SourceConfig, validate

STDLIB = SourceConfig()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"source": "web"}, "data.source='web': must be one of stdlib, files, tfds, hf"),
        ({"source": "files"}, "data.path='': source files needs a path"),
        ({"source": "hf"}, "data.path='': source hf needs a path"),
        ({"source": "tfds"}, "data.name='': source tfds needs dataset[/config][:version]"),
        ({"source": "hf", "path": "x", "split": ""}, "data.split=''"),
        ({"source": "files", "path": "x", "text_field": ""}, "data.text_field=''"),
        ({"weight": 0.0}, "data.weight=0.0: must be above 0"),
        ({"weight": math.nan}, "data.weight=nan"),
        ({"weight": math.inf}, "data.weight=inf"),
        ({"max_bytes": -1}, "data.max_bytes=-1"),
        ({"tokenizer": ""}, "data.tokenizer='': must be bpe, bytes or the path"),
        ({"separator": ""}, "data.separator=''"),
        ({"mask_token": "<|endoftext|>"}, "data.mask_token='<|endoftext|>'"),
        ({"validation_fraction": 0.0}, "data.validation_fraction=0.0: must lie between 0 and 1"),
        ({"validation_fraction": 1.0}, "data.validation_fraction=1.0"),
        ({"validation_fraction": math.nan}, "data.validation_fraction=nan"),
        ({"bpe_vocab_size": -1}, "data.bpe_vocab_size=-1"),
        ({"cache_dir": ""}, "data.cache_dir=''"),
        ({"mixture": (("a", STDLIB), ("a", STDLIB))}, "data.mixture=['a', 'a']: names must be unique"),
        ({"mixture": (("", STDLIB),)}, "data.mixture=['']"),
        ({"mixture": (("a", SourceConfig(weight=-1.0)),)}, "data.mixture.a.weight=-1.0"),
        ({"mixture": (("a", SourceConfig("files")),)}, "data.mixture.a.path=''"),
        ({"mixture": (("a", "stdlib"),)}, "data.mixture.a='stdlib': must be a SourceConfig"),
    ],
)
def test_bad_field_is_named(changes, expected, fails):
    assert expected in fails(validate, DataConfig(**changes))


def test_defaults_and_mixtures_are_legal():
    validate(DataConfig())
    validate(DataConfig(source="files", mixture=(("a", STDLIB), ("b", SourceConfig("files", "x.txt")))))
