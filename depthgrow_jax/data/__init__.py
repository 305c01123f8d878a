"""Text sources, tokenizers and batches that are a pure function of (seed, step)."""

from depthgrow_jax.data.config import DataConfig, SourceConfig, validate
from depthgrow_jax.data.corpus import Corpus, load

__all__ = ["Corpus", "DataConfig", "SourceConfig", "load", "validate"]
