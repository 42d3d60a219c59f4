"""Tune one layer, export it as a shared library, load that and run it.

    python examples/01_tune_and_export.py [TRIALS]

The records go to a temporary folder here; keep yours, they are what tuning is for.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import im2win


def main(trials: int) -> None:
    conv = im2win.Conv2d(batch=1, in_channels=64, height=28, width=28, out_channels=64, kernel=3, padding=1, bias=True, activation="relu")
    with tempfile.TemporaryDirectory() as folder:
        record = im2win.tune(conv, target="cpu", algorithm="auto", trials=trials, logs=folder)
        print(f"{conv}: {record.algorithm}, {record.seconds * 1e6:.0f} us, {record.gflops:.0f} GFLOPS")

        library = im2win.build(conv, target="cpu", logs=folder).export(Path(folder, "conv.so"))
        op = im2win.load(library)  # needs no compiler: this line alone is what deployment runs
        print(f"{op}: {op.extra_bytes} bytes beside input, filter and output")

        rng = np.random.default_rng(0)
        x = rng.standard_normal(conv.input_shape, dtype=np.float32)
        w = rng.standard_normal(conv.filter_shape, dtype=np.float32)
        bias = rng.standard_normal(conv.out_channels, dtype=np.float32)
        layer = op.bind(w, bias)  # packs the filters once
        y = np.empty(conv.output_shape, np.float32)
        layer(x, out=y)

    # The first output by hand: the window's upper left corner lies in the padding.
    expected = max(0.0, float(np.sum(x[0, :, :2, :2] * w[0, :, 1:, 1:])) + float(bias[0]))
    assert abs(y[0, 0, 0, 0] - expected) < 1e-3, (y[0, 0, 0, 0], expected)
    print("checked")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
