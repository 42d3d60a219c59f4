"""What a campaign of random kernels (`fuzz_campaign`) and its processes (`fuzz_worker`) tell each other. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

Target = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Case:
    """A kernel with its tensors, in plain values.

    Attributes:
        conv: key of the problem. algorithm: algorithm and schedule in one word; "" if none computes the problem.
        tile: the tile's plain values. listed: whether the schedule's space holds the tile; others are legal only.
        machine: fields of the CPU that it is built for; empty for CUDA.
        accuracy: that the schedule was asked for, one of `im2win.spec.accuracy`.
        tensors: kind of tensors, see `fuzz_cases.made`. seed: of the tensors, and of the emulator's order of threads.
    """

    target: Target
    conv: str
    algorithm: str = ""
    tile: dict[str, Any] = field(default_factory=dict)
    listed: bool = True
    machine: dict[str, Any] = field(default_factory=dict)
    accuracy: Any = "float32"
    tensors: str = "integers"
    seed: int = 0

    def to_json(self) -> str:
        """All fields in one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Job:
    """The case of an index (see `fuzz_cases.drawn`), or this one."""

    target: Target
    seed: int
    index: int
    case: Case | None = None


@dataclass(frozen=True)
class Answer:
    """How a case ended.

    Attributes:
        outcome: "equal", "close", "refused"; "wrong", or "error" where no output came; of a process that died "crashed" or "timeout".
        message: what is wrong, or why no algorithm computes the problem.
        peak_bytes: largest resident memory of the process so far, or of a compiler that it ran.
        cpu_s: seconds of processor time since the answer before, or since the process began; of compilers, too.
    """

    outcome: str
    case: Case | None = None
    message: str = ""
    peak_bytes: int = 0
    cpu_s: float = 0.0
