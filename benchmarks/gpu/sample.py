"""Runs one small kernel of every kind once, for compute-sanitizer: every way to take windows, arithmetic and layout, and the studies.

    python benchmarks/gpu/sample.py FOLDER [ALGORITHM ...]

The first call builds the kernels into FOLDER, so that what watches the later ones does not watch compilers.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from im2win import Conv2d
from im2win.bench import cuda_builds
from im2win.device.gpu import device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.registry.backends import backend_for
from im2win.registry.interface import Backend
from im2win.registry.schedules import SCHEDULES
from im2win.schedules.studies import cuda_ladder as ladder
from im2win.schedules.studies import sliding
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import LAYOUTS
from im2win.studies import cuda_ladder as cuda_ablation
from im2win.studies import sliding as cuda_sliding
from im2win.tuner.runners.cuda import device_tensors, reference

KEYS = (
    "n2-c40x13x16-k48x3x3-p1", "n1-c32x20x24-k128x3x3-p1", "n1-c3x31x33-k32x5x5-s2-p2", "n2-c24x13x16-k24x3x3-p1-g24",
    "n2-c64x13x16-k64x3x3-p1-g8", "n2-c64x14x14-k64x1x1",
)  # fmt: skip
ACCURACY: Accuracy = "winograd"  # all there are
CHANGES: dict[str, dict[str, Any]] = {
    "in clusters": {"cluster": 2},
    "in clusters with their filters": {"cluster": 2, "shared": "filters"},
    "in clusters with their sums": {"cluster": 2, "shared": "accumulators", "pingpong": 1},
    "with boxes of single taps": {"tma_boxes": "taps", "taps": 1},
    "with lines of pixels": {"tma_boxes": "lines", "taps": 1, "slabs": 2},
}
LADDER, SLIDING = "n2-c5x13x14-k80x3x3-p1", "n1-c3x31x33-k3x3x3-s2-p1"


def studies() -> dict[tuple[str, str], cuda_builds.Recipe]:
    """Every rung of the ladder, and both sliding windows."""
    gpu, rungs = device_gpu(), {**ladder.RUNGS, **ladder.WITHOUT}
    recipes: dict[tuple[str, str], cuda_builds.Recipe] = {
        (LADDER, name): cuda_ablation.recipe(Conv2d.parse(LADDER), rung, gpu) for name, rung in rungs.items()
    }
    for form in sliding.FORMS:
        recipes[SLIDING, form] = cuda_sliding.SlidingRecipe(Conv2d.parse(SLIDING), form, 8, gpu)
    return recipes


def kernels(names: Sequence[str]) -> dict[tuple[str, str], cuda_builds.Recipe]:
    """A tile of each schedule with every arithmetic it has, drawn at random, on all problems; and changed tiles."""
    gpu, rng = device_gpu(), random.Random(0)
    backend, recipes = backend_for(gpu, ACCURACY), dict[tuple[str, str], cuda_builds.Recipe]()
    for key, dtype, layout in itertools.product(KEYS, ("float32", "float16", "bfloat16", "int8"), LAYOUTS):
        conv = Conv2d.parse(key).with_(dtype=dtype, layout=layout)
        for name, row in SCHEDULES.items():
            if name not in names or row.supports(conv, "cuda", ACCURACY) is not None:
                continue
            tiles = [tile for _, tile in backend.ranked(conv, row)]
            for product in sorted({tile.product for tile in tiles}):
                some = [tile for tile in tiles if tile.product == product]
                chosen = {product: rng.choice(some)}
                for label, change in CHANGES.items():
                    shared = (replace(tile, **change) for tile in rng.sample(some, len(some)) if all(hasattr(tile, one) for one in change))
                    pair = next((tile for tile in shared if not backend.violations(conv, row, tile)), None)
                    chosen |= {f"{product} {label}": pair} if pair is not None else {}
                for label, tile in chosen.items():
                    recipes[str(conv), f"{name} {label}"] = cuda_builds.TileRecipe(conv, name, gpu, ACCURACY, tile=tile)
    return recipes


def bound(conv: Conv2d, recipe: cuda_builds.Recipe, backend: Backend) -> float:
    """The greatest error that a kernel may have: of sums in IEEE float32 for the studies and for what has no tile of its own here."""
    if not isinstance(recipe, cuda_builds.TileRecipe) or recipe.tile is None:
        return 1e-5
    accuracy = backend.accuracy(recipe.tile)
    return max(tolerance(conv, accuracy), 0.0 if accuracy == "winograd" else 2e-3)


def main() -> None:
    """Builds all kernels, or those of the schedules named, with every CPU; or, where that is done, runs and checks one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", choices=[[], *SCHEDULES])
    options = parser.parse_args()
    kept = options.folder / "kernels.pickle"
    if not kept.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        recipes = {**({} if options.schedules else studies()), **kernels(options.schedules or list(SCHEDULES))}
        kept.write_bytes(pickle.dumps((recipes, cuda_builds.build_all(recipes, options.folder))))
        return
    recipes, built = pickle.loads(kept.read_bytes())
    backend = backend_for(device_gpu(), ACCURACY)
    for (key, name), library in built.items():
        conv = Conv2d.parse(key)
        tensors = device_tensors(conv, 0)
        want, scale = reference(conv, tensors)
        op = cuda_builds.load(library)
        error = float((op(tensors["data"], tensors["filter"]).double() - want).abs().max()) / scale
        print(f"{conv} {name}: error {error:.1e}", flush=True)
        assert error < bound(conv, recipes[key, name], backend)


if __name__ == "__main__":
    main()
