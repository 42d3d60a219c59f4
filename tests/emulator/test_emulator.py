"""The CUDA emulator: what CUDA promises holds, and what it does not promise goes wrong for some seed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from oracle import Array

from im2win.emulator import Emulation, EmulationError, Launch, translate

SEEDS = range(6)


def emulate(body: str, threads: int | tuple[int, int, int] = 64, blocks: int = 1, dynamic: int = 0, before: str = "") -> Emulation:
    """A kernel `k(float* x, float* y)` with this body."""
    source = f'{before}\nextern "C" __global__ void __launch_bounds__(64) k(float* __restrict__ x, float* __restrict__ y) {{\n{body}\n}}'
    block = threads if isinstance(threads, tuple) else (threads, 1, 1)
    return Emulation(source, [Launch("k", ("x", "y"), (blocks, 1, 1), block, dynamic)])


def run(emulation: Emulation, x: Array, size: int, seed: int = 0) -> Array:
    y = np.full(size, np.nan, np.float32)
    emulation({"x": x, "y": y}, seed)
    return y


NUMBERS = np.arange(64, dtype=np.float32)
REVERSE = """
  __shared__ alignas(64) float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  {barrier}
  y[threadIdx.x] = s[63 - threadIdx.x];
"""


def test_threads_blocks_and_extents() -> None:
    body = """
  int plane = blockIdx.x * blockDim.z + threadIdx.z;
  int i = (plane * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  y[i] = i + x[0];
"""
    found = run(emulate(body, (4, 3, 2), blocks=5), np.ones(1, np.float32), 120)
    np.testing.assert_array_equal(found, np.arange(120) + 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is a time limit on Linux only")
@pytest.mark.parametrize("inside", ["", "__syncwarp();"])
def test_a_kernel_that_spins_for_another_block_ends(inside: str) -> None:
    """One that never waits for anything the emulator knows, and one whose threads take turns for ever."""
    spin = emulate(f"volatile float* flag = y; if (blockIdx.x == 0) while (flag[1] != 1.0f) {{ {inside} }} y[1] = 1.0f;", blocks=2)
    for seed in range(8):
        y = np.zeros(2, np.float32)
        try:
            spin({"x": NUMBERS, "y": y}, seed, limit_s=0.25)
        except EmulationError as error:
            assert "no end after 0.25 s: a thread waits for what never comes" in str(error)
            break
    else:
        pytest.fail("the block that is waited for ran first, every time")
    np.testing.assert_array_equal(run(emulate("y[threadIdx.x] = x[threadIdx.x];"), NUMBERS, 64), NUMBERS)


def test_a_barrier_orders_a_block() -> None:
    emulation = emulate(REVERSE.format(barrier="__syncthreads();"))
    for seed in SEEDS:
        np.testing.assert_array_equal(run(emulation, NUMBERS, 64, seed), NUMBERS[::-1])


@pytest.mark.parametrize("barrier", ["", "__syncwarp();"])
def test_a_missing_barrier_shows(barrier: str) -> None:
    emulation = emulate(REVERSE.format(barrier=barrier))
    assert any(not np.array_equal(run(emulation, NUMBERS, 64, seed), NUMBERS[::-1]) for seed in SEEDS)


def test_a_warp_barrier_orders_a_warp() -> None:
    body = REVERSE.format(barrier="__syncwarp();").replace("63 - threadIdx.x", "threadIdx.x ^ 31")
    emulation = emulate(body)
    for seed in SEEDS:
        np.testing.assert_array_equal(run(emulation, NUMBERS, 64, seed), NUMBERS[np.arange(64) ^ 31])


def test_a_buffer_written_again_too_early_shows() -> None:
    """The barrier that a double buffer saves: without it the next write meets the last read."""
    body = """
  __shared__ alignas(64) float s[64];
  float sum = 0;
  for (int step = 0; step < 4; ++step) {
    s[threadIdx.x] = x[threadIdx.x] + step;
    __syncthreads();
    sum += s[63 - threadIdx.x];
    {barrier}
  }
  y[threadIdx.x] = sum;
"""
    expected = 4 * NUMBERS[::-1] + 6
    right, wrong = (emulate(body.replace("{barrier}", barrier)) for barrier in ("__syncthreads();", ""))
    assert all(np.array_equal(run(right, NUMBERS, 64, seed), expected) for seed in SEEDS)
    assert any(not np.array_equal(run(wrong, NUMBERS, 64, seed), expected) for seed in SEEDS)


def test_shared_memory_starts_as_nan_in_every_block() -> None:
    body = "__shared__ alignas(64) float s[64]; y[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x]; s[threadIdx.x] = 1;"
    assert np.isnan(run(emulate(body, blocks=3), NUMBERS, 192)).all()


def test_dynamic_shared_memory() -> None:
    reverse = REVERSE.split(";", 1)[1].format(barrier="__syncthreads();")
    body = f"extern __shared__ alignas(64) uchar raw[]; float* s = (float*)raw; {reverse}"
    emulation = emulate(body, dynamic=256, before="#define uchar unsigned char")
    np.testing.assert_array_equal(run(emulation, NUMBERS, 64), NUMBERS[::-1])


def test_shuffles() -> None:
    body = """
  float v = x[threadIdx.x];
  y[threadIdx.x] = __shfl_xor_sync(0xffffffff, v, 5);
  y[64 + threadIdx.x] = __shfl_down_sync(0xffffffff, v, 3);
  y[128 + threadIdx.x] = __shfl_sync(0xffffffff, v, 7);
"""
    lanes = np.arange(64)
    for seed in SEEDS:
        xor, down, one = run(emulate(body), NUMBERS, 192, seed).reshape(3, 64)
        np.testing.assert_array_equal(xor, lanes ^ 5)
        np.testing.assert_array_equal(down, np.where(lanes % 32 < 29, lanes + 3, lanes))
        np.testing.assert_array_equal(one, lanes // 32 * 32 + 7)


ASYNC = """
  __shared__ alignas(64) float s[128];
  emulator::copy_async(s + threadIdx.x, x + threadIdx.x, 4, 4);
  emulator::commit_copies();
  emulator::copy_async(s + 64 + threadIdx.x, x + threadIdx.x, 4, 0);
  emulator::commit_copies();
  emulator::wait_copies({left});
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
  y[64 + threadIdx.x] = s[127 - threadIdx.x];
"""


def test_asynchronous_copies_are_there_once_waited_for() -> None:
    everything, first = (emulate(ASYNC.replace("{left}", left)) for left in "01")
    expected = np.concatenate([NUMBERS[::-1], np.zeros(64, np.float32)])
    assert all(np.array_equal(run(everything, NUMBERS, 128, seed), expected) for seed in SEEDS)
    for seed in SEEDS:
        y = run(first, NUMBERS, 128, seed)
        np.testing.assert_array_equal(y[:64], expected[:64])
        assert np.isnan(y[64:]).any(), "the second group was not waited for"


HANDED_OVER = """
  __shared__ float s[64];
  if (blockIdx.x == 0) {
    y[64 + threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&y[0], 1.0f);
  } else {
    {wait}
    __syncthreads();
    s[threadIdx.x] = y[64 + threadIdx.x];
    __syncthreads();
    y[128 + threadIdx.x] = s[63 - threadIdx.x];
  }
"""
WAIT = "if (threadIdx.x == 0) while (*(volatile float*)y == 0.0f) emulator::pause(__LINE__);"


@pytest.mark.parametrize("wait", [WAIT, ""], ids=["waits", "does not wait"])
def test_blocks_in_turns(wait: str) -> None:
    """Each keeps its own shared memory; who does not wait for another finds nothing there, for some seed."""
    emulation, right = emulate(HANDED_OVER.replace("{wait}", wait), blocks=2), []
    for seed in SEEDS:
        y = np.full(192, np.nan, np.float32)
        y[0] = 0
        emulation({"x": NUMBERS, "y": y}, seed, resident=2)
        right.append(np.array_equal(y[128:], NUMBERS[::-1]))
    assert all(right) if wait else not all(right)
    if wait:  # one after the other, the second block may come first, and waits for one that has not started
        with pytest.raises(EmulationError, match="blocks wait for each other, or for one that has not started"):
            for seed in range(8):
                emulation({"x": NUMBERS, "y": np.zeros(192, np.float32)}, seed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x < 32) __syncthreads(); else\n __syncthreads();", "wait at different barriers, lines 1 and 2"),
        ("if (threadIdx.x & 1) __syncwarp(); else __syncthreads();", "or a barrier of a group that some of its threads never reach"),
        ("if (threadIdx.x == 3) return; __syncwarp();", "has ended or does not exist"),
        ("__shfl_sync(0x1, x[0], 0);", "not in the mask"),
        ("y[64 + threadIdx.x] = 0;", "wrote outside `y`"),
        ("y[-1] = 0;", "wrote outside `y`"),
    ],
)
def test_broken_rules_are_errors(body: str, message: str) -> None:
    source = f'extern "C" __global__ void k(float* x, float* y) {{\n#line 1\n{body}\n}}'
    emulation = Emulation(source, [Launch("k", ("x", "y"), (1, 1, 1), (64, 1, 1))])
    with pytest.raises(EmulationError, match=message):
        run(emulation, NUMBERS, 64)


def test_a_block_of_4096_threads_does_not_launch() -> None:
    with pytest.raises(EmulationError, match="more than 1024 threads"):
        run(emulate("y[0] = 1;", (64, 64, 1)), NUMBERS, 64)


def test_source_that_is_no_cuda() -> None:
    with pytest.raises(EmulationError, match=r"(?s)does not compile.*nonsense"):
        emulate("nonsense;")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("im2win.emulator.shutil.which", lambda name: None)
    with pytest.raises(EmulationError, match=r"needs a C\+\+ compiler on PATH \(g\+\+ or clang\+\+\); none was found"):
        emulate("")


def test_sources_share_nothing_but_the_emulator() -> None:
    """Each has its own static arrays, whichever ran before, and a failure of one is not another's."""
    large = emulate(REVERSE.replace("{barrier}", "__syncthreads();"))
    none, broken = emulate("y[threadIdx.x] = x[threadIdx.x];"), emulate("if (threadIdx.x < 32) __syncthreads();\n__syncthreads();")
    for _ in range(2):
        np.testing.assert_array_equal(run(none, NUMBERS, 64), NUMBERS)
        with pytest.raises(EmulationError, match=r"k, block .* wait at different barriers"):
            run(broken, NUMBERS, 64)
        np.testing.assert_array_equal(run(large, NUMBERS, 64), NUMBERS[::-1])


def test_translation_leaves_code_alone() -> None:
    assert translate("#include <cuda.h>\n#include <cstdint>\nint x;") == "\n#include <cstdint>\nint x;"


def test_half_rounds_as_ieee_does() -> None:
    """Every half goes to float and back; floats round to nearest even, as numpy's do."""
    before = "#include <cstring>"
    body = """
  if (threadIdx.x) return;
  for (int i = 0; i < 65536; ++i) { half h; h.bits = i; y[i] = float(h); }
  for (int i = 0; i < 4096; ++i) y[65536 + i] = float(half(x[i]));
"""
    generator = np.random.default_rng(0)
    x = (generator.standard_normal(4096) * np.exp(generator.uniform(-20, 12, 4096))).astype(np.float32)
    y = run(emulate(body, before=before), x, 65536 + 4096)
    np.testing.assert_array_equal(y[:65536], np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y[65536:], x.astype(np.float16).astype(np.float32))


def test_a_schedule_of_tvm_runs() -> None:
    """From a tensor expression to a result: a product through shared memory, with and without the copy's barrier."""
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule

    from im2win.codegen.cuda_source import generate

    a, b = te.placeholder((32, 24), name="a"), te.placeholder((24, 64), name="b")
    k = te.reduce_axis((0, 24), "k")
    c = te.compute((32, 64), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    sch = Schedule(te.create_prim_func([a, b, c]))
    block = sch.get_sblock("c")
    i, j, k = sch.get_loops(block)
    (ib, it), (jb, jt), (ko, ki) = sch.split(i, [None, 8]), sch.split(j, [None, 16]), sch.split(k, [None, 8])
    sch.reorder(ib, jb, it, jt, ko, ki)
    for loop, thread in ((ib, "blockIdx.y"), (jb, "blockIdx.x"), (it, "threadIdx.y"), (jt, "threadIdx.x")):
        sch.bind(loop, thread)
    for index in (0, 1):
        copy = sch.cache_read(block, index, "shared")
        sch.compute_at(copy, ko)
        _, ty, tx = sch.split(sch.fuse(*sch.get_loops(copy)[-2:]), [None, 8, 16])
        sch.bind(ty, "threadIdx.y")
        sch.bind(tx, "threadIdx.x")
    sch.decompose_reduction(block, ko)
    made = generate(sch.mod, tvm.target.Target("nvidia/nvidia-h100", host="llvm"))
    [launch] = made.launches
    assert (launch.grid, launch.block, set(launch.arguments)) == ((4, 4, 1), (16, 8, 1), {"a", "b", "c"}) and not made.workspace
    generator = np.random.default_rng(0)
    tensors = {"a": generator.integers(-4, 5, (32, 24)).astype(np.float32), "b": generator.integers(-4, 5, (24, 64)).astype(np.float32)}
    expected = tensors["a"] @ tensors["b"]

    def right(source: str, seed: int) -> bool:
        found = np.full((32, 64), np.nan, np.float32)
        Emulation(source, made.launches)({**tensors, "c": found}, seed)
        return bool(np.array_equal(found, expected))

    assert made.source.count("__syncthreads();") >= 2
    assert all(right(made.source, seed) for seed in range(2))
    assert not all(right(made.source.replace("__syncthreads();", "", 1), seed) for seed in range(4))
