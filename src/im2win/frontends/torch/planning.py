"""Selects the operator of each layer of a PyTorch module by the look-up, and loads or builds it; or leaves the layer to PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from im2win.builder.batch import LEAST, Builders, Chooser, build_ahead
from im2win.builder.cache import Artefacts
from im2win.builder.devices import Ask, device_for
from im2win.common.progress import Reporter
from im2win.common.quantities import counted
from im2win.device.cpu import Machine
from im2win.frontends.torch import native, pool
from im2win.frontends.torch.bound import log, register
from im2win.frontends.torch.guard import Guard, Times
from im2win.frontends.tuning import checked_trials, tune_untuned
from im2win.records.tiers import TUNED, Untuned, checked_untuned
from im2win.runtime.op import Op
from im2win.spec.accuracy import Accuracy, checked_accuracy
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from im2win.registry.backends import Device

Dynamic = Literal["fallback", "build"]
SLOWER = "PyTorch is as fast or faster"  # why PyTorch's convolution stays after both were timed


@dataclass(frozen=True)
class Decision:
    """The decision for a problem.

    Attributes:
        name, op: the artefact and its operator; "" and None where PyTorch's convolution stays.
        reason: the tier of the look-up, or why PyTorch's convolution stays.
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


@dataclass
class Prepared:
    """The decision for a problem that the example brought to a call site.

    Attributes:
        error: largest difference from PyTorch over the largest sum of magnitudes; None where nothing was compared.
        times: of im2win's operator and of PyTorch's path; None where they were not timed.
        found: the decision before they were timed, where that changed it.
        against: PyTorch's operator that was timed, where the module itself runs something slower; else "".
    """

    decision: Decision
    error: float | None = None
    times: Times | None = None
    found: Decision | None = None
    against: str = ""


