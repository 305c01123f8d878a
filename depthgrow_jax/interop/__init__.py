"""Models of the ecosystem, in and out: Hugging Face directories and GGUF files in, the former out."""

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.pretrained import Pretrained, Vocabulary

SCHEMES = ("hf:", "gguf:")

__all__ = ["SCHEMES", "Pretrained", "Vocabulary", "is_reference", "open_model"]


def is_reference(place: str) -> bool:
    """Whether `place` names a pretrained model, and not a path of ours."""
    return place.startswith(SCHEMES)


def open_model(reference: str) -> Pretrained:
    """The model that `hf:DIR`, `hf:org/name`, `gguf:FILE` or `gguf:PACKAGE` names, described and checked.

    Weights are read later, by `Pretrained.params`. Raises `UserError` naming file, field or tensor.
    """
    if reference.startswith("hf:"):
        from depthgrow_jax.interop.hf_files import open_hf

        return open_hf(reference)
    if reference.startswith("gguf:"):
        from depthgrow_jax.interop.gguf_files import open_gguf

        return open_gguf(reference)
    raise UserError(f"{reference!r}: is no model; must be hf:DIR, hf:org/name, gguf:FILE or gguf:PACKAGE")
