"""Comparisons of these tests, where none sets its own: im2win's way is faster, since the times of tiny layers decide nothing."""

from __future__ import annotations

from typing import Any

import pytest

from im2win.common.comparison import Comparison


@pytest.fixture(autouse=True)
def ours_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def found(ours: Any, theirs: Any, **how: Any) -> Comparison:
        return Comparison(1e-3, 2e-3, 0.5, 0.01, 9)

    monkeypatch.setattr("im2win.frontends.torch.guard.compare", found)
