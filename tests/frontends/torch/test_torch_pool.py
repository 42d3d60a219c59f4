"""PyTorch's threads in place of TVM's: who runs a kernel's loops, how many, from several callers, and what happens without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from compiled_torch import with_compiled

if not sys.platform.startswith("linux"):
    pytest.skip("PyTorch's threads are shared on Linux", allow_module_level=True)

HEAD = """
import os, threading
import torch
import im2win.torch
from im2win.frontends.torch import pool
from torch import nn

def module(seed):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU()).eval()
    made[0].weight.data = torch.randint(-2, 3, made[0].weight.shape).float()
    made[0].bias.data = torch.randint(-2, 3, (32,)).float()
    return made

def ours():
    return {int(name) for name in os.listdir("/proc/self/task")}

x = torch.randint(-3, 4, (2, 16, 20, 20)).float()
torch.set_num_threads(2)
"""


def run(body: str, cache: Path) -> str:
    """What a new process prints."""
    variables = {**os.environ, "IM2WIN_CACHE": str(with_compiled(cache))}
    done = subprocess.run([sys.executable, "-c", HEAD + body], env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_kernels_have_no_threads_of_their_own(tmp_path: Path) -> None:
    """PyTorch's run first, so whatever a kernel's first call adds would be TVM's."""
    body = """
plain = module(0)
with torch.inference_mode():
    want = plain(x)
    torch.ones(1 << 20).add_(1)
    fast = im2win.torch.optimize(plain, x, accuracy="exact")
    before = ours()
    assert torch.equal(fast(x), want) and pool.share()
    print(ours() == before)
    torch.set_num_threads(1)
    assert torch.equal(fast(x), want)
"""
    assert run(body, tmp_path) == "True"
    assert [path.suffix for path in tmp_path.glob("pool-*")] == [".so"], "compiled once, kept"


@pytest.mark.slow
def test_two_callers_at_once(tmp_path: Path) -> None:
    body = """
plain = [module(seed) for seed in range(2)]
fast = [im2win.torch.optimize(one, x, accuracy="exact") for one in plain]
wrong = []

def call(one):
    with torch.inference_mode():
        want = plain[one](x)
        wrong.extend(1 for _ in range(300) if not torch.equal(fast[one](x), want))

callers = [threading.Thread(target=call, args=(number % 2,)) for number in range(4)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(len(wrong))
"""
    assert run(body, tmp_path) == "0"


@pytest.mark.slow
def test_without_a_compiler_kernels_keep_their_threads(tmp_path: Path) -> None:
    body = """
os.environ["CC"] = "false"
assert not pool.share()
del os.environ["CC"]
plain = module(0)
with torch.inference_mode():
    fast = im2win.torch.optimize(plain, x, accuracy="exact")
    print(pool.share(), torch.equal(fast(x), plain(x)))
"""
    assert run(body, tmp_path) == "False True"
