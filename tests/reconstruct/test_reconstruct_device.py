"""Reconstructed kernels on a GPU: right as often as they are called, and without a race that racecheck finds."""

from __future__ import annotations

from pathlib import Path

import fusable
import pytest
import winograd_pair
from gpu_only import this_gpu
from winograd_pair import NAME, Pair

from im2win.codegen.rewritten import compile_reconstructed
from im2win.reconstruct.fusion import llc, shmem
from im2win.reconstruct.rules.barriers import weakened
from im2win.reconstruct.rulesets import Settings
from im2win.reconstruct.validate.validators import RacecheckValidator, tensor_sizes
from im2win.runtime.libraries import cuda_runtime_library, load_kernel

torch = pytest.importorskip("torch")


GPU = this_gpu()

SIZES = Pair(channels=16, filters=64, size=66, private=True)  # 1024 tiles: 64 blocks that make, 256 that read


@pytest.mark.parametrize("wave", [0, 1, 7])
@pytest.mark.parametrize("rules", [(), ("barriers",), ("pkf-shmem", "barriers"), ("pkf-llc",)], ids="+".join)
def test_right_as_often_as_it_is_called(rules: tuple[str, ...], wave: int, tmp_path: Path) -> None:
    gpu = GPU
    cuda_runtime_library()
    compiled, made = compile_reconstructed(winograd_pair.schedule(SIZES), gpu, rules, Settings(gpu.block_shared, wave))
    assert made.changed == bool(rules)
    compiled.export(tmp_path / "winograd.so")
    function = load_kernel(tmp_path / "winograd.so")[NAME]
    host = winograd_pair.tensors(SIZES)
    right = torch.from_numpy(winograd_pair.expected(SIZES, host)).cuda().reshape(SIZES.tensors["output"])
    data, filters = (torch.from_numpy(host[name]).cuda().reshape(SIZES.tensors[name]) for name in ("data", "filter"))
    for _ in range(20):
        output = torch.full(SIZES.tensors["output"], float("nan"), device="cuda")
        function(data, filters, output)
        assert torch.equal(output, right)


def test_racecheck_finds_nothing_and_finds_what_is_missing() -> None:
    missing, gpu = RacecheckValidator.missing(), GPU
    if missing is not None:
        pytest.skip(missing)
    pair = winograd_pair.unit(Pair(private=True))
    validator = RacecheckValidator(gpu.arch, tensor_sizes(pair) | tensor_sizes(fusable.unit("two barriers")) | {"V_flags": 5})
    weak = weakened(pair)[0]
    for unit in (weak, weakened(shmem.fuse(pair, gpu.block_shared)[0])[0], llc.fuse(fusable.unit("two barriers"), gpu.block_shared)[0]):
        assert validator.objection(unit) is None
    broken = weakened(winograd_pair.unit(Pair()))[0]
    without = broken.edited([])[0].source.replace("__syncthreads();", "")
    assert "hazard" in (validator.objection(type(pair)(without, broken.launches, broken.workspace)) or "").lower()
