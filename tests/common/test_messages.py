"""How messages begin that users see: with the argument or the fact, never with the name of a function or class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from im2win.registry import sources

# Programs and libraries that a message tells of, as tables of benchmarks name them.
SUBJECTS = {"cuDNN", "im2win", "inductor", "numpy", "nvcc", "nvrtc", "torch", "tvm"}
# Their texts are part of the proofs of records.
GENERATORS = {path.resolve() for target in sources.TARGETS for path in sources.files(target)}


def raised(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first text of every error that a file makes; what is formatted into it reads {}. A text may have a name of its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {one.targets[0].id: one.value for one in tree.body if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args or not re.search(r"(Error|BadParameter)$", ast.unparse(node.func)):
            continue
        first = node.args[0]
        if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "format":
            first = first.func.value
        if isinstance(first, ast.Name):
            first = named.get(first.id, first)
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield node.lineno, first.value
        elif isinstance(first, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in first.values)


def internal(message: str) -> bool:
    """Whether a message begins with a name and a colon, as "layers_of: `source` must"."""
    begins = re.match(r"([A-Za-z_][\w.]*): ", message)
    return begins is not None and begins[1] not in SUBJECTS


def test_what_is_internal() -> None:
    assert internal("layers_of: `source` must be a file.") and internal("Log.prune: `keep` must be at least 1.")
    assert not internal("`source` (=a) must be a file: none is there.") and not internal("{}: no manifest there.")


def test_no_message_begins_with_an_internal_name() -> None:
    files = [path for path in sources.ROOT.rglob("*.py") if path.resolve() not in GENERATORS]
    for linked in ("compute", "schedules", "reconstruct"):  # rglob does not follow links
        files += [path for path in (sources.ROOT / linked).rglob("*.py") if path.resolve() not in GENERATORS]
    found = [(path, line, text) for path in files for line, text in raised(path)]
    assert len(found) > 200 and any("must be a whole ONNX model" in text for _, _, text in found)  # that text has a name
    assert [f"{path}:{line}: {text}" for path, line, text in found if internal(text)] == []
