"""Draws layers at random from networks of timm, for studies of layers that nobody tuned for.

    python benchmarks/draw_layers.py --seed 1 --layers 200 --forms float32-NCHW-1,float32-NHWC-1 benchmarks/layers/drawn-1.jsonl

A family of networks is drawn, then one of its networks, then one of its convolutions; a problem is taken once. Networks of the zoo are left
out. Networks run on PyTorch's meta device: shapes alone, nothing is computed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from im2win.bench.zoo_networks import NETWORKS, vision
from im2win.spec.captured_layers import SCHEMA, LayerFileError, read_layers
from im2win.spec.conv2d import Conv2d

SLOW_S = 9  # seconds after which a network is given up


def convolutions(name: str) -> set[Conv2d]:
    """A network's convolutions over two dimensions for one image of its own size, in float32."""
    found: set[Conv2d] = set()

    def note(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        if layer.padding_mode == "zeros" and output.dim() == 4:
            found.add(Conv2d(
                *inputs[0].shape, layer.out_channels, layer.kernel_size, stride=layer.stride, padding=layer.padding,
                dilation=layer.dilation, groups=layer.groups, bias=layer.bias is not None,
            ))  # fmt: skip

    with torch.device("meta"), torch.inference_mode():
        network = vision("timm").create_model(name).eval()
        for module in network.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(note)
        network(torch.empty(1, *network.pretrained_cfg.get("input_size", (3, 224, 224))))
    return found


def drawn(chance: random.Random, forms: list[tuple[str, str, int]], most_flops: float) -> Iterator[tuple[str, Conv2d]]:
    """Endlessly a network's name and one of its layers in one of the forms, of at most so many operations."""
    families = defaultdict(list)
    for name in vision("timm").list_models():
        if name not in NETWORKS:
            families[name.split("_")[0].rstrip("0123456789")].append(name)
    seen: set[Conv2d] = set()
    while True:
        name = chance.choice(families[chance.choice(sorted(families))])
        dtype, layout, batch = chance.choice(forms)
        signal.alarm(SLOW_S)
        try:
            found = convolutions(name)
        except (RuntimeError, ValueError, AssertionError, TypeError, TimeoutError) as reason:
            print(f"{name} is left out: {reason}", flush=True)
            continue
        finally:
            signal.alarm(0)
        layers = {conv.with_(dtype=dtype, layout=layout, batch=batch) for conv in found}
        if fresh := sorted({str(conv) for conv in layers - seen if conv.flops <= most_flops}):
            conv = Conv2d.parse(chance.choice(fresh))
            seen.add(conv)
            yield name, conv


def _form(text: str) -> tuple[str, str, int]:
    """A form from its text.

    Raises:
        ArgumentTypeError: it is none.
    """
    dtype, layout, batch = (*text.split("-"), "", "")[:3]
    try:
        Conv2d(int(batch), 1, 1, 1, 1, 1, dtype=dtype, layout=layout)
    except ValueError as reason:
        raise argparse.ArgumentTypeError(f"{text!r} must be element type, layout and batch, as in float16-NHWC-32 ({reason})") from None
    return dtype, layout, int(batch)


def _forms(text: str) -> list[tuple[str, str, int]]:
    return [_form(part) for part in text.split(",")]


def _give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"takes more than {SLOW_S} s")


def main() -> None:
    """Reads the command line, draws, writes the file of layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="to write; `im2win tune` and `im2win bench` read it, too")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--forms", type=_forms, default="float32-NCHW-1", help="element type, layout and batch, with commas between forms")
    parser.add_argument("--without", type=Path, action="append", default=[], help="a file whose layers are left out; may be repeated")
    parser.add_argument("--most", type=float, default=10.0, help="most GFLOP of a layer")
    options = parser.parse_args()
    try:
        known = {layer.conv for file in options.without for layer in read_layers(file)[0]}
    except LayerFileError as reason:
        parser.error(str(reason))
    signal.signal(signal.SIGALRM, _give_up)
    source = ((name, conv) for name, conv in drawn(random.Random(options.seed), options.forms, options.most * 1e9) if conv not in known)
    rows = ({"schema": SCHEMA, "conv": str(conv), "count": 1, "target": options.target, "network": name} for name, conv in source)
    lines = "".join(json.dumps(row) + "\n" for row in itertools.islice(rows, options.layers))
    options.file.write_text(lines, encoding="utf-8")  # at the end, so that a stopped draw leaves an older file as it was


if __name__ == "__main__":
    main()
