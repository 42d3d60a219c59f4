"""The worker of TVM's searches, sooner: small populations, and no tensor intrinsics.

Registering these takes longer than searching small layers, which use none.
"""

from __future__ import annotations

import sys
from types import ModuleType

from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch

from im2win.bench.peers import tvm_searches

EvolutionarySearch.__init__.__kwdefaults__.update(population_size=8, init_min_unmeasured=4)
sys.modules["tvm.s_tir.tensor_intrin"] = ModuleType("tvm.s_tir.tensor_intrin")
main = tvm_searches.main
