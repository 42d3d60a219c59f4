"""The study of fused activations: both kernels of a layer are checked, then timed; a layer that fails keeps the others."""

from __future__ import annotations

from typing import Any

import pytest

from im2win.bench.harness import Worker, WorkerError
from im2win.spec.conv2d import Conv2d
from im2win.studies.epilogues import measure

SILU, RELU = (Conv2d(1, 8, 12, 12, 16, 1, bias=True, activation=name) for name in ("silu", "relu"))


def test_layers_are_timed_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    prepare = Worker.prepare

    def refuse(self: Worker, conv: Conv2d, seed: int) -> Any:
        if conv == RELU:
            raise WorkerError("no such layer")
        return prepare(self, conv, seed)

    monkeypatch.setattr(Worker, "prepare", refuse)
    silu, relu = measure([SILU, RELU], threads=1, rounds=2, progress=lambda _, row: seen.append(row))
    assert seen == [silu, relu] and relu == {"conv": str(RELU), "activation": "relu", "failed": "no such layer"}
    assert silu["cost"] == pytest.approx(silu["ms"] / silu["without_ms"] - 1) and silu["spread"]["without"]["samples"] == 2
