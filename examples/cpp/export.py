"""Export a layer with its filters for the program in C++ beside this: python export.py FOLDER."""

import sys
from pathlib import Path

import numpy as np

import im2win


def main(folder: Path) -> None:
    conv = im2win.Conv2d(batch=1, in_channels=16, height=28, width=28, out_channels=32, kernel=3, padding=1, bias=True, activation="relu")
    rng = np.random.default_rng(0)
    w = rng.standard_normal(conv.filter_shape, dtype=np.float32) / 12
    bias = rng.standard_normal(conv.out_channels, dtype=np.float32)
    library = im2win.build(conv, target="cpu").bind(w, bias).export(folder / "conv.so")
    (folder / "reference.bin").write_bytes(w.tobytes() + bias.tobytes())  # for the check in C++ alone
    print(f"{library}, its manifest and its filters")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build"))
