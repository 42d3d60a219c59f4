"""The tuning record of one candidate: a frozen value that is stored as one readable line of JSON, with a checksum."""

from __future__ import annotations

import json
import math
import numbers
import re
import reprlib
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from functools import cached_property, lru_cache
from typing import Any

from im2win.records.checksum import FIELD, checksum
from im2win.spec import methods
from im2win.spec.conv2d import Conv2d
from im2win.spec.objective import cost

SCHEMA = 5
NO_KERNEL = "none"  # the fingerprint of a candidate that was not compiled
EQUAL = "equal"  # the outcome of a candidate whose kernel was measured as that of another tile
OUTCOMES = ("ok", "wrong", "build_error", "crashed", "timeout", "illegal", EQUAL)

TileValue = int | str | bool

_LARGEST = 2**63 - 1
_LEAST_S = 1e-9  # no clock resolves less, and no call takes less: a smaller time was not measured
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DATE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|\+00:00)", re.ASCII)
_show = reprlib.Repr()
_show.maxstring = _show.maxother = 80


class RecordError(ValueError):
    """An invalid record or line of a log. The message names the field, its value and the rule."""


@lru_cache(maxsize=1 << 16)
def parse_key(key: str) -> Conv2d:
    """The convolution that a key names. Only the spelling of ``str(conv)`` is accepted, so that each layer has one file name.

    Raises:
        ValueError: `Conv2d.parse` refuses the key, or ``str(conv)`` would spell it differently.
    """
    conv = Conv2d.parse(key)
    if str(conv) != key:
        raise ValueError(f"key {key!r} must be written {str(conv)!r}.")
    return conv


def is_device(name: object) -> bool:
    """Whether `name` can name a device and its folder: letters, digits, dots, dashes and underscores, not beginning with a dot or dash."""
    return isinstance(name, str) and _DEVICE.fullmatch(name) is not None


def utc_now() -> str:
    """The date of a new record: ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    """A number of another library (numpy, say) as Python's own, which JSON can write; other values unchanged."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _seconds(value: Any) -> Any:
    """The samples as a tuple of floats. A value that is not a list of numbers is returned unchanged, and the field's rule refuses it."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return value
    return tuple(float(v) if type(v) is int and abs(v) <= _LARGEST else v for v in map(_plain, value))


def _is_integer(value: Any, least: int = -_LARGEST) -> bool:
    return type(value) is int and least <= value <= _LARGEST


def _is_measure(value: Any) -> bool:
    return value is None or _is_integer(value, 0) or (type(value) is float and 0 <= value < math.inf)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_tile(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_word(k) and (isinstance(v, bool | str) or _is_integer(v)) for k, v in value.items())


def _is_samples(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(v) is float and _LEAST_S <= v < math.inf for v in value)


def _is_date(value: Any) -> bool:
    if not isinstance(value, str) or not (match := _DATE.fullmatch(value)):
        return False
    try:
        datetime.fromisoformat(match[1])
    except ValueError:
        return False
    return True


_WORD = (_is_word, "a string that is not empty")
_MEASURE = (_is_measure, "a finite number of at least 0, or null")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schema": (lambda value: _is_integer(value) and value == SCHEMA, f"{SCHEMA}, the only schema this version reads"),
    "conv": (lambda value: isinstance(value, str), "a string, the key of a Conv2d"),
    "algorithm": _WORD,
    "schedule": _WORD,
    "tile": (_is_tile, "an object whose values are integers, strings or booleans"),
    "outcome": (lambda value: value in OUTCOMES, "one of " + ", ".join(OUTCOMES)),
    "message": (lambda value: isinstance(value, str), "a string"),
    "samples_s": (_is_samples, f"a list of finite seconds of at least {_LEAST_S:g}"),
    "error": _MEASURE,
    "tolerance": _MEASURE,
    "extra_bytes": (lambda value: value is None or _is_integer(value, 0), "an integer of at least 0, or null"),
    "device": (is_device, "a device's slug: letters, digits, dots, dashes and underscores, a letter or digit first"),
    "threads": (lambda value: _is_integer(value, 1), "an integer of at least 1"),
    "target": _WORD,
    "tvm": _WORD,
    "im2win": _WORD,
    "fingerprint": _WORD,
    "generator": (lambda value: isinstance(value, str), "a string"),
    "rivals": (lambda value: isinstance(value, str), "a string"),
    "seed": (_is_integer, "an integer"),
    "trial": (lambda value: _is_integer(value, 0), "an integer of at least 0"),
    "date": (_is_date, "a date and time in UTC as ISO 8601 writes it, such as 2026-01-31T12:00:00+00:00"),
}


def converted(found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record of an older schema in today's schema; `found` itself if it has no older schema.

    Schema 4 had no checksum. Schema 3 also had no `rivals`. Schema 2 also had other names for some fields of tiles. Schema 1 also had one
    name for algorithm and schedule, no `generator`, and a digest of source text as `fingerprint`. Such a record states which tile was
    fast, but not of which kernel.
    """
    schema = found.get("schema")
    if type(schema) is not int or schema not in (1, 2, 3, 4):
        return found
    values = {**found, "schema": SCHEMA}
    if schema < 4:
        values["rivals"] = ""
    if schema < 3 and "tile" in found:
        values["tile"] = methods.converted_tile(found["tile"])
    if schema == 1:
        values["generator"] = ""
        if isinstance(found.get("algorithm"), str):
            values["algorithm"], values["schedule"] = methods.split(found["algorithm"])
    return values


