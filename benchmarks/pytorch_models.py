"""Whole models in PyTorch, each way to run them: eager or compiled, plain or with im2win, NCHW or channels-last; checked, then timed.

    python benchmarks/pytorch_models.py --model resnet50 --json benchmarks/studies/DEVICE/pytorch-resnet50-float32-b1.json
    python benchmarks/pytorch_models.py --device cuda --batch 32 --dtype float16 --json ...

A way is named (plain|ours)_(eager|compile)_(nchw|nhwc). On a CPU each has a process of its own, as in `im2win bench`; on a GPU all share
one, and each call is timed by two events. Rounds are interleaved. What is done once (tracing, compiling, packing) is outside the time.
Outputs are checked against the model in float64; the model is that of examples/05_pytorch_resnet.py, with random weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import im2win.torch
from im2win.bench.cpu import commit, spreads, versions
from im2win.bench.harness import Worker, WorkerError, interleaved
from im2win.bench.peers.subject import Tensors, Trial
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.numerics.reference import error
from im2win.records.record import utc_now
from im2win.registry.backends import backend_for, device_for
from im2win.spec.accuracy import checked_accuracy
from im2win.spec.conv2d import Conv2d
from im2win.studies.entries import PYTORCH, SCHEMA

SEED = 0
MODELS = {"resnet18": 18, "resnet50": 50}
WAYS = ["_".join(words) for words in itertools.product(("plain", "ours"), ("eager", "compile"), ("nchw", "nhwc"))]
CALLS = 10
ALLOWED = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}  # of the largest output: that the way computes the model, not how exactly


@dataclass(frozen=True)
class Setting:
    """What is run: a model on square images, and how `optimize` is asked."""

    model: str
    size: int
    batch: int
    dtype: str
    device: str
    accuracy: Any
    untuned: Any
    logs: Path | None

    @property
    def stem(self) -> Conv2d:
        """A problem whose input is the model's."""
        return Conv2d(self.batch, 3, self.size, self.size, 64, 7, 2, 3)

    def network(self, dtype: torch.dtype) -> torch.nn.Module:
        """The model with the same random weights every time."""
        path = Path(__file__).resolve().parent.parent / "examples" / "05_pytorch_resnet.py"
        spec = importlib.util.spec_from_file_location("resnet_example", path)
        assert spec is not None and spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        torch.manual_seed(SEED)
        module: torch.nn.Module = example.resnet(MODELS[self.model]).to(self.device, dtype)
        return module

    def images(self) -> torch.Tensor:
        """The input, float32 on the CPU."""
        return torch.from_numpy(Tensors.random(self.stem, SEED).data)

    def expected(self) -> np.ndarray[Any, Any]:
        """The output in float64, of the weights and images as they are in the model's type."""
        dtype = getattr(torch, self.dtype)
        with torch.inference_mode():
            y = self.network(dtype).double()(self.images().to(self.device, dtype).double())
        return np.asarray(y.cpu().numpy())


@dataclass(frozen=True)
class Way:
    """One way to run the model; a subject of `im2win.bench.harness`."""

    name: str
    setting: Setting

    def ready(self) -> tuple[Any, torch.Tensor, Any]:
        """The module, called once, its input, and `optimize`'s report or None."""
        kind, mode, layout = self.name.split("_")
        dtype = getattr(torch, self.setting.dtype)
        order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
        module: Any = self.setting.network(dtype).to(memory_format=order)
        x = self.setting.images().to(self.setting.device, dtype).contiguous(memory_format=order)
        report = None
        if kind == "ours":
            options = {"logs": self.setting.logs, "untuned": self.setting.untuned, "accuracy": self.setting.accuracy}
            module = im2win.torch.optimize(module, x, **options)
            report = module.im2win_report
        if mode == "compile":
            module = torch.compile(module)
        with torch.inference_mode():
            module(x)
        return module, x, report

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        """As a subject on a CPU; `conv` only says what the input is."""
        torch.set_num_threads(threads)
        module, x, report = self.ready()
        result: list[Any] = [None]

        def call() -> None:
            with torch.inference_mode():
                result[0] = module(x)

        summary = "" if report is None else json.dumps(layers_of(report))
        return Trial(call, lambda: np.asarray(result[0].numpy()), summary)


def layers_of(report: Any) -> list[dict[str, Any]]:
    """What `optimize` did, as plain values."""
    return [asdict(layer) | {"conv": None if layer.conv is None else str(layer.conv)} for layer in report.layers]


