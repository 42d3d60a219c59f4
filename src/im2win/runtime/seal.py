"""Seals a library with what its manifest says, so that a manifest that was changed, or is another library's, is not believed.

The seal is a line behind the library's own bytes, where no loader looks: the SHA-256 digest of the manifest's facts. The manifest in turn
holds the digest of the library with its seal. File names are not among the facts, so that files can be renamed and copied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = b"\nim2win seal 1 "
NAMES = ("library", "weights", "sha256")  # of files, and what can be known only of a sealed library
_LENGTH = len(MARK) + 64 + 1


def _seal(facts: Mapping[str, Any]) -> bytes:
    known = {name: value for name, value in facts.items() if name not in NAMES}
    return MARK + hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest().encode() + b"\n"


def is_sealed(content: bytes, facts: Mapping[str, Any]) -> bool:
    """Whether a library's bytes end in the seal of these facts."""
    return content.endswith(_seal(facts))


def seal(library: Path, facts: Mapping[str, Any]) -> None:
    """Seals a library, or seals it anew."""
    content = library.read_bytes()
    if content[-_LENGTH:].startswith(MARK):
        content = content[:-_LENGTH]
    library.write_bytes(content + _seal(facts))
