"""Readers of files and keys: on whole inputs, on inputs cut short and damaged, only the documented errors. `make fuzz-readers` goes on."""

from __future__ import annotations

import random

import pytest
from reader_targets import TARGETS

DAMAGED = 40  # inputs made of each seed


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_damaged_seeds(name: str) -> None:
    if name == "onnx_model":
        pytest.importorskip("onnx")
    draw, target = random.Random(name), TARGETS[name]
    seeds = target.seeds()
    assert seeds
    for seed in seeds[:8]:
        target.run(seed)
        for _ in range(DAMAGED // (4 if name == "onnx_model" else 1)):
            target.run(damaged(draw, seed, draw.choice(seeds)))


@pytest.mark.parametrize("what", ["text", "type"])
def test_damaged_models_that_fuzzing_found(what: str) -> None:
    """Text that is no UTF-8, and a type of no name, are errors of the model."""
    onnx = pytest.importorskip("onnx")
    from im2win.frontends.onnx.layers import ModelError, layers_of

    model = onnx.load_model_from_string(TARGETS["onnx_model"].seeds()[1])
    if what == "text":
        [padding] = [one for node in model.graph.node for one in node.attribute if one.name == "auto_pad"]
        padding.s = b"SAME_\xeb"
    else:
        model.graph.initializer[0].data_type = model.graph.input[0].type.tensor_type.elem_type = 58
    with pytest.raises(ModelError, match=r"^`source` \(='g'\) must (follow the ONNX specification|pass ONNX shape inference)"):
        layers_of(model)


def damaged(draw: random.Random, seed: bytes, other: bytes) -> bytes:
    """Cut short, with bytes changed, a part left out, doubled or taken from another seed."""
    first, last = sorted(draw.randrange(len(seed) + 1) for _ in range(2))
    kind = draw.randrange(5)
    if kind == 0:
        return seed[:first]
    if kind == 1:
        return seed[:first] + bytes(draw.randrange(256) for _ in range(draw.randint(1, 3))) + seed[first + 1 :]
    if kind == 2:
        return seed[:first] + seed[last:]
    return seed[:last] + seed[first:] if kind == 3 else seed[:first] + other[first:last] + seed[last:]
