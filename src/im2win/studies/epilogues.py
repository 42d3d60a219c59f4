"""What an activation costs in the kernel that it is fused into: a layer with it against the same layer without, both with default tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from im2win.bench.cpu import SEED, Ours, checked, spreads
from im2win.bench.harness import Worker, WorkerError, interleaved
from im2win.bench.peers.subject import Tensors, Trial
from im2win.bench.results import UNTUNED
from im2win.device.cpu import Machine
from im2win.numerics.tolerance import tolerance
from im2win.spec.conv2d import Conv2d

WITHOUT = "without"


@dataclass(frozen=True)
class Without(Ours):
    """The operator of a layer without its activation."""

    tuned: bool | None = False
    name: str = WITHOUT

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        return super().prepare(conv.with_(activation="none"), tensors, threads)


def measure(
    convs: Sequence[Conv2d], threads: int | None = None, rounds: int = 15, progress: Callable[[int, dict[str, Any]], object] | None = None
) -> list[dict[str, Any]]:
    """Times each layer with and without its activation, in processes of their own and in interleaved rounds.

    Returns:
        For each layer its key `conv`, `activation`, `ms` and `without_ms` (medians, with `spread` beside them) and the `cost`: by how much
        more time the activation takes, 0.1 for a tenth. A layer that failed has `failed` instead.
    """
    machine, rows = Machine.host(threads), []
    with ExitStack() as stack:
        workers = {one.name: stack.enter_context(Worker(one, machine.threads)) for one in (Ours(tuned=False, name=UNTUNED), Without())}
        for done, conv in enumerate(convs, 1):
            row: dict[str, Any] = {"conv": str(conv), "activation": conv.activation}
            try:
                for name, worker in workers.items():
                    layer = conv.with_(activation="none") if name == WITHOUT else conv
                    checked(worker.prepare(conv, SEED).output, Tensors.random(conv, SEED).expected(layer), tolerance(layer))
                samples, failed = interleaved(workers, rounds)
                if failed:
                    raise WorkerError("; ".join(failed.values()))
                found = spreads(samples)
                ms, without = found[UNTUNED].median, found[WITHOUT].median
                row |= {"ms": ms, "without_ms": without, "cost": ms / without - 1, "spread": {n: vars(one) for n, one in found.items()}}
            except WorkerError as error:
                row["failed"] = str(error)
            rows.append(row)
            if progress is not None:
                progress(done, row)
    return rows
