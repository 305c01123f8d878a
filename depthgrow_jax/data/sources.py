"""Sources of documents: every source yields texts in a fixed order."""

import os
import pathlib
import re
import sysconfig
from collections.abc import Iterator

from depthgrow_jax.data import primitive_text, reasoning_gym
from depthgrow_jax.data.catalogs import read_hf, read_tfds
from depthgrow_jax.data.config import SourceConfig
from depthgrow_jax.data.readers import read_files
from depthgrow_jax.errors import UserError

# Third-party packages are not the standard library, and test suites repeat it and hold broken files.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Written when this Python was built: they name the build machine's paths.
_BUILD_RECORDS = ("_sysconfigdata", "config-")
_SURROGATES = re.compile("[\ud800-\udfff]")


def documents(component: SourceConfig, field: str) -> list[str]:
    """All documents of one source, in a fixed order, each with some text other than white space.

    Reading stops after `max_documents`, and at `max_bytes` UTF-8 bytes; the document that crosses that limit
    is cut there.
    Surrogates, which UTF-8 cannot carry, become U+FFFD unless they pair up. `field` prefixes the
    config field in error messages. Raises `UserError` if nothing is left.
    """
    texts, left = [], component.max_bytes
    for text in _READERS[component.source](component, field):
        text = _without_surrogates(text)
        if component.max_bytes:
            raw = text.encode()
            text = raw[:left].decode(errors="ignore")
            left -= len(raw)
        if text.strip():
            texts.append(text)
        if (component.max_bytes and left <= 0) or len(texts) == component.max_documents > 0:
            break
    if not texts:
        raise UserError(f"{field}path={component.path!r}: {component.source} source holds no text")
    return texts


def stdlib_files(root: pathlib.Path) -> list[pathlib.Path]:
    """The `.py` files below `root`, sorted by relative path.

    Left out are directories of third-party packages and of tests, and the records of this Python's build.
    """
    found = []
    for top, directories, names in os.walk(root):
        # Pruned in place, so that a large site-packages is not walked.
        directories[:] = [d for d in directories if d not in _NOT_STDLIB and not d.startswith(_BUILD_RECORDS)]
        kept = (n for n in names if n.endswith(".py") and not n.startswith(_BUILD_RECORDS))
        found += [pathlib.Path(top, n) for n in kept]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_stdlib(component: SourceConfig, field: str) -> Iterator[str]:
    """One document per file of the running Python's standard library.

    Bytes that are not UTF-8 become U+FFFD.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib_files(root):
        try:
            yield path.read_bytes().decode("utf-8", errors="replace")
        except OSError as e:
            raise UserError(f"{field}source='stdlib': {path} cannot be read: {e}") from e


def read_primitives(component: SourceConfig, field: str) -> Iterator[str]:
    """Solved examples of reasoning primitives, of the split that no evaluation asks; without end."""
    names = primitive_text.names_of(component.name, f"{field}name")
    yield from primitive_text.documents(
        names, component.seed, count=component.examples, questions=component.questions
    )


def read_reasoning_gym(component: SourceConfig, field: str) -> Iterator[str]:
    """Solved questions of a generator of reasoning-gym, of the split that no evaluation asks."""
    where = f"{field}name={component.name!r}"
    for solved in reasoning_gym.questions(component.name, component.seed, "train", where):
        yield solved.text


def _without_surrogates(text: str) -> str:
    if not _SURROGATES.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_READERS = {
    "stdlib": read_stdlib,
    "files": read_files,
    "tfds": read_tfds,
    "hf": read_hf,
    "primitives": read_primitives,
    "reasoning_gym": read_reasoning_gym,
}
