"""The data of a run as it is used: tokenizers of pretrained models found, batches checked."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable

from depthgrow_jax.config import RunConfig, to_dict
from depthgrow_jax.data import Corpus, load
from depthgrow_jax.data.cache import cached_bytes
from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.data.tokenizer import Tokenizer, load_json
from depthgrow_jax.errors import UserError
from depthgrow_jax.interop import Vocabulary, is_reference, open_model
from depthgrow_jax.subjects import Loaded


def load_corpus(cfg: RunConfig, cache: dict[str, Corpus], log: Callable[[str], None]) -> Corpus:
    """The tokenised data of a run; runs that read the same data share it through `cache`.

    `data.tokenizer` may name a pretrained model, whose tokenizer is then taken.
    """
    key = json.dumps(
        [to_dict(cfg.data), cfg.train.sequence_length, cfg.model.vocab_size, cfg.train.objective],
        sort_keys=True,
    )
    if key not in cache:
        cache[key] = load(
            with_tokenizer(cfg.data, log),
            sequence_length=cfg.train.sequence_length,
            vocab_size=cfg.model.vocab_size,
            masked=cfg.train.objective == "masked",
            log=log,
        )
    cache[key].check_batches(cfg.train.batch_size)
    return cache[key]


def with_tokenizer(data: DataConfig, log: Callable[[str], None]) -> DataConfig:
    """`data`, where its tokenizer is a pretrained model's: as a file below `data.cache_dir`.

    The separator is then one of its vocabulary, unless another than the default is given.

    Raises `UserError` for a model that cannot be read, or has no tokenizer.
    """
    if not is_reference(data.tokenizer):
        return data
    vocabulary = open_model(data.tokenizer).vocabulary
    if vocabulary is None:
        raise UserError(
            f"data.tokenizer={data.tokenizer!r}: comes without a tokenizer; give a tokenizer.json with "
            "--config.data.tokenizer=PATH"
        )
    content = vocabulary.json.encode()
    name = f"tokenizer-{hashlib.sha256(content).hexdigest()[:32]}.json"
    path = pathlib.Path(data.cache_dir).expanduser().absolute() / name
    cached_bytes(path, lambda: content, log)
    separator = vocabulary.separator if data.separator == DataConfig.separator else data.separator
    return dataclasses.replace(data, tokenizer=str(path), separator=separator)


def corpus_of(loaded: Loaded, log: Callable[[str], None]) -> Corpus:
    """The data that a run was trained on, or the text that a pretrained network is shown.

    Raises `UserError` if the run's data is not what it was.
    """
    corpus = load_corpus(loaded.config, {}, log)
    if loaded.pretrained is None and corpus.data_hash != loaded.meta["data_hash"]:
        raise UserError(
            f"{loaded.facts['run']}: was trained on other data (hash {loaded.meta['data_hash'][:12]}, now "
            f"{corpus.data_hash[:12]}); restore the files, whose tokenizer and held-out text are needed"
        )
    return corpus


def tokenizer_of(loaded: Loaded, log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer that a network reads.

    That of a run comes with its data, which is read to see that it is what it was. Raises `UserError` as
    `corpus_of`.
    """
    if loaded.pretrained is None:
        return corpus_of(loaded, log).tokenizer
    if loaded.pretrained.vocabulary is None:
        raise UserError(f"{loaded.config.name}: comes without a tokenizer, which must lie beside the weights")
    data = with_tokenizer(loaded.config.data, log)
    return load_json(data, masked=False)


def vocabulary_of(loaded: Loaded, log: Callable[[str], None]) -> Vocabulary | None:
    """The tokenizer that a network reads, with what its texts begin with and end on.

    That of a pretrained model, also where a run was trained in it; None where it comes without one. The texts
    of other runs follow the separator, as the documents of training do, and end on it.
    """
    if loaded.pretrained is not None:
        return loaded.pretrained.vocabulary
    if is_reference(loaded.config.data.tokenizer):
        return open_model(loaded.config.data.tokenizer).vocabulary
    tokenizer = tokenizer_of(loaded, log)
    separator = tokenizer.separator_id
    return Vocabulary(tokenizer.to_json(), tokenizer.decode([separator]), (separator,), (separator,))
