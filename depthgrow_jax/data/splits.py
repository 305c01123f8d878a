"""Which documents are held out for validation, and which generated examples for evaluation."""

import hashlib
from collections.abc import Mapping, Sequence

from depthgrow_jax.errors import UserError

_SCALE = 2**64
SPLITS = ("train", "test")


def digest(text: str) -> bytes:
    """SHA-256 of a document, 32 bytes."""
    return hashlib.sha256(text.encode()).digest()


def held_out(components: Mapping[str, Sequence[bytes]], fraction: float) -> set[bytes]:
    """Digests of the validation documents, given the document digests of each component.

    A document is held out where its digest, read as a number in [0, 1), lies below `fraction`: the
    split depends on content alone, not on order or seed, and equal documents stay on one side, also
    across components. A component that would have no validation document gives its lowest digest;
    one that would have only those keeps its highest for training. Raises `UserError` where a
    component cannot have both.
    """
    chosen: set[bytes] = set()
    for name, digests in components.items():
        distinct = set(digests)
        if len(distinct) < 2:
            raise UserError(
                f"data component {name!r} holds {len(distinct)} distinct document; a train/validation split "
                "needs at least 2 (max_bytes, max_documents limit them; document_separator cuts a .txt file)"
            )
        below = {d for d in distinct if int.from_bytes(d[:8], "big") < fraction * _SCALE}
        chosen |= (below - {max(distinct)} if below == distinct else below) or {min(distinct)}
    for name, digests in components.items():
        if chosen.issuperset(digests):
            raise UserError(
                f"data.validation_fraction={fraction}: holds out every document of component {name!r}, which "
                "shares documents with another; must be lower"
            )
    return chosen


def split_of(content: str) -> str:
    """`train` or `test`: which generated examples are trained on, which are asked; half of all contents each.

    It depends on the content alone, so no seed can bring anything of one split into the other.
    """
    return SPLITS[digest(content)[0] % 2]
