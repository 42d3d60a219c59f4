"""The worker of TVM's searches without tensor intrinsics: registering them takes longer than searching small layers, which use none."""

from __future__ import annotations

import sys
from types import ModuleType

from im2win.bench.peers import tvm_searches

sys.modules["tvm.s_tir.tensor_intrin"] = ModuleType("tvm.s_tir.tensor_intrin")
main = tvm_searches.main
