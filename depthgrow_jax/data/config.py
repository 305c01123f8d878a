"""What text a run trains on, and how it becomes token ids."""

import dataclasses

from depthgrow_jax.errors import require, require_choice

SOURCES = ("stdlib", "files", "tfds", "hf")


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of documents; also one component of a mixture.

    Attributes:
      source: `stdlib` (the running Python's own `.py` files), `files`, `tfds` or `hf`.
      path: `files`: a file, directory or glob (several separated by commas); `tfds`: the data
        directory; `hf`: a dataset name, or a directory written by `save_to_disk`.
      name: `tfds`: `dataset[/config][:version]`; `hf`: the configuration's name.
      split: `tfds` and `hf`: which split holds the documents.
      text_field: the field of a record that holds the text (`.jsonl`, `.parquet`, tfds, hf).
      weight: share of the training sequences drawn from this component of a mixture.
      max_bytes: stop reading after this many UTF-8 bytes; 0 reads everything.
    """

    source: str = "stdlib"
    path: str = ""
    name: str = ""
    split: str = "train"
    text_field: str = "text"
    weight: float = 1.0
    max_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The single source given by the inherited fields, or `mixture` when that is not empty.

    Attributes:
      mixture: `(name, SourceConfig)` pairs; the inherited source fields are then ignored.
      tokenizer: `bpe` (byte-level BPE trained on the training documents), `bytes`, or the path
        of a Hugging Face `tokenizer.json`.
      bpe_vocab_size: vocabulary of the trained BPE; 0 takes the model's.
      separator: token put after every document; for a `tokenizer.json` it must be in its vocabulary.
      mask_token: token that replaces hidden positions in masked language modelling.
      validation_fraction: share of the documents held out, decided by a hash of their content.
      cache_dir: where trained tokenizers and token arrays are kept, by content hash.
    """

    mixture: tuple[tuple[str, SourceConfig], ...] = ()
    tokenizer: str = "bpe"
    bpe_vocab_size: int = 0
    separator: str = "<|endoftext|>"
    mask_token: str = "<|mask|>"
    validation_fraction: float = 0.02
    cache_dir: str = "~/.cache/depthgrow_jax"


def validate(cfg: DataConfig) -> None:
    """Refuses an impossible data config. Raises `UserError` naming the field."""
    components = cfg.mixture or (("", cfg),)
    for name, component in components:
        prefix = f"data.mixture.{name}." if name else "data."
        require_choice(prefix + "source", component.source, SOURCES)
        require(component.weight > 0, prefix + "weight", component.weight, "must be above 0")
        require(component.max_bytes >= 0, prefix + "max_bytes", component.max_bytes, "must be 0 (all) or more")
        if component.source in ("files", "hf"):
            require(bool(component.path), prefix + "path", component.path, f"source {component.source} needs a path")
        if component.source == "tfds":
            require(bool(component.name), prefix + "name", component.name, "source tfds needs dataset[/config][:version]")
    require(0 < cfg.validation_fraction < 1, "data.validation_fraction", cfg.validation_fraction, "must lie between 0 and 1")
    require(cfg.bpe_vocab_size >= 0, "data.bpe_vocab_size", cfg.bpe_vocab_size, "must be 0 (the model's) or more")