def check(output: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], dtype: str) -> float:
    """The error of an output; WorkerError if it is above what is allowed, or NaN."""
    found = error(output, expected)
    if not found <= ALLOWED[dtype]:
        raise WorkerError(f"wrong result: relative error {found:.2g} is above {ALLOWED[dtype]:.2g}.")
    return found


def on_cpu(setting: Setting, ways: list[str], rounds: int) -> tuple[dict[str, Any], dict[str, str], list[Any]]:
    """Samples in seconds and errors by way, messages of those that failed, and what `optimize` did."""
    threads, expected = backend_for(device_for("cpu")).threads, setting.expected()
    errors, failed, layers = {}, {}, []
    with ExitStack() as stack:
        ready: dict[str, Worker] = {}
        for name in ways:
            worker = stack.enter_context(Worker(Way(name, setting), threads))
            try:
                prepared = worker.prepare(setting.stem, SEED)
                errors[name] = check(prepared.output, expected, setting.dtype)
            except WorkerError as refused:
                failed[name] = str(refused)
                continue
            ready[name] = worker
            layers = json.loads(prepared.algorithm) if prepared.algorithm else layers
        samples, late = interleaved(ready, rounds)
    return {name: (values, errors[name]) for name, values in samples.items()}, failed | late, layers


def on_gpu(setting: Setting, ways: list[str], rounds: int) -> tuple[dict[str, Any], dict[str, str], list[Any]]:
    """The same on a GPU, in one process; a sample is the mean of `CALLS` calls in a row, as a program makes them that has more to do."""
    from im2win.bench.cuda_harness import set_up_peers

    set_up_peers(setting.accuracy)
    expected = setting.expected()
    ready, errors, failed, layers = {}, {}, {}, []
    with torch.inference_mode():
        for name in ways:
            try:
                module, x, report = Way(name, setting).ready()
                errors[name] = check(module(x).double().cpu().numpy(), expected, setting.dtype)
            except Exception as refused:  # any library, any error: it is that way's outcome
                failed[name] = f"{type(refused).__name__}: {refused}"[:500]
                continue
            ready[name] = module, x
            print(f"{name} ready", file=sys.stderr, flush=True)
            layers = layers_of(report) if report is not None else layers
        samples: dict[str, list[float]] = {name: [] for name in ready}
        for name in [*ready] * 3 + [*ready] * rounds:  # three times to warm up
            module, x = ready[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                module(x)
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3 / CALLS)
    return {name: (values[3:], errors[name]) for name, values in samples.items()}, failed, layers


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--size", type=int, default=224, help="edge of the images")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=ALLOWED, default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--accuracy", type=checked_accuracy, default="float32", help="as for `im2win tune`")
    parser.add_argument("--untuned", choices=("default", "keep"), default="default", help="what `optimize` gives layers without a record")
    parser.add_argument("--logs", type=Path, help="folder of tuning records")
    parser.add_argument("--ways", default=",".join(WAYS), help="only these, with commas between them")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    ways = options.ways.split(",")
    if unknown := [name for name in ways if name not in WAYS]:
        parser.error(f"`--ways` (={','.join(unknown)}) must be among {', '.join(WAYS)}.")
    names = ("model", "size", "batch", "dtype", "device", "accuracy", "untuned", "logs")
    setting = Setting(**{name: getattr(options, name) for name in names})
    try:
        device: Any = device_for(setting.device)
    except NoGpuError as missing:
        parser.error(str(missing))
    timed, failed, layers = (on_gpu if setting.device == "cuda" else on_cpu)(setting, ways, options.rounds)
    spread = spreads({name: values for name, (values, _) in timed.items()})
    rows: dict[str, Any] = {name: {**asdict(spread[name]), "error": found} for name, (_, found) in timed.items()}
    rows |= {name: {"failed": message} for name, message in failed.items()}
    facts = {"device": device.name, "brand": device.brand, "threads": getattr(device, "threads", 1) if setting.device == "cpu" else 1}
    result = {
        "study": PYTORCH, "schema": SCHEMA, "model": setting.model, "size": setting.size, "batch": setting.batch, "dtype": setting.dtype,
        "accuracy": setting.accuracy, "untuned": setting.untuned, **facts, "versions": versions(), "commit": commit(), "date": utc_now(),
        "digests": digests(setting.device), "unit": "ms", "ways": {name: rows[name] for name in ways}, "layers": layers,
    }  # fmt: skip
    replace_json(options.json, result)
    for name in ways:
        row = rows[name]
        print(f"{name:20} " + (f"{row['median']:.3f} ms, error {row['error']:.1e}" if "median" in row else row["failed"]), flush=True)


if __name__ == "__main__":
    import pytorch_models  # under its own name, so that the processes that run the ways can import them

    pytorch_models.main()
