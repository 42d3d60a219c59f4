"""Measures a network of the zoo: `optimize` as a user calls it, beside PyTorch's layouts, torch.compile and ONNX Runtime."""

from __future__ import annotations

import copy
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from im2win.bench.cpu import spreads
from im2win.bench.harness import Worker, WorkerError, interleaved
from im2win.bench.peers.subject import Tensors, Trial
from im2win.bench.zoo_networks import SEED, built, calibrated, images
from im2win.frontends.torch.report import Report
from im2win.numerics.reference import error
from im2win.spec.conv2d import Conv2d

OURS = ["ours", "ours_nhwc"]  # of a model as it is, and in channels-last
NCHW, NHWC, COMPILED, ONNX = "torch_nchw", "torch_nhwc", "torch_compile", "onnxruntime"
SUBJECTS = {"cpu": [*OURS, NCHW, NHWC, COMPILED, ONNX], "cuda": [*OURS, NCHW, NHWC, COMPILED]}
MODES = {"cpu": ["eager"], "cuda": ["eager", "graph"]}
ALLOWED = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}  # largest difference from the reference, over its largest output
OWN_ERRORS = 2.0  # an output may also differ by so many times PyTorch's own error in the network's type, if that is more
TIMEOUT = 900.0  # seconds for one request, such as to optimize or compile the network
ROUNDS = 3, 15  # least and most samples of a subject
_LAYER = Conv2d(1, 1, 1, 1, 1, 1)  # the harness requires a layer; a network's subjects have their own inputs


@dataclass(frozen=True)
class Setting:
    """What is run: a network on a batch of images, and the file of its calibrated weights."""

    network: str
    batch: int
    dtype: str
    device: str
    weights: Path | None = None  # random ones, without calibration

    def module(self, dtype: str | None = None) -> Any:
        """The network with its weights, in its own type or another one."""
        return copy.deepcopy(_loaded(self.network, self.weights, self.device)).to(getattr(torch, dtype or self.dtype))

    def images(self, dtype: str | None = None) -> torch.Tensor:
        """The input, in the network's type or another one."""
        return images(self.network, self.batch).to(self.device, getattr(torch, dtype or self.dtype))

    def expected(self) -> Expected:
        """PyTorch's output in a wider type, and what an output in the network's type may differ from it."""
        wider = wider_type(self.dtype)
        with torch.inference_mode():
            exact = flat(self.module(wider)(self.images(wider)))
            own = [error(flat(module(x)), exact) for module, x in (Way(name, self).given() for name in (NCHW, NHWC))]
        return Expected(exact, max(ALLOWED[self.dtype], *(OWN_ERRORS * one for one in own)))


@functools.lru_cache(maxsize=1)
def _loaded(network: str, weights: Path | None, device: str) -> Any:
    """The network in float32 on the device, of which all subjects take copies: to fill large random weights takes seconds."""
    module = built(network)
    if weights is not None:
        module.load_state_dict(torch.load(weights))
    return module.to(device)


@dataclass(frozen=True)
class Expected:
    """An output, and the largest difference from it over its largest value that is allowed."""

    output: np.ndarray[Any, Any]
    allowed: float


def flat(output: Any) -> np.ndarray[Any, Any]:
    """All tensors of an output in one float32 vector."""
    if isinstance(output, torch.Tensor):
        return np.asarray(output.detach().float().cpu().numpy()).ravel()
    parts = output.values() if isinstance(output, dict) else output
    return np.concatenate([flat(part) for part in parts])


def wider_type(dtype: str) -> str:
    """The type of the reference for a network in a type."""
    return "float64" if dtype == "float32" else "float32"


def reference(dtype: str) -> str:
    """What outputs in a type are compared with, in words."""
    return f"PyTorch in {wider_type(dtype)}, or twice PyTorch's own difference where that is more"


