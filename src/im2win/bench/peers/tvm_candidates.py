"""Compiles and times the candidates of TVM's default search as TVM does, one at a time, but without steps that take minutes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm
from filelock import FileLock
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.runner.local_runner import default_alloc_argument
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

BUILD_S = 360.0  # seconds; TVM's 30 s are too few for a large candidate where every CPU compiles two
RUN_S = 60.0  # seconds for one candidate, which may start a new process
SLOW_S = 0.1  # seconds; a longer call is timed once
NICENESS = 5
_POLL_S = 0.005


def compile_candidate(module: Any, target: Any, parameters: Any) -> Any:
    """Compiles a candidate as TVM's builder does.

    TVM's own function registers every tensor intrinsic first, which takes each process 20 s, although a candidate already contains its
    intrinsics.
    """
    return tvm.driver.build(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module), target=target)


def give_way() -> None:
    """Lowers this process's priority below that of processes that measure."""
    os.nice(NICENESS)


@derived_object  # type: ignore[untyped-decorator,unused-ignore]
class Builder(ms.builder.PyBuilder):  # type: ignore[misc,unused-ignore]
    """TVM's builder with a given number of processes; it appends the messages of candidates that do not compile to `errors`."""

    def __init__(self, processes: int, errors: list[str]) -> None:
        super().__init__()
        how: dict[str, Any] = {"f_build": compile_candidate, "initializer": give_way}
        self._builder, self._errors = ms.builder.LocalBuilder(max_workers=processes, timeout_sec=BUILD_S, **how), errors

    def build(self, build_inputs: list[Any]) -> list[Any]:
        """The inputs' libraries or errors, in order."""
        built: list[Any] = self._builder.build(build_inputs)
        self._errors += [str(one.error_msg) for one in built if one.error_msg is not None]
        return built


_held: dict[str, Any] = {}  # lives in TVM's measuring process, which serves one search: all its candidates have the same arguments


def arguments(device: Any, kinds: Any, count: int) -> Any:
    """`count` lists of tensors with random values, created once in each process."""
    key = repr((str(device), kinds, count))
    if key not in _held:
        _held.clear()
        _held[key] = default_alloc_argument(device, kinds, count)
    return _held[key]


def _prepare(device_type: str, kinds: Any) -> None:
    arguments(tvm.runtime.device(device_type, 0), kinds, 1)


def seconds(module: Any, device: Any, how: Any, tensors: Any) -> list[float]:
    """Seconds per call, as the evaluator's configuration `how` says, or one sample if a call takes more than `SLOW_S`."""

    def sampled(number: int, repeat: int, least_ms: int) -> list[float]:
        timer = module.time_evaluator(module.entry_name, device, number=number, repeat=repeat, min_repeat_ms=least_ms)
        return [float(sample) for sample in timer(*tensors[0]).results]

    device.sync()
    once = sampled(1, 1, 0)
    return once if once[0] > SLOW_S else sampled(how.number, how.repeat, how.min_repeat_ms)


@derived_object  # type: ignore[untyped-decorator,unused-ignore]
class OneAtATime(ms.runner.PyRunner):  # type: ignore[misc,unused-ignore]
    """TVM's runner for several processes: the one that holds the lock measures.

    Tensors are created before. `errors` as for `Builder`.
    """

    def __init__(self, runner: Any, lock: Path, errors: list[str]) -> None:
        super().__init__()
        self._runner, self._lock, self._errors = runner, FileLock(lock), errors

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        """Futures of the inputs' times, in order."""
        if not runner_inputs:  # no candidate compiled
            return []
        first = runner_inputs[0]
        kinds = tuple(kind.as_json() for kind in first.args_info)
        with contextlib.suppress(Exception):  # the candidates' results report what is wrong
            self._runner.pool.submit(_prepare, str(first.device_type), kinds).result()
        futures: list[Any] = []
        for given in runner_inputs:
            with self._lock.acquire(poll_interval=_POLL_S):
                futures += self._runner.run([given])
        said = [future.result().error_msg for future in futures]
        self._errors += [str(error) for error in said if error is not None]
        return futures


@contextlib.contextmanager
def runner(lock: Path, gpu: bool, errors: list[str]) -> Iterator[Any]:
    """Times candidates while no other process with the lock does: about 0.2 s each, on a CPU by TVM's defaults."""
    how = ms.runner.EvaluatorConfig(number=1, repeat=3, min_repeat_ms=30) if gpu else ms.runner.EvaluatorConfig()
    ways: dict[str, Any] = {"f_alloc_argument": arguments, "f_run_evaluator": seconds}
    inner = ms.runner.LocalRunner(timeout_sec=RUN_S, evaluator_config=how, **ways)
    try:
        yield OneAtATime(inner, lock, errors)
    finally:
        inner.pool.shutdown()  # ends the process that holds the tensors
