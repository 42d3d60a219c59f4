"""Stages the pages of the documentation for mkdocs: a copy of the texts and the images they show, laid out as in the repository.

python docs/site.py build/docs/pages
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
_LINK = re.compile(r"\]\(([^)\s#]*?)README\.md(#[^)\s]*)?\)")
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def page(text: str) -> str:
    """A text of the repository as a page: a folder's README.md is the folder's index."""
    return _LINK.sub(lambda link: f"]({link[1]}index.md{link[2] or ''})", text)


def stage(folder: Path) -> None:
    """Fills an empty folder with the pages."""
    shutil.rmtree(folder, ignore_errors=True)
    for source in (*(ROOT / name for name in TEXTS), *sorted((ROOT / "docs").rglob("*.md"))):
        text = source.read_text(encoding="utf-8")
        place = (folder / source.relative_to(ROOT)).parent
        place.mkdir(parents=True, exist_ok=True)
        (place / source.name.replace("README", "index")).write_text(page(text), encoding="utf-8")
        for image in _IMAGE.findall(text):
            original = (source.parent / image).resolve()
            copy = folder / original.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, copy)


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