def groups(report: Report) -> dict[str, Any]:
    """How many layers of a report of `optimize` there are, how many of them im2win runs, and the problems that it can compute."""
    convs = sorted({str(layer.conv) for layer in report.layers if layer.conv is not None})
    return {"layers": len(report.layers), "ours": report.swapped, "convs": convs}


@dataclass(frozen=True)
class Way:
    """One way to run the network; a subject of `im2win.bench.harness`."""

    name: str
    setting: Setting

    def given(self) -> tuple[Any, torch.Tensor]:
        """The network and its input in this way's layout."""
        x, module = self.setting.images(), self.setting.module().eval()
        if self.name in (NHWC, OURS[1]):
            x, module = x.contiguous(memory_format=torch.channels_last), module.to(memory_format=torch.channels_last)
        return module, x

    def optimized(self, **options: Any) -> tuple[Any, torch.Tensor]:
        """The network after `optimize`, and its input."""
        from im2win.frontends.torch import optimize

        module, x = self.given()
        return optimize(module, x, **options), x

    def ready(self) -> tuple[Callable[[], Any], str]:
        """A call of the network, made once, and the facts of `optimize`'s report as JSON."""
        facts = ""
        if self.name in OURS:
            module, x = self.optimized()
            facts = json.dumps(groups(module.im2win_report))
        else:
            module, x = self.given()
        if self.name == COMPILED:
            torch.compiler.reset()  # networks of one class share a limit of recompilations
            module = torch.compile(module, mode="max-autotune-no-cudagraphs" if self.setting.device == "cuda" else "default")

        def call() -> Any:
            with torch.inference_mode():
                return module(x)

        if self.name == ONNX:
            call = _onnx(module, x)
        call()
        return call, facts

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        """As a subject on a CPU; the layer and its tensors are not used."""
        torch.set_num_threads(threads)
        call, facts = self.ready()
        result: list[Any] = [None]

        def timed() -> None:
            result[0] = call()

        return Trial(timed, lambda: flat(result[0]), facts)


