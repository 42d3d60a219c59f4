"""`im2win explain`: says in words why a layer gets the kernel that it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from im2win.cli.commands import options, tables, workload
from im2win.common.progress import reporting
from im2win.common.quantities import counted
from im2win.spec import methods
from im2win.spec.accuracy import checked_accuracy

if TYPE_CHECKING:
    from im2win.bench.ceilings import Ceilings
    from im2win.registry.backends import Device
    from im2win.reports.explanation import Contender, Explanation

_REASONS = 4  # of refused records that are printed; JSON has all


def explain(
    what: options.What,
    batch: options.Batch = None,
    layers: options.Layers = None,
    logs: options.Logs = None,
    threads: options.Threads = None,
    target: options.Target = "cpu",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="A device with shipped records instead of this machine's, such as nvidia-h200.")
    ] = None,
    dtype: options.Dtype = None,
    out_dtype: options.OutDtype = None,
    layout: options.Layout = None,
    accuracy: options.Accuracy = "float32",
    json: options.Json = False,
) -> None:
    """Say why a layer gets its kernel: where the tile is from, what binds it, how far its roof is, and what was passed over."""
    wanted, skipped = workload.read(what, batch, layers, dtype, layout, out_dtype=out_dtype, deployed=True)
    from im2win.reports.explanation import explain as explained

    made = checked_accuracy(accuracy)
    with reporting("explaining", len(wanted)) as reporter:
        on, ceilings = _device(device, target, threads, list(dict.fromkeys(layer.conv.dtype for layer in wanted)))
        found = []
        for done, layer in enumerate(wanted):
            reporter.step(done, layer.name)
            try:
                found.append(explained(layer.conv, on, logs, made, ceilings))
            except ValueError as error:
                if len(wanted) == 1:
                    raise
                skipped.append(f"{layer.name}: {error}")
        reporter.step(len(wanted))
    if json:
        tables.print_json({"schema": 1, "layers": [one.as_dict() for one in found], "skipped": skipped})
        return
    console = tables.console()
    for line in skipped:
        console.print(f"skipped: {escape(line)}")
    for number, one in enumerate(found):
        console.print(*([""] if number else []), *(escape(line) for line in lines(one)), sep="\n", soft_wrap=True)


def _device(name: str | None, target: str, threads: int | None, dtypes: list[str]) -> tuple[Device, Ceilings | None]:
    """The device that a name means, else this machine's of the target; of this machine's CPU the ceilings of these types, too."""
    from im2win.bench.ceilings import kept
    from im2win.bench.confirmation import device_named
    from im2win.registry.backends import backend_for, device_for

    if name is not None:
        found = device_named(name)
        if found is None:
            raise ValueError(f"`--device` (={name}) must have shipped records; `im2win logs show` with their folder lists devices.")
        return found, None
    here = device_for(target, threads)
    return here, kept(backend_for(here).threads, dtypes=dtypes) if target == "cpu" else None


def lines(one: Explanation) -> list[str]:
    """An explanation in words."""
    from im2win.reports.explanation import CAUSES, TIERS

    threads = f", {counted(one.threads, 'thread')}" if one.chosen.expected_s is None else ""  # of CPUs, whose model gives no time
    dated = f", of {one.date[:10]}" if one.date else ""
    said = [
        f"{one.conv} on {one.brand} ({one.device}{threads})",
        f"  kernel: {methods.shown(one.chosen.algorithm)}, {_time(one.chosen)}",
        f"  tile: {', '.join(f'{name} {value}' for name, value in one.chosen.tile.items())}",
        f"  chosen by: {TIERS[one.tier]}{dated}",
    ]
    if (one.default.algorithm, one.default.tile) != (one.chosen.algorithm, one.chosen.tile):
        said.append(f"  default tile: {methods.shown(one.default.algorithm)}, {_time(one.default)}{_beside(one.default, one.chosen)}")
    causes = ", ".join(f"{CAUSES[cause]} {share:.0%}" for cause, share in one.causes.items() if share >= 0.01)
    said.append(f"  time goes to, as the cost model counts: {causes}")
    if one.bound is not None:
        roofs = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in one.roofs.items())
        expected = "" if one.chosen.measured_s is not None else "expected "
        far = f"; the kernel is {expected}at {one.share:.0%} of it" if one.share is not None else ""
        said.append(f"  roof: {one.bound} (at least: {roofs}){far}")
    if one.runner_up is not None:
        said.append(f"  runner-up: {methods.shown(one.runner_up.algorithm)}, {_time(one.runner_up)}{_beside(one.runner_up, one.chosen)}")
    for reason, count in list(one.refused.items())[:_REASONS]:
        said.append(f"  {counted(count, 'record')} refused: {reason}")
    if len(one.refused) > _REASONS:
        said.append(f"  {counted(sum(list(one.refused.values())[_REASONS:]), 'more record')} refused; --json has every reason")
    said += [f"  not able: {', '.join(names)}: {reason}" for reason, names in one.unable.items()]
    return said


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _time(one: Contender) -> str:
    if one.measured_s is not None:
        return f"measured {_ms(one.measured_s)}"
    return f"expected {_ms(one.expected_s)}, not measured" if one.expected_s is not None else "not measured"


def _beside(one: Contender, chosen: Contender) -> str:
    """How much longer it takes, where both are measured or both expected."""
    for word, theirs, ours in (("", one.measured_s, chosen.measured_s), ("expected ", one.expected_s, chosen.expected_s)):
        if theirs is not None and ours:
            return f", {word}{theirs / ours:.2f}x the time"
    return ""
