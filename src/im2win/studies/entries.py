"""Names of studies and of the entries in their files, shared by measurements and reports."""

from __future__ import annotations

from collections.abc import Container, Sequence

# Names of studies in their files.
ZOO, UNTUNED, EPILOGUES = "zoo", "untuned", "epilogues"
MODELS, OPERATORS, PYTORCH, OVERHEAD, SHARED = "models", "operators", "pytorch-models", "op-overhead", "shared-process"

COLD_START = "cold-start"
COLD_PARTS = ("python", "numpy", "runtime", "im2win", "load", "bind", "first call", "second call")  # of a new process, in order
OURS_COLD = ("im2win", "load", "bind", "first call")  # those of this package

WAITING = "waiting"
WAITING_FRONTS = {
    "optimize": "`im2win.torch.optimize`", "compile": "`im2win.compile_model`", "onnxruntime": "`im2win.for_onnxruntime`",
}  # and titles

QUANTISED = "quantised-models"
FLOATS = {"ours float32": "ours", "onnxruntime float32": "onnxruntime"}  # subjects on the float32 model: whose they are

SCHEMA = 2  # of files of studies: since 2 they hold the `digests` of the source (`im2win.bench.source`); older files have no number, or 1

LADDER = "ladder-"  # prefix of the suite's name in a ladder's result
LADDER_TRANSFORM = "transform"  # the transform alone, beside a GPU's rungs


def last_rung(names: Sequence[str], rungs: Container[str]) -> str:
    """The highest rung of a ladder among names; the last name if none is a rung."""
    return next((name for name in reversed(names) if name in rungs), names[-1])


SLIDING = "sliding-window"
IM2COL, DEFAULT = "im2col", "default"  # forms without a thread block to vary

SCHEDULED, SCHEDULED_NARROW = "scheduled", "scheduled-narrow"
FIRST_SCHEDULED = "direct/scheduled"  # the schedule that is measured on every layer
RULES = {"plain": "", "pipelines": "pipelines", "copies": "copies", "both": "pipelines+copies"}  # forms of a kernel, and their rule sets
HAND_BUILT = "hand-built"

RULE_GAINS = "rule-gains"
RULES_IN_ORDER = ("pipelines", "copies", "wide", "bounds", "unroll")  # of TVM's schedules, as tiles name them
DEFAULT_RULES, ALL_RULES = "pipelines+copies", "+".join(RULES_IN_ORDER)
WITHOUT_ONE = {rule: "+".join(name for name in RULES_IN_ORDER if name != rule) for rule in RULES_IN_ORDER}  # all rules but one, by that one
RULE_FORMS = tuple(dict.fromkeys(("", *RULES_IN_ORDER, DEFAULT_RULES, *WITHOUT_ONE.values(), ALL_RULES)))  # of a kernel, by their rules

TVM_SEARCH = "tvm-search"
OURS_SEARCHED, OURS_BEST, TVM_SEARCHED = "direct/scheduled, searched", "best", "tvm"  # its subjects beside HAND_BUILT and the peers

LAUNCH_OVERLAP = "launch-overlap"
SEPARATE, OVERLAPPING = "without", "with"  # kernels of a layer
OVERLAP_KINDS = ("stream", "graph", "alone")  # ways in which they are timed

ALGORITHMS = "algorithms"
COMPARED = ("im2win/fused", "im2win/stored", "direct/tiled", "im2col/tiled", "implicit_gemm/tiled", "mec/tiled", "mcfa/tiled")
LIBRARY_GEMM = "im2col and library product"  # the name of a subject

FUZZ, BROKEN = "fuzz", "broken-kernels"  # of tests/fuzz/kernels.py and tests/fuzz/broken.py
MUTATION = "mutation"  # of tests/mutation/mutants.py
FLEET = "fleet"  # of benchmarks/fleet.py
KILLED, SURVIVED, TIMEOUT, INCOMPETENT = "killed", "survived", "timeout", "incompetent"  # what becomes of a mutant

WINOGRAD_TC = "winograd-tensor-cores"
PROTOTYPE, SYNCHRONOUS, WHOLE, OTHERS, INTEGERS, TVM = "prototype", "synchronous", "whole", "others", "int8", "tvm"
FUSED = ("pkf-shmem-16", "pkf-shmem-32", "pkf-llc-16", "pkf-llc-32")
REQUANTISED = "requantised"  # int8 to int8, without Winograd's form
REQUANTISED_PEER = f"{REQUANTISED}-cudnn_"  # and so on: cuDNN's algorithms by name on the same problem
INT8 = tuple(f"{INTEGERS}-{form}" for form in (PROTOTYPE, *FUSED))  # Winograd's form in int8

LEARNED_MODEL = "learned-model"
RANDOM, ANALYTIC = "random", "analytic order"
NO_MODEL, SCRATCH, OTHER_LAYERS = "search without a model", "learned from this layer", "learned from other layers too"
SMALL_BATCHES = ", batches of 8"  # what is added to an arm's name whose batches are not those of the device's sessions
CHECKPOINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # trials
