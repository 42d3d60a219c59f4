"""This machine's CPU or GPU, without TVM's compiler where its facts are known.

To ask a CPU takes a second or two: LLVM, which TVM's compiler brings, says which one it is, and where Linux' table does not say enough, the
package py-cpuinfo starts processes. The facts are kept in the cache's folder, under a digest of what the system says about the CPU.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from im2win.common.files import default_folder, replace_text
from im2win.common.json_text import parsed
from im2win.device.cpu import Machine, usable_cpus

if TYPE_CHECKING:
    from im2win.registry.backends import Device

Ask = Callable[[], Machine]

_log = logging.getLogger("im2win")
_DIGITS = 16
_CPUINFO, _CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")
_VARYING = ("processor", "cpu MHz", "bogomips", "BogoMIPS", "core id", "apicid", "initial apicid", "physical id", "siblings", "cpu cores")
_KNOWN: dict[Path, Machine] = {}


def device_for(target: str, threads: int | None = None, ask: Ask = Machine.host) -> Device:
    """As `registry.backends.device_for`; `ask` as for `host`."""
    if target == "cpu":
        return host(threads, ask)
    from im2win.registry import backends

    return backends.device_for(target, threads)


def host(threads: int | None = None, ask: Ask = Machine.host) -> Machine:
    """As `Machine.host`.

    Args:
        ask: asks the CPU for its facts where they are not known.
    """
    known = _known(_said(), default_folder(), ask)
    if known is None:
        return Machine.host(threads)
    usable = usable_cpus()
    if threads is None:
        return replace(known, threads=usable)
    valid = isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= usable
    return replace(known, threads=threads) if valid else Machine.host(threads)  # which says what is wrong


def _said() -> str:
    """A digest of what Linux says about the first CPU, and of what reads it; "" on other systems."""
    try:
        first = _CPUINFO.read_text().split("\n\n")[0].splitlines()
        caches = [path.read_text() for kind in ("level", "type", "size") for path in sorted(_CACHES.glob(f"index*/{kind}"))]
    except OSError:
        return ""
    lines = [line for line in first if line.split("\t")[0].strip() not in _VARYING]
    return hashlib.sha256("\n".join([*lines, *caches, str(os.cpu_count()), *_readers()]).encode()).hexdigest()[:_DIGITS]


def _readers() -> list[str]:
    """Paths, sizes and times of change of the modules that ask the CPU."""
    paths = [spec.origin for name in ("tvm", "cpuinfo", "im2win.device.cpu") if (spec := importlib.util.find_spec(name)) and spec.origin]
    return [f"{path} {found.st_size} {found.st_mtime_ns}" for path in paths for found in [Path(path).stat()]]


def _known(said: str, folder: Path, ask: Ask) -> Machine | None:
    """The CPU's facts from the cache, or asked and kept; None where nothing tells CPUs apart."""
    if not said:
        return None
    path = folder / "cpus" / f"{said}.json"
    if path not in _KNOWN:
        _KNOWN[path] = _read(path) or _asked(path, ask)
    return _KNOWN[path]


def _read(path: Path) -> Machine | None:
    try:
        return Machine(**parsed(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _asked(path: Path, ask: Ask) -> Machine:
    machine = ask()
    try:
        replace_text(path, json.dumps(asdict(machine)) + "\n")
    except OSError as error:
        _log.info("what is known of the CPU is not kept (%s)", error)
    return machine
