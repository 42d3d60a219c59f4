"""What several test files need: the command line in this process, and a model file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kept_builders import Kept, kept
from sampling import mark_exhaustive, mark_slow

from im2win.records.log import Log

# files that take most of a minute and more, and folders whose files take a few seconds each
LONGEST = (
    "test_exact", "test_cuda_exact", "test_cuda_warp_specialized", "test_models_real", "test_docs", "test_cpu_padding", "test_cpu_dot",
    "test_cuda_rearranged", "test_fleet", "test_faults", "test_tuner", "test_cuda_compile", "test_cuda_scheduled_mma", "test_onnxruntime",
    "test_cli", "test_hypothesis", "test_bench", "test_memory", "test_committed", "test_fuzz_kernels", "test_emission",
)  # fmt: skip
SHORT = ("numerics", "spec")

# files whose tests look at the processes that build
ABOUT_PROCESSES = (
    "test_kept_builders", "test_worker_pool", "test_ahead", "test_faults", "test_temporary", "test_fleet", "test_models_batches",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what is generated now")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of workers that take a file at a time, none is to be left alone with a long one at the end; what no sample takes is slow."""
    mark_exhaustive(items)
    mark_slow(items)
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """Where a test's file is in the order of files."""
    name, folder = item.path.stem, item.path.parent.name
    return LONGEST.index(name) if name in LONGEST else len(LONGEST) + (folder in SHORT)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests a timed process never has its CPUs to itself: starting it anew, seconds each time, would not help."""
    monkeypatch.setattr("im2win.bench.harness.RESTARTS", 0)


@pytest.fixture(scope="session")
def kept_processes() -> Iterator[Kept]:
    """Processes that build, kept for the tests of this session."""
    found = Kept()
    yield found
    found.end()


@pytest.fixture(autouse=True)
def kept_builders(request: pytest.FixtureRequest, kept_processes: Kept) -> Iterator[None]:
    """Workers that build keep their processes, but in tests of faults, and in files about processes."""
    if request.node.get_closest_marker("fault") or request.path.stem in ABOUT_PROCESSES:
        yield
        return
    with kept(kept_processes):
        yield


@pytest.fixture(scope="session", autouse=True)
def ceilings_once() -> Iterator[None]:
    """A CPU's ceilings are measured once in a run: each takes processes of its own, and most of a short benchmark's time."""
    from im2win.bench import ceilings

    measure = functools.lru_cache(lambda threads, dtypes: unchanged(threads, dtypes=dtypes))
    unchanged = ceilings.measure

    def once(threads: int, repeats: int = 15, seconds_warmup: float = 0.5, dtypes: Collection[str] = ()) -> ceilings.Ceilings:
        return measure(threads, tuple(dtypes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "measure", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Built operators go to a folder of this run, in the processes that tests start, too."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "IM2WIN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def own_logs(own_cache: Path) -> Iterator[Path]:
    """The user's folder of tuning records is one of this run, in the processes that tests start, too: none reads or writes the real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "IM2WIN_LOGS", str(own_cache.with_name("user_logs")))
        yield own_cache.with_name("user_logs")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """A log in a folder that does not exist yet."""
    return Log(tmp_path / "logs")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `im2win WORDS...` in this process."""
    from im2win.cli.main import main

    def run(*words: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def resnet50_onnx() -> Path:
    """The ResNet-50 graph that the package onnx ships for its own tests (weights left out)."""
    backend = pytest.importorskip("onnx.backend.test")
    return Path(backend.__file__).parent / "data" / "light" / "light_resnet50.onnx"


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of untuned layers the direct form: exact on integers, and found at once. What was selected before does not count."""
    from im2win.builder.cache import Artefacts
    from im2win.builder.selections import Selections
    from im2win.registry.ranking import default_tile

    def choice(self: Any, conv: Any, device: Any, accuracy: Any = "float32") -> tuple[str, Any]:
        return default_tile(conv, "direct/tiled", device, accuracy)

    monkeypatch.setattr(Artefacts, "default_choice", choice)
    monkeypatch.setattr(Selections, "find", lambda self, question: None)
    monkeypatch.setattr(Selections, "keep", lambda self, found: None)


@pytest.fixture(scope="module")
def unrestored() -> Iterator[None]:
    """Sums of two TF32 parts as the tensor core leaves them: sums of small integers are exact, which restoring would change by a rounding.

    `test_sums_of_parts_do_not_shrink` tests the restoration.
    """
    import emulated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("im2win.schedules.cuda.mma.mma_sync.restored", lambda products: 1.0)
        emulated.forget()
        yield
    emulated.forget()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the artefacts that ran in PyTorch, call by call: each passes through Python."""
    from im2win.frontends.torch.bound import Bound

    seen: list[str] = []
    run = Bound.__call__

    def noted(self: Bound, *arguments: Any) -> Any:
        seen.append(self.name)
        return run(self, *arguments)

    monkeypatch.setattr(Bound, "__call__", noted)
    monkeypatch.setattr(Bound, "remember", lambda self: None)
    return seen


@pytest.fixture(params=["library", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """PyTorch's calls of kernels through the compiled library, and all of them through Python."""
    from im2win.frontends.torch import native

    if request.param == "python":
        native.unload()
        monkeypatch.setattr(native, "load", lambda **_: False)
    elif not native.load():
        pytest.skip("there is no C++ compiler, or it lacks Python's headers")
    yield request.param
    native.unload()


@pytest.fixture
def library(direct: None) -> Iterator[None]:
    """PyTorch's calls go through the compiled library."""
    from im2win.frontends.torch import native

    if not native.load():
        pytest.skip("there is no C++ compiler, or it lacks Python's headers")
    yield
    native.unload()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that pass through Python: of sites, and of bound operators."""
    from im2win.frontends.torch.bound import Bound
    from im2win.frontends.torch.call_site import CallSite

    seen: list[str] = []
    general, run = CallSite.general, Bound.__call__
    monkeypatch.setattr(CallSite, "general", lambda self, *given: seen.append("site") or general(self, *given))
    monkeypatch.setattr(Bound, "__call__", lambda self, *given: seen.append("bound") or run(self, *given))
    return seen


@pytest.fixture
def warm() -> tuple[Any, Any]:
    """A module and itself optimised, called before."""
    import torch
    from networks import Residual, with_integers
    from optimizing import X, optimized

    module = with_integers(Residual())
    fast = optimized(module)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            for _ in range(3):
                assert torch.equal(fast(X), module(X))
    return module, fast
