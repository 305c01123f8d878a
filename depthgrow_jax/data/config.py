"""What text a run trains on, and how it becomes token ids."""

import dataclasses
import math

from depthgrow_jax.data.primitive_text import SHOTS, names_of
from depthgrow_jax.errors import UserError, require, require_choice

SOURCES = ("stdlib", "files", "tfds", "hf", "primitives", "reasoning_gym")
# Made on the spot, without end.
GENERATED = ("primitives", "reasoning_gym")
# A document is made as a whole before it is cut at max_bytes.
_MOST_EXAMPLES, _MOST_QUESTIONS = 1000, 1000


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    r"""One source of documents; also one component of a mixture.

    Attributes:
      source: `stdlib` (the running Python's own `.py` files), `files`, `tfds`, `hf`,
        `primitives` (solved examples of reasoning primitives, made on the spot) or `reasoning_gym`
        (solved questions of the optional package reasoning-gym, likewise).
      path: `files`: a file, directory or glob (several separated by commas); `tfds`: the data
        directory; `hf`: a dataset name, or a directory written by `save_to_disk`. A relative path
        that does not exist is also looked for below the directory in `$DEPTHGROW_DATA`.
      name: `tfds`: `dataset[/config][:version]`; `hf`: the configuration's name;
        `primitives`: their names, separated by commas, `primitives` for the five of Kapl et al. 2025
        or `all`; their documents take turns; `reasoning_gym`: that of a generator.
      split: `tfds` and `hf`: which split holds the documents.
      text_field: the field of a record that holds the text (`.jsonl`, `.parquet`, tfds, hf).
      document_separator: what stands between the documents of one `.txt` file, `\n\n` for a blank
        line (the escapes `\n`, `\t`, `\f` and `\r` are understood); empty takes each file as one
        document.
      weight: share of the training sequences drawn from this component of a mixture.
      max_bytes, max_documents: stop reading after this many UTF-8 bytes, or documents; 0 reads everything.
        `primitives` and `reasoning_gym`, which have no end, need one of them.
      examples: `primitives`: solved examples of a document.
      questions: `primitives`: how often each of them is asked about; above 1 of `assign_*` only.
      seed: `primitives`, `reasoning_gym`: decides the examples, whatever the seed of the run.
    """

    source: str = "stdlib"
    path: str = ""
    name: str = ""
    split: str = "train"
    text_field: str = "text"
    document_separator: str = ""
    weight: float = 1.0
    max_bytes: int = 0
    max_documents: int = 0
    examples: int = SHOTS + 1
    questions: int = 1
    seed: int = 0


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


def components(cfg: DataConfig) -> list[tuple[str, SourceConfig, str]]:
    """`(name, source, field prefix for error messages)` of each component, at least one."""
    if cfg.mixture:
        return [(name, component, f"data.mixture.{name}.") for name, component in cfg.mixture]
    return [(cfg.source, cfg, "data.")]


def validate(cfg: DataConfig) -> None:
    """Refuses an impossible data config. Raises `UserError` naming the field."""
    names = [name for name, _ in cfg.mixture]
    require(
        all(names) and len(set(names)) == len(names), "data.mixture", names, "names must be unique, not empty"
    )
    for _, component, prefix in components(cfg):
        _validate_source(component, prefix)
    require(
        bool(cfg.tokenizer),
        "data.tokenizer",
        cfg.tokenizer,
        "must be bpe, bytes or the path of a tokenizer.json",
    )
    require(bool(cfg.separator), "data.separator", cfg.separator, "must not be empty")
    require(
        bool(cfg.mask_token) and cfg.mask_token != cfg.separator,
        "data.mask_token",
        cfg.mask_token,
        "must not be empty and must differ from data.separator",
    )
    require(bool(cfg.cache_dir), "data.cache_dir", cfg.cache_dir, "must name a directory")
    require(
        0 < cfg.validation_fraction < 1,
        "data.validation_fraction",
        cfg.validation_fraction,
        "must lie between 0 and 1",
    )
    require(
        cfg.bpe_vocab_size >= 0, "data.bpe_vocab_size", cfg.bpe_vocab_size, "must be 0 (the model's) or more"
    )


def _validate_source(component: SourceConfig, prefix: str) -> None:
    if not isinstance(component, SourceConfig):
        raise UserError(f"{prefix[:-1]}={component!r}: must be a SourceConfig")
    require_choice(prefix + "source", component.source, SOURCES)
    require(
        component.weight > 0 and math.isfinite(component.weight),
        prefix + "weight",
        component.weight,
        "must be above 0",
    )
    require(component.max_bytes >= 0, prefix + "max_bytes", component.max_bytes, "must be 0 (all) or more")
    require(
        component.max_documents == 0 or component.max_documents >= 2,
        prefix + "max_documents",
        component.max_documents,
        "must be 0 (all) or at least 2, of which one is held out",
    )
    if component.source in ("files", "hf"):
        require(
            bool(component.path), prefix + "path", component.path, f"source {component.source} needs a path"
        )
    if component.source == "tfds":
        require(
            bool(component.name),
            prefix + "name",
            component.name,
            "source tfds needs dataset[/config][:version]",
        )
    if component.source == "primitives":
        names = names_of(component.name, prefix + "name")
        for field, most in (("examples", _MOST_EXAMPLES), ("questions", _MOST_QUESTIONS)):
            value = getattr(component, field)
            require(1 <= value <= most, prefix + field, value, f"must lie between 1 and {most}")
        require(
            component.questions == 1 or all(name.startswith("assign_") for name in names),
            prefix + "questions",
            component.questions,
            "must be 1 unless all primitives are named assign_*",
        )
    if component.source == "reasoning_gym":
        require(
            bool(component.name), prefix + "name", component.name, "must name a generator of reasoning-gym"
        )
    if component.source in GENERATED:
        require(
            component.max_bytes > 0 or component.max_documents > 0,
            prefix + "max_bytes",
            component.max_bytes,
            f"{component.source} has no end: must be above 0, or max_documents",
        )
    require(component.seed >= 0, prefix + "seed", component.seed, "must be 0 or more")
    if component.source not in ("stdlib", *GENERATED):
        require(bool(component.text_field), prefix + "text_field", component.text_field, "must name a field")
    if component.source in ("tfds", "hf"):
        require(bool(component.split), prefix + "split", component.split, "must name a split")
