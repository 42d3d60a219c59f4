"""What a call costs beside its kernel: an optimised module's call, the operator's through PyTorch's dispatcher, and PyTorch's own.

    python benchmarks/op_overhead.py [--device cuda] --json benchmarks/studies/DEVICE/op-overhead.json

The layer is so small that its kernel takes about nothing; on a GPU calls are only issued, and waited for after the last one. Rows are
cumulative: the kernel alone (arguments converted already; TVM's call of it counts as the kernel's), the bound layer (arguments checked,
output made), the module's site (parameters checked for changes), the site named by its place (dispatched, as compiled programs call it),
the operator with its parameters (as exported programs do), and PyTorch's convolution of the same layer.
Calls run under inference_mode, and those of modules and operators under no_grad, too, where autograd's dispatch key stands before the
kernel. A row's overhead is the median, over rounds, of its time less the kernel's in the same round. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

import im2win.torch
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.frontends.torch import conv_op
from im2win.records.record import utc_now
from im2win.registry.backends import backend_for, device_for
from im2win.reports.deploy import NO_GRAD
from im2win.studies.entries import OVERHEAD, SCHEMA

CALLS = 200
THROUGH_PYTORCH = ("module", "place", "operator", "torch_module")


def times(functions: dict[str, Callable[[], object]], rounds: int, wait: Callable[[], object]) -> dict[str, list[float]]:
    """Microseconds a call of each function, a sample a round, rounds interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, call in functions.items():
            for _ in range(CALLS // 4):
                call()
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
            wait()
    return samples


def rows_of(samples: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of each way median, least, and median overhead over the kernel, in microseconds."""
    kernel = samples["kernel"]
    return {
        name: {
            "median": statistics.median(values),
            "least": min(values),
            "overhead": statistics.median(value - alone for value, alone in zip(values, kernel, strict=True)),
        }
        for name, values in samples.items()
    }


def subjects(channels_last: bool, device: str) -> dict[str, Callable[[], object]]:
    """The ways to call one small layer, with normalisation and activation fused where the way has that."""
    torch.manual_seed(0)
    order = torch.channels_last if channels_last else torch.contiguous_format
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval().to(device, memory_format=order)
    x = torch.randn(1, 8, 4, 4, device=device).contiguous(memory_format=order)
    fast = im2win.torch.optimize(module, x, guard=False)
    site: Any = fast._im2win.site_0
    parameters = site.source.parameters()
    bound = site._route(x, parameters)
    bound.refresh(parameters)
    layer = bound._layer
    data = x.permute(0, 2, 3, 1) if channels_last else x
    out = torch.empty_like(data)
    given = [one if device == "cuda" else tvm_ffi.from_dlpack(one) for one in (data, out)]
    source, (weight, bias, *norm) = site.source, parameters
    numbers = source.eps, list(source.stride), list(source.padding), list(source.dilation), source.groups, source.activation
    arguments = x, weight, bias, None, *norm, *numbers, next(iter(site._kernels.values()))
    kernel = layer.launch.product
    return {
        "kernel": lambda: kernel(given[0], *layer._packed, given[1]),
        "layer": lambda: layer(data),
        "site": lambda: site(x),
        "module": lambda: fast(x),
        "place": lambda: conv_op.at_site(x, None, site.place),
        "operator": lambda: conv_op.conv2d(*arguments),
        "torch_conv2d": lambda: torch.conv2d(x, module[0].weight, module[0].bias),
        "torch_module": lambda: module(x),
    }


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device` (=cuda) needs a GPU that PyTorch can use.")
    backend = backend_for(device_for(options.device))
    facts = {"device": backend.name, "torch": torch.__version__, "date": utc_now(), "unit": "us"}
    result: dict[str, Any] = {"study": OVERHEAD, "schema": SCHEMA, **facts, "digests": digests(backend.target), "layouts": {}}
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    for layout in ("NCHW", "NHWC"):
        ways = subjects(layout == "NHWC", options.device)
        with torch.inference_mode():
            samples = times(ways, options.rounds, wait)
        rows = rows_of(samples)
        with torch.no_grad():
            samples = times({name: ways[name] for name in ("kernel", *THROUGH_PYTORCH)}, options.rounds, wait)
        rows |= {f"{name}{NO_GRAD}": row for name, row in rows_of(samples).items() if name in THROUGH_PYTORCH}
        result["layouts"][layout] = rows
        for name, row in rows.items():
            values = f"{row['median']:8.2f} us, least {row['least']:.2f}, over the kernel {row['overhead']:.2f}"
            print(f"{layout} {name:20} {values}", flush=True)
    replace_json(options.json, result)


if __name__ == "__main__":
    main()
