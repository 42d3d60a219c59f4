"""What the digests of the generator's source cover."""

from __future__ import annotations

import re

import pytest

from im2win.registry import sources

_IMPORT = re.compile(r"^from im2win\.(packing\.\w+) import", re.MULTILINE)


@pytest.mark.parametrize("target", sources.TARGETS)
def test_packings_that_generators_use_are_in_the_digest(target: str) -> None:
    """A packing for GPUs alone changes no kernel of a CPU and is no part of its digest; `codec` names all of them, and makes no kernel."""
    chosen = {path.relative_to(sources.ROOT).with_suffix("").as_posix().replace("/", ".") for path in sources.choice_files(target)}
    generators = [path for path in sources.choice_files(target) if path.suffix == ".py" and path.name != "codec.py"]
    used = {name for path in generators for name in _IMPORT.findall(path.read_text("utf-8"))}
    assert used <= chosen and used
    assert ("packing.wgmma_smem" in chosen) == (target == "cuda")
    assert ("packing.cpu_dot" in chosen) == (target == "cpu")