class Planner:
    """Makes one decision for each problem.

    Args:
        logs, accuracy, threads: as for `im2win.build`.
        cache: folder of artefacts; None for `files.default_folder()`.
        untuned: layers without a tuning record of this device: "default" uses a neighbouring layer's tile or the analytic model's, "keep"
            leaves them to PyTorch.
        dynamic: calls with another shape: "fallback" leaves them to PyTorch, "build" builds an operator at the first such call.
        trials: what each layer without a record is tuned with inside `ahead`; None tunes nothing.
        guard: keep PyTorch's path where im2win's operator is not faster.
        reporter: shows what is going on.

    Raises:
        ValueError: an unknown value; the message names the argument and the valid values.
    """

    def __init__(
        self, *, logs: Any = None, cache: Any = None, untuned: Untuned = "default", dynamic: Dynamic = "fallback",
        accuracy: Accuracy = "float32", threads: int | None = None, trials: int | None = None, guard: bool = True,
        reporter: Reporter | None = None,
    ) -> None:  # fmt: skip
        if dynamic not in get_args(Dynamic):
            raise ValueError(f"`dynamic` (={dynamic!r}) must be one of {', '.join(get_args(Dynamic))}.")
        self.dynamic, self.threads, self.accuracy, self.trials = dynamic, threads, checked_accuracy(accuracy), checked_trials(trials)
        self.artefacts, self._logs, self.reporter = Artefacts(cache), logs, reporter or Reporter("optimizing")
        self.guard = Guard(self.artefacts.folder) if guard else None
        self._chooser = Chooser(self.artefacts.folder, logs, self.accuracy, checked_untuned(untuned))
        self._devices: dict[str, Device] = {}
        self._decided: dict[tuple[Conv2d, str], Decision] = {}
        self._wanted: dict[tuple[Conv2d, str], None] | None = None  # collects problems inside `ahead`
        self._noted = False

    def __deepcopy__(self, memo: Any) -> Planner:
        return self

    def decide(self, conv: Conv2d, target: str) -> Decision:
        """The decision for a problem on "cpu" or "cuda". A problem for which no operator can be built stays with PyTorch, with the reason.

        Raises:
            ValueError: there are fewer CPUs than `threads`.
            NoGpuError: target "cuda" without a usable GPU.
            ToolchainError: there is no linker, or no CUDA compiler, and no artefact in the cache.
        """
        key = conv, target
        if key not in self._decided:
            self._device(target)  # raises if there is no such device, whatever the decision
            try:
                self._decided[key] = self._decide(conv, target)
            except ValueError as error:  # no algorithm or no legal tile
                self._decided[key] = Decision("", None, str(error))
        return self._decided[key]

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """A context that tunes, if there are trials, and builds the operators of all problems `noted` inside it when it ends, on all CPUs.

        `decide` then loads them from the cache.

        Raises:
            ValueError: there are fewer CPUs than `threads`.
            NoGpuError: target "cuda" without a usable GPU.
            LogError: with trials, the log cannot be written.
        """
        self._wanted = {}
        try:
            yield
            wanted = [one for one in self._wanted if one not in self._decided]
        finally:
            self._wanted = None
        if self.trials is not None:
            self._tune(wanted, self.trials)
        self.reporter.step(note=f"selecting and building {counted(len(wanted), 'operator')}")
        if wanted and self._chooser.untuned == "default":  # some of them will be called
            native.begin()
        with Builders() as builders:
            ask = builders.host if len(wanted) >= LEAST else Machine.host
            missing = [(conv, self._device(target, ask)) for conv, target in wanted]
            self.artefacts.built += build_ahead(self._chooser, missing, builders, self.reporter)

    def _tune(self, wanted: list[tuple[Conv2d, str]], trials: int) -> None:
        """Tunes the problems that no record of this device is about."""
        for target in dict.fromkeys(target for _, target in wanted):
            convs = [conv for conv, where in wanted if where == target]
            threads = self.threads if target == "cpu" else None
            tune_untuned(
                convs, target, trials=trials, logs=self._logs, threads=threads, accuracy=self.accuracy, reporter=self.reporter
            )

    def noted(self, conv: Conv2d, target: str) -> bool:
        """Notes a problem inside `ahead`. Returns whether it was noted, to be decided later."""
        if self._wanted is None:
            return False
        self._wanted[conv, target] = None
        return True

    def slug(self, target: str) -> str:
        """The device's name in the cache and in logs."""
        return self._device(target).name

    def _device(self, target: str, ask: Ask = Machine.host) -> Device:
        if target not in self._devices:
            self._devices[target] = device_for(target, self.threads if target == "cpu" else None, ask)
        return self._devices[target]

    def _decide(self, conv: Conv2d, target: str) -> Decision:
        device = self._device(target)
        selection = self._chooser.select(conv, device)
        if not selection.algorithm:
            return Decision("", None, selection.tier)
        if target == "cpu":
            pool.share()
        native.load()
        name, op = self.artefacts.selected(selection, conv, device)

        def another(other: Conv2d) -> str | None:
            return self.decide(other, target).name or None

        register(name, op, another if self.dynamic == "build" else None)
        return Decision(name, op, selection.tier, target)

    def note_other_shape(self, layer: str, shape: tuple[int, ...], layout: str) -> None:
        """Logs, once for a module, that an input has another shape or layout than on the example."""
        if not self._noted:
            self._noted = True
            log.warning(
                "%s: input %s (%s) is not the example's: PyTorch computes such calls; dynamic='build' builds operators for them",
                layer, shape, layout,
            )  # fmt: skip


class Listing(Planner):
    """Lists the problems that a module brings, and leaves all of them to PyTorch: nothing is looked up or built.

    Attributes:
        found: problems with their kinds of device, in the order of their first call.
    """

    def __init__(self) -> None:
        super().__init__(guard=False)
        self.found: dict[tuple[Conv2d, str], None] = {}

    def decide(self, conv: Conv2d, target: str) -> Decision:
        """Notes the problem."""
        self.found[conv, target] = None
        return Decision("", None, "it is listed only")

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Does nothing."""
        yield
