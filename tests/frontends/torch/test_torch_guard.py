"""`optimize` keeps PyTorch's path where im2win's is not faster, layer by layer and as a whole, and its report says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import Residual, with_integers  # noqa: E402
from optimizing import Heads, X, equal  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.common.comparison import Comparison  # noqa: E402
from im2win.frontends.torch import native  # noqa: E402
from im2win.frontends.torch.guard import WHOLE_S  # noqa: E402

Rule = Callable[[Any], float]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Sets what comparisons find: ratios of ours to theirs, of sites one after the other and of the whole. Returns what was compared."""

    def use(*sites: float, whole: float = 0.5, noise: float = 0.01) -> list[str]:
        seen: list[str] = []
        left = list(sites)

        def found(ours: Any, theirs: Any, *, seconds: float = 0.0, synchronize: Any = None) -> Comparison:
            assert ours() is not None and theirs() is not None  # both run
            seen.append("whole" if seconds == WHOLE_S else "site")
            ratio = whole if seconds == WHOLE_S else left.pop(0) if left else 0.5
            return Comparison(ratio * 1e-3, 1e-3, ratio, noise, 9)

        monkeypatch.setattr("im2win.frontends.torch.guard.compare", found)
        return seen

    return use


def two() -> nn.Module:
    return with_integers(nn.Sequential(nn.Conv2d(5, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)))


def optimized(module: nn.Module, cache: Path, **how: Any) -> Any:
    return im2win.torch.optimize(module, X, cache=cache, **how)


def test_the_slower_layer_stays_with_pytorch(direct: None, compared: Any, tmp_path: Path) -> None:
    seen, module = compared(0.5, 1.5), two()
    fast = optimized(module, tmp_path)
    first, second = fast.im2win_report.layers
    assert seen == ["site", "site", "whole"] and fast.im2win_report.swapped == 1
    assert first.algorithm and first.times.faster
    assert not second.algorithm and second.reason == "PyTorch is as fast or faster (default tile)" and second.times.slower
    equal(fast, module)


@pytest.mark.parametrize("ratio", [1.0, 0.995])
def test_as_fast_within_the_noise_is_not_faster(direct: None, compared: Any, tmp_path: Path, ratio: float) -> None:
    compared(ratio, ratio)
    assert optimized(two(), tmp_path).im2win_report.swapped == 0


def test_a_second_call_compares_nothing_again(direct: None, compared: Any, tmp_path: Path) -> None:
    module = two()
    compared(0.5, 1.5)
    before = optimized(module, tmp_path).im2win_report.layers
    seen = compared(1.5, 0.5)
    assert optimized(module, tmp_path).im2win_report.layers == before and not seen


def test_a_disturbed_comparison_is_not_kept(direct: None, compared: Any, tmp_path: Path) -> None:
    module = two()
    compared(0.5, 0.5, noise=0.3)
    optimized(module, tmp_path)
    seen = compared()
    optimized(module, tmp_path)
    assert seen == ["site", "site", "whole"]


def test_equal_layers_are_compared_once(direct: None, compared: Any, tmp_path: Path) -> None:
    seen = compared()
    optimized(with_integers(nn.Sequential(*(nn.Conv2d(5, 5, 1) for _ in range(3)))), tmp_path)
    assert seen == ["site", "whole"]


def test_a_path_with_other_operators_is_another_path(direct: None, compared: Any, tmp_path: Path) -> None:
    seen = compared()
    norm = nn.Sequential(nn.Conv2d(5, 8, 1, bias=False), nn.BatchNorm2d(8)).eval()
    for module in (norm, with_integers(nn.Sequential(nn.Conv2d(5, 8, 1)))):
        optimized(module, tmp_path)
    assert seen == ["site", "whole"] * 2