def _onnx(module: Any, x: torch.Tensor) -> Callable[[], Any]:
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="im2win-zoo-") as folder:
        path = str(Path(folder) / "network.onnx")
        torch.onnx.export(module, (x,), path, dynamo=False, input_names=["x"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"x": x.numpy()}
    return lambda: [torch.from_numpy(part) for part in session.run(None, feed)]


def check(output: np.ndarray[Any, Any], expected: Expected) -> float:
    """The error of an output; WorkerError if it has another size, is above what is allowed, or NaN."""
    if output.shape != expected.output.shape:
        raise WorkerError(f"wrong result: {output.size} values, not {expected.output.size}.")
    found = error(output, expected.output)
    if not found <= expected.allowed:
        raise WorkerError(f"wrong result: relative error {found:.2g} is above {expected.allowed:.2g}.")
    return found


def measured(network: str, batch: int, dtype: str, device: str, names: list[str], seconds: float, threads: int) -> list[dict[str, Any]]:
    """A row for each mode: of each subject its spread in ms and its error, or the reason why it failed."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="im2win-zoo-") as folder:
        weights = Path(folder) / "weights.pt"
        setting = Setting(network, batch, dtype, device, weights)
        try:
            if device != "cpu":
                _set_up_gpu()  # before the reference
            torch.save(calibrated(network, device).state_dict(), weights)
            expected = setting.expected()
            if device == "cpu":
                timed = {"eager": _on_cpu(setting, names, expected, seconds, threads)}
            else:
                timed = _on_gpu(setting, names, expected, seconds)
        except Exception as refused:  # any library, any error: it is the network's outcome
            message = f"{type(refused).__name__}: {refused}"[:500]
            timed = {mode: ({}, dict.fromkeys(names, message), {}, {}) for mode in MODES[device]}
    return [_row(network, mode, outcome) | {"seconds": round(time.perf_counter() - start, 1)} for mode, outcome in timed.items()]


Facts = dict[str, dict[str, Any]]  # `groups` of each of our subjects
Outcome = tuple[dict[str, list[float]], dict[str, str], dict[str, float], Facts]


def _row(network: str, mode: str, outcome: Outcome) -> dict[str, Any]:
    samples, failed, errors, facts = outcome
    spread = spreads(samples)
    subjects: dict[str, Any] = {name: {**vars(spread[name]), "error": errors[name]} for name in samples}
    subjects |= {name: {"failed": message} for name, message in failed.items()}
    return {"network": network, "mode": mode, "subjects": subjects, "groups": facts}


def _on_cpu(setting: Setting, names: list[str], expected: Expected, seconds: float, threads: int) -> Outcome:
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    facts: Facts = {}
    with ExitStack() as stack:
        ready: dict[str, Worker] = {}
        for name in names:
            worker = stack.enter_context(Worker(Way(name, setting), threads, TIMEOUT))
            try:
                prepared = worker.prepare(_LAYER, SEED)
                errors[name] = check(prepared.output, expected)
            except WorkerError as refused:
                failed[name] = str(refused)
                continue
            ready[name] = worker
            facts |= {name: json.loads(prepared.algorithm)} if prepared.algorithm else {}
        first, late = interleaved(ready, 1)
        failed |= late
        kept = {name: worker for name, worker in ready.items() if name not in late}
        samples, late = interleaved(kept, _rounds(first, seconds), warmup=0.0)
    return samples, failed | late, errors, facts


def _rounds(first: dict[str, list[float]], seconds: float) -> int:
    """Rounds that take about `seconds` for all subjects, within limits."""
    least, most = ROUNDS
    once = sum(2 * statistics.median(values) + 0.03 for values in first.values())  # a sample follows at least one call to warm up
    return max(least, min(most, int(seconds / once))) if once else least


def _set_up_gpu() -> None:
    """Sets PyTorch up as a peer: its float32 is float32, and not TF32 as by default."""
    from im2win.bench.cuda_harness import set_up_peers

    set_up_peers("float32")


def _on_gpu(setting: Setting, names: list[str], expected: Expected, seconds: float) -> dict[str, Outcome]:
    """All subjects in one process, eager and as CUDA graphs; times are of events."""
    calls: dict[str, Callable[[], Any]] = {}
    graphs: dict[str, Callable[[], Any]] = {}
    failed: dict[str, dict[str, str]] = {mode: {} for mode in MODES["cuda"]}
    errors: dict[str, dict[str, float]] = {mode: {} for mode in MODES["cuda"]}
    facts: Facts = {}
    for name in names:
        for mode, found in (("eager", calls), ("graph", graphs)):
            try:
                if mode == "eager":
                    call, text = Way(name, setting).ready()
                    facts |= {name: json.loads(text)} if text else {}
                else:
                    call = _captured(calls[name])
                errors[mode][name] = check(flat(call()), expected)
                found[name] = call
            except Exception as refused:  # any library, any error: it is that subject's outcome
                failed[mode][name] = failed["eager"].get(name) or f"{type(refused).__name__}: {refused}"[:500]
    return {mode: (_timed(ready, seconds), failed[mode], errors[mode], facts) for mode, ready in (("eager", calls), ("graph", graphs))}


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def _timed(ready: dict[str, Callable[[], Any]], seconds: float, calls: int = 10) -> dict[str, list[float]]:
    """Interleaved samples in seconds per call."""
    event: Any = torch.cuda.Event
    samples: dict[str, list[float]] = {name: [] for name in ready}
    end, (least, most) = time.perf_counter() + seconds, ROUNDS
    for index in range(3 + most):  # three times to warm up
        for name, call in ready.items():
            begin, done = (event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            done.record()
            done.synchronize()
            samples[name].append(begin.elapsed_time(done) / 1e3 / calls)
        if index + 1 >= 3 + least and time.perf_counter() > end:
            break
    return {name: values[3:] for name, values in samples.items()}