def _fail(name: str, value: object, rule: str) -> RecordError:
    return RecordError(f"`{name}` (={_show.repr(value)}) must be {rule}.")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One candidate (algorithm and tile) tried on one layer and device: its outcome, raw times, check and versions.

    Numbers of other libraries become Python's own, and a list of samples becomes a tuple. A failed candidate may have an `error` that is
    NaN or infinite because its output held such values: it becomes None. A candidate with the outcome "ok" must have a finite error.

    Fields:
        schema: version of this list of fields.
        conv: key of the layer, ``str(conv)``.
        algorithm, schedule, tile: what was tried; the tile as ``Tile.as_dict()`` gives it.
        outcome: ok, wrong (failed its check), build_error, crashed, timeout, illegal, or equal (not measured, since another tile of the
            algorithm makes the same kernel, and was).
        message: why it was not ok; empty otherwise.
        samples_s: every time measured, in seconds, in order, each at least a nanosecond; at least one where ok, none otherwise.
        error, tolerance: greatest relative error against the float64 reference, and what was allowed; None if not checked.
        extra_bytes: memory beyond input, filter and output, in bytes; None if unknown.
        device: slug of the machine, the folder of its logs.
        threads: threads that ran the kernel.
        target: kind of target, such as "cpu".
        tvm, im2win: versions.
        fingerprint: of the kernel that was timed (`im2win.records.emission`); `NO_KERNEL` where none was compiled.
        generator: digest of the source of its method's kernels (`im2win.registry.sources.code_digest`); empty if unknown.
        rivals: the default tile that was measured beside it, as accuracy and digest of the source that selects it (`rivals_now`), such as
            "float32:0123456789abcdef", with ":default" behind it for that tile's own record; empty if unknown.
        seed, trial: seed of the search, and the number of this candidate in it.
        date: ISO 8601, UTC.

    Raises:
        RecordError: a message that names the field, its value and the rule.
    """

    schema: int = SCHEMA
    conv: str
    algorithm: str
    schedule: str
    tile: dict[str, TileValue] = field(hash=False)
    outcome: str
    message: str = ""
    samples_s: tuple[float, ...] = ()
    error: float | None = None
    tolerance: float | None = None
    extra_bytes: int | None = None
    device: str
    threads: int
    target: str
    tvm: str
    im2win: str
    fingerprint: str
    generator: str = ""
    rivals: str = ""
    seed: int
    trial: int
    date: str = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        for name in _RULES:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        object.__setattr__(self, "samples_s", _seconds(self.samples_s))
        if isinstance(self.tile, Mapping):
            object.__setattr__(self, "tile", {key: _plain(value) for key, value in self.tile.items()})
        if self.outcome != "ok" and isinstance(self.error, float) and not math.isfinite(self.error):
            object.__setattr__(self, "error", None)
        for name, (holds, rule) in _RULES.items():
            if not holds(getattr(self, name)):
                raise _fail(name, getattr(self, name), rule)
        self._check_together()

    def _check_together(self) -> None:
        """Checks the rules that involve several fields."""
        try:
            parse_key(self.conv)
        except ValueError as error:
            raise _fail("conv", self.conv, f"the key of a valid Conv2d: {str(error).rstrip('.')}") from error
        if self.outcome == "ok" and not self.samples_s:
            raise _fail("samples_s", self.samples_s, 'a list of at least one time, as `outcome` (="ok") says')
        if self.outcome != "ok" and self.samples_s:
            raise _fail("samples_s", self.samples_s, f"empty, as `outcome` (={self.outcome!r}) is not ok")
        if self.outcome == "ok" and self.error is not None and self.tolerance is not None and not self.error <= self.tolerance:
            raise _fail("error", self.error, f'at most `tolerance` (={self.tolerance!r}), as `outcome` (="ok") says')

    @cached_property
    def seconds(self) -> float | None:
        """Median of the samples in seconds; None if not ok."""
        return statistics.median(self.samples_s) if self.samples_s else None

    @cached_property
    def cost(self) -> float:
        """What candidates are compared by, in seconds: time and memory (`im2win.spec.objective`); infinite if not ok."""
        return math.inf if self.seconds is None else cost(self.conv2d, self.seconds, self.extra_bytes or 0)

    @property
    def gflops(self) -> float | None:
        """Speed in 1e9 operations a second; None if not ok.

        It counts the operations of direct convolution for every algorithm (`Conv2d.flops`).
        """
        return None if self.seconds is None else self.conv2d.flops / self.seconds / 1e9

    @property
    def method(self) -> str:
        """Algorithm and schedule in one word, the key of the registry's row."""
        return methods.key(self.algorithm, self.schedule)

    @property
    def conv2d(self) -> Conv2d:
        """The layer."""
        return parse_key(self.conv)

    def to_line(self) -> str:
        """The record as one line of ASCII JSON without the newline: fields in the order above, then their checksum."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps({**values, FIELD: checksum(values)}, allow_nan=False)

    @classmethod
    def from_line(cls, text: str) -> Record:
        """The inverse of `to_line`. A newline at the end is optional. Lines of older schemas hold no checksum and are read without one.

        Raises:
            RecordError: not JSON, not an object, another schema, a field that is missing, unknown or not valid, or a checksum that is
                missing or not that of the line.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"the line (={_show.repr(text)}) must be JSON: {error}.") from error
        if not isinstance(found, dict):
            raise RecordError(f"the line (={_show.repr(text)}) must be a JSON object.")
        stated, today = found.get(FIELD), found.get("schema") == SCHEMA
        expected = _expected(found) if today else None
        found = converted({name: value for name, value in found.items() if name != FIELD} if today else found)
        if "schema" in found and not _RULES["schema"][0](found["schema"]):
            raise _fail("schema", found["schema"], _RULES["schema"][1])
        for name in _RULES:
            if name not in found:
                raise RecordError(f"`{name}` is missing; a line must hold all of {', '.join(_RULES)}.")
        for name, value in found.items():
            if name not in _RULES:
                raise RecordError(f"`{_show.repr(name)[1:-1]}` (={_show.repr(value)}) must be one of {', '.join(_RULES)}.")
        record = cls(**found)
        if stated != expected:
            rule = f"{expected!r}, the checksum of the line: something changed it after it was written"
            raise RecordError(f"`{FIELD}` is missing; it must be {rule}.") if stated is None else _fail(FIELD, stated, rule)
        return record


def _expected(found: Mapping[str, Any]) -> str:
    """The checksum of a line.

    Raises:
        RecordError: the line is nested too deeply.
    """
    try:
        return checksum(found)
    except ValueError as error:
        raise RecordError(f"the line must be a record: {error}.") from None
