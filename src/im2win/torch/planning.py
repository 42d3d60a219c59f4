"""What a layer of a PyTorch module gets: the operator that the look-up ladder names, from the cache or built, or PyTorch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from im2win.artefacts import Artefacts
from im2win.problem import Conv2d
from im2win.reference import Accuracy, checked_accuracy
from im2win.rungs import TUNED, Untuned, checked_untuned, rung_for
from im2win.runtime import Op
from im2win.torch import native, pool
from im2win.torch.bound import log, register

Dynamic = Literal["fallback", "build"]


@dataclass(frozen=True)
class Decision:
    """What was decided for a problem.

    name, op: the artefact and its operator; "" and None where PyTorch's convolution stays.
    reason: the rung of the look-up ladder, or why PyTorch's stays.
    target: kind of device that the operator runs on.
    """

    name: str
    op: Op | None
    reason: str
    target: str = ""

    def __deepcopy__(self, memo: Any) -> Decision:
        return self

    @property
    def tuned(self) -> bool:
        """Whether a record of this convolution chose the tile."""
        return self.reason in TUNED


class Planner:
    """Decides for problems, each once.

    Args:
        logs, accuracy, threads: as for `im2win.build`.
        cache: folder of artefacts; None for `artefacts.default_folder()`.
        untuned: what layers get that no record of this device is about: "default", a neighbour's tile or the model's; "keep", PyTorch's.
        dynamic: what calls with another shape get: "fallback", PyTorch's, or "build", an operator built at the first such call.

    Raises:
        ValueError: an unknown word; the message names the argument and the words.
    """

    def __init__(
        self, *, logs: Any = None, cache: Any = None, untuned: Untuned = "default", dynamic: Dynamic = "fallback",
        accuracy: Accuracy = "float32", threads: int | None = None,
    ) -> None:  # fmt: skip
        if dynamic not in get_args(Dynamic):
            raise ValueError(f"`dynamic` (={dynamic!r}) must be one of {', '.join(get_args(Dynamic))}.")
        self.logs, self.untuned, self.dynamic, self.threads = logs, checked_untuned(untuned), dynamic, threads
        self.accuracy = checked_accuracy(accuracy)
        self.artefacts = Artefacts(cache)
        self._decided: dict[tuple[Conv2d, str], Decision] = {}
        self._noted = False

    def __deepcopy__(self, memo: Any) -> Planner:
        return self

    def decide(self, conv: Conv2d, target: str) -> Decision:
        """The decision for a problem on "cpu" or "cuda"; what may not be built stays with PyTorch, for the reason given.

        Raises:
            ValueError: `threads` are not there.
            NoGpuError: target "cuda" without a usable GPU. ToolchainError: no linker, or no CUDA compiler, and no artefact in the cache.
        """
        from im2win.backends import device_for

        key = conv, target
        if key not in self._decided:
            device = device_for(target, self.threads if target == "cpu" else None)
            try:
                self._decided[key] = self._decide(conv, target, device)
            except ValueError as error:  # no algorithm, or no legal tile
                self._decided[key] = Decision("", None, str(error))
        return self._decided[key]

    def _decide(self, conv: Conv2d, target: str, device: Any) -> Decision:
        from im2win.algorithms import ALGORITHMS, candidates
        from im2win.backends import backend_for
        from im2win.lookup import search

        names = [row.name for row in candidates("auto", conv, target, self.accuracy)]
        found = search(conv, device, names, self.logs, self.accuracy)
        record = found.record
        rung = rung_for(conv, found.rung, record.conv2d if record else None)
        if self.untuned == "keep" and rung not in TUNED:
            return Decision("", None, "no record of this layer on this device")
        if record is None:
            rung = "default tile"
            algorithm, tile = self.artefacts.default_choice(conv, device, self.accuracy)
        else:
            algorithm, tile = record.algorithm, backend_for(device).tile(ALGORITHMS[record.algorithm], record.tile)
        if target == "cpu":
            pool.share()
        native.load()
        name, op = self.artefacts.get(conv, algorithm, tile, device, tuned=rung == "exact")

        def another(other: Conv2d) -> str | None:
            return self.decide(other, target).name or None

        register(name, op, another if self.dynamic == "build" else None)
        return Decision(name, op, rung, target)

    def note_other_shape(self, layer: str, shape: tuple[int, ...], layout: str) -> None:
        """Logs, once for a module, that an input has a shape or layout that the example had not."""
        if not self._noted:
            self._noted = True
            log.warning(
                "%s: input %s (%s) is not the example's: PyTorch computes such calls; dynamic='build' builds operators for them",
                layer, shape, layout,
            )  # fmt: skip
