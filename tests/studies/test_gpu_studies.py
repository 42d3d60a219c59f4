"""What the studies on a GPU share: words of their scripts, and peers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from scripts import script

from im2win.bench import cuda_harness
from im2win.studies import gpu_study

SLIDING, WINOGRAD = "sliding_window.py", "winograd_tensor_cores.py"


@pytest.mark.parametrize(
    "name, words, message",
    [
        (SLIDING, ["--blocks", "4,x"], "argument --blocks: invalid edges value: '4,x'"),
        (SLIDING, ["--layers", "image9"], "`--layers` (='image9') must name layers of the workload"),
        (SLIDING, ["--rounds", "0"], "`rounds` (=0) must be at least 1"),
        (WINOGRAD, ["--batches", "1,x"], "argument --batches: invalid numbers value: '1,x'"),
        (WINOGRAD, ["--layers", "map9"], "`--layers` (='map9') must name layers of the workload"),
        (WINOGRAD, ["--tries", "0"], "`tries` (=0), `int8_tries` (=4) and `rounds` (=15) must be at least 1"),
    ],
)
def test_bad_words_are_one_line(name: str, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--json", "never.json", *words])
    with pytest.raises(SystemExit) as ended:
        script(f"benchmarks/{name}").main()
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_cudnn_without_memory_for_its_workspace_costs_no_other_form(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def none(bench: Any, accuracy: str) -> Iterator[None]:
        raise RuntimeError("CUDA out of memory")
        yield

    monkeypatch.setattr(gpu_study, "cudnn_subjects", none)
    with gpu_study.every_peer(None) as peers:  # type: ignore[arg-type]
        names = [name for name, _ in peers]
        _, failed = cuda_harness.prepared(peers[2:])
    assert names == ["torch_nchw", "torch_nhwc", "cudnn_all"] and failed == {"cudnn_all": "CUDA out of memory"}
