"""The convolutions of an ONNX model: how often each occurs, and what each algorithm would store for it.

    python examples/03_layers_of_a_model.py [MODEL.onnx]

Without an argument it reads the ResNet-50 graph that the package onnx ships for its tests.
"""

import sys
from pathlib import Path

from im2win.frontends.onnx.layers import layers_of
from im2win.reports.summary import summary_rows


def shipped_resnet50() -> Path:
    import onnx.backend.test

    return Path(onnx.backend.test.__file__).parent / "data" / "light" / "light_resnet50.onnx"


def main(model: Path) -> None:
    found = layers_of(model)
    for row in summary_rows(found.layers):
        storage = {name: size for name, size in row["algorithms"].items() if isinstance(size, int)}
        print(
            f"{row['count']}x {row['key']:32} {row['flops'] / 1e9:6.3f} GFLOP  "
            f"im2col {storage['im2col/tiled'] / 2**20:6.2f} MiB, im2win {storage['im2win/stored'] / 2**20:6.2f} MiB"
        )
    for skipped in found.skipped:
        print(f"skipped {skipped.name}: {skipped.reason}")
    total = sum(layer.count * layer.conv.flops for layer in found.layers)
    print(f"{len(found.layers)} distinct layers, {sum(layer.count for layer in found.layers)} convolutions, {total / 1e9:.2f} GFLOP")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else shipped_resnet50())