class Hidden(nn.Module):
    """Its parameters' shapes are in no submodule's words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 5, 1)
        self.narrow, self.wide = nn.Parameter(torch.ones(9, width)), nn.Parameter(torch.ones(width, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) @ self.narrow @ self.wide


def test_the_whole_is_compared_again_where_it_may_differ(
    direct: None, compared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other shapes inside, operators around the convolutions, examples, versions and threads, and calls through Python."""
    seen, module = compared(), two()

    def news(module: nn.Module, x: torch.Tensor = X) -> list[str]:
        before = len(seen)
        im2win.torch.optimize(module, x, cache=tmp_path)
        return seen[before:]

    assert news(module) == ["site", "site", "whole"] and not news(two())
    assert news(nn.Sequential(*module, nn.Flatten()).eval()) == ["whole"]
    assert news(module, X[..., :5])[-1:] == ["whole"]
    x = torch.ones(1, 5, 9, 9)
    assert news(Hidden(3).eval(), x) == ["site", "whole"] and news(Hidden(4).eval(), x) == ["whole"] and not news(Hidden(4).eval(), x)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "3.0")
        assert news(module) == ["site", "site", "whole"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert news(module) == ["site", "site", "whole"]
    native.unload()
    with monkeypatch.context() as patch:
        patch.setattr(native, "load", lambda: False)
        assert news(module) == ["site", "site", "whole"]
    assert not news(module), "it is loaded again"


def test_slower_as_a_whole_gives_pytorch_back(
    direct: None, compared: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compared(whole=1.2)
    module = with_integers(Residual())
    fast = optimized(module, tmp_path)
    assert fast.im2win_report.given_back and fast.im2win_report.swapped == 0 and "slower as a whole" in caplog.text
    assert "PyTorch's own path stays" in str(fast.im2win_report) and isinstance(fast, type(module))
    equal(fast, module)


def test_without_a_guard_nothing_is_timed(direct: None, compared: Any, tmp_path: Path) -> None:
    seen = compared(1.5, 1.5, whole=2.0)
    report = optimized(two(), tmp_path, guard=False).im2win_report
    assert seen == [] and report.swapped == 2 and report.whole is None and report.share_left is None


def test_a_convolution_on_several_shapes_is_kept_for_some(direct: None, compared: Any, tmp_path: Path) -> None:
    compared(0.5, 0.5, 1.5)
    module = with_integers(Heads())
    fast = optimized(module, tmp_path)
    rows = [layer for layer in fast.im2win_report.layers if layer.name == "head"]
    assert [bool(row.algorithm) for row in rows] == [True, False]
    with torch.inference_mode():
        for _ in range(3):
            assert all(map(torch.equal, fast(X), module(X)))


def test_a_module_that_writes_into_its_input_is_compared_on_copies(direct: None, compared: Any, tmp_path: Path) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(5, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            x.add_(1)
            return y

    x, compare = X.clone(), compared()
    im2win.torch.optimize(with_integers(Writes()), x, cache=tmp_path)
    assert compare == ["site", "whole"] and torch.equal(x, X)


def test_the_report_says_all(direct: None, compared: Any, tmp_path: Path) -> None:
    compared(0.2, 1.5, whole=0.8)
    report = optimized(two(), tmp_path).im2win_report
    assert report.share_left == pytest.approx(0.75) and report.untuned == 2
    text = str(report)
    assert "im2win ms" in text and "0.200" in text and "1.25x" in text and "75% of this time" in text and "optimize(..., trials=64)" in text
    values = json.loads(report.to_json())
    assert (values["convolutions"], values["on_im2win"], values["whole"]["faster"]) == (2, 1, True)
    assert [row["conv"] for row in values["layers"]] == [str(row.conv) for row in report.layers]


def test_tensors_in_lists_are_compared_as_a_whole(direct: None, compared: Any, tmp_path: Path) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(5, 8, 1)

        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return self.conv(xs[0])

    seen = compared()
    report = im2win.torch.optimize(with_integers(Listed()), ([X],), cache=tmp_path).im2win_report
    assert seen == ["site", "whole"] and report.whole is not None


def test_what_it_meets_is_tuned(direct: None, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    report = optimized(two(), tmp_path / "cache", trials=2, logs=logs).im2win_report
    assert [row.reason for row in report.layers] == ["exact", "exact"] and report.untuned == 0
    assert len(list(logs.glob("*/*.jsonl"))) == 2


@pytest.mark.parametrize("trials", [0, -1, 1.5, True])
def test_trials_are_checked(trials: Any) -> None:
    with pytest.raises(ValueError, match="`trials`"):
        im2win.torch.optimize(two(), X, trials=trials)
