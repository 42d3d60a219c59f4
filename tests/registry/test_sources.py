"""Digests of the generator's source: what is executed counts, how it is written down and where it lies does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from im2win.registry import sources
from im2win.registry.sources import code_digest, combined, cpp, files

CODE = '''
"""A module."""
SIZE: int = 4

def area(width, *, height=1.5):
    """Of a rectangle."""
    total = [w for w in (width,) if w is not None]
    return f"{total[0] * height:.1f}"
'''


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("A module.", "Another text, longer."),
        CODE.replace('"""Of a rectangle."""', "# no docstring"),
        CODE.replace("int = 4\n", 'int = 4\n"""Of the attribute."""\n'),
        CODE.replace("height=1.5", "height = 1.50"),
        CODE.replace('f"{total[0] * height:.1f}"', "(\n        f'{(total[0] * height):.1f}'\n    )"),
    ],
)
def test_wording_and_layout_do_not_count(same: str) -> None:
    assert same != CODE and combined([same]) == combined([CODE])


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("= 4", "= 5"),
        CODE.replace("1.5", "None"),
        CODE.replace("* height", "+ height"),
        CODE.replace("is not None", "is None"),
        CODE.replace("(width,)", "[width]"),
        CODE.replace(":.1f", ":.2f"),
        CODE.replace("return", "yield"),
    ],
)
def test_everything_that_runs_counts(other: str) -> None:
    assert other != CODE and combined([other]) != combined([CODE])


def test_the_order_of_files_does_not_count() -> None:
    assert combined(["x = 1", "x = 2"]) == combined(["x = 2", "x = 1"]) != combined(["x = 1", "x = 1"])


def test_the_same_on_every_python() -> None:
    """Records made with one version of Python apply with another."""
    assert combined([CODE]) == "3cefd78f981ba9c9"


def test_comments_of_device_functions_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "device.hpp"
    path.write_text("// adds\nint add(int a, int b) { return a + b; }\n")
    before = cpp(path)
    path.write_text("int add(int a,\n        int b) { /* both */ return a + b; }\n")
    assert cpp(path) == before
    path.write_text("int add(int a, int b) { return a - b; }\n")
    assert cpp(path) != before


@pytest.mark.parametrize("target", sources.TARGETS)
def test_every_pattern_finds_files(target: str) -> None:
    assert all(list(sources.ROOT.glob(pattern)) for pattern in sources._GENERATORS[target])
    assert len(code_digest(target)) == sources.DIGITS


# What is imported, but decides nothing about a kernel whose tile is given.
_NO_GENERATOR = {
    "im2win", "im2win.device.affinity", "im2win.device.cpu", "im2win.device.gpu", "im2win.registry.backends",
    "im2win.registry.cpu_backend", "im2win.registry.cpu_lowering", "im2win.registry.cuda_backend", "im2win.registry.interface",
    "im2win.registry.ranking", "im2win.registry.sources", "im2win.spec.captured_layers", "im2win.spec.suites",
}  # fmt: skip
_EMIT = """
import sys
from im2win.records.emission import emitted_now
from im2win.records.log import Log
from im2win.records.lookup import PACKAGED
records = {{(one.algorithm, one.conv2d.dtype): one for one in Log(PACKAGED) if one.target == {target!r}}}
for record in records.values():
    emitted_now(record)
print(*sorted(name for name in sys.modules if name.startswith("im2win")))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", sources.TARGETS)
def test_every_module_that_emits_counts(target: str) -> None:
    """A module that a kernel goes through, but no digest covers, would let a change of it pass unseen."""
    done = subprocess.run([sys.executable, "-c", _EMIT.format(target=target)], capture_output=True, text=True, check=True)
    covered = {path.relative_to(sources.ROOT) for each in sources.TARGETS for path in files(each)}  # the registry imports both's schedules
    missed = []
    for name in done.stdout.split():
        path = Path(*name.split(".")[1:])
        module = path.with_suffix(".py") if path.parts else Path("__init__.py")
        package = path / "__init__.py"
        known = module in covered or package in covered or sources.chooses(path)
        decides_nothing = name in _NO_GENERATOR or name.split(".")[1] in ("common", "records", "runtime")
        if not known and not decides_nothing and (sources.ROOT / module).exists():
            missed.append(name)
    assert not missed
