"""A whole ONNX model as one library: compiled, exported, loaded, run, and compared with what it should give.

    python examples/04_onnx_model.py [MODEL.onnx]

Without an argument it takes the SqueezeNet graph that the package onnx ships for its tests, whose weights are all the same number.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import im2win


def shipped_model() -> Path:
    """The SqueezeNet graph inside the installed package onnx."""
    import onnx.backend.test

    return Path(onnx.backend.test.__file__).parent / "data" / "light" / "light_squeezenet.onnx"


def main() -> None:
    """Compiles the model, exports it, loads it again and runs it on random images."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else shipped_model()
    begin = time.perf_counter()
    model = im2win.compile_model(path)  # logs="my_logs": with what `im2win tune MODEL.onnx --logs my_logs` found
    print(f"{path.name}: {len(model.manifest.layers)} convolutions and products compiled in {time.perf_counter() - begin:.0f} s")
    with tempfile.TemporaryDirectory() as folder:
        library = model.export(Path(folder) / "model.so")
        begin = time.perf_counter()
        model = im2win.load_model(library)
        print(f"{library.name}: loaded in {1e3 * (time.perf_counter() - begin):.1f} ms, batches {model.batches}")
        random = np.random.default_rng(0)
        inputs = {port.name: random.normal(size=port.shape).astype(port.dtype) for port in model.inputs}
        outputs = model.run(inputs)
        for name, value in outputs.items():
            print(f"{name}: {value.shape}, mean {value.mean():.6f}")
        three = {port.name: np.concatenate([inputs[port.name]] * 3) for port in model.inputs}  # any number of images
        assert all(np.array_equal(again[:1], outputs[name]) for name, again in model.run(three).items())


if __name__ == "__main__":
    main()
