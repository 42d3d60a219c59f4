"""A subject of benchmarks whose answer and time are known. A worker process imports this module alone, without TVM."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from im2win.bench.peers.subject import Tensors, Trial
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class Fake:
    """Answers with the reference times `factor`, after `seconds` of work; dies, raises or hangs on demand."""

    name: str
    seconds: float = 0.0
    factor: float = 1.0
    mood: str = ""

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        if self.mood == "dies":
            os._exit(3)
        if self.mood == "raises":
            raise ValueError("not this layer")
        if self.mood == "hangs":
            time.sleep(60)
        answer = (tensors.expected(conv) * self.factor).astype(np.float32)

        def call() -> None:
            end = time.perf_counter() + self.seconds
            while time.perf_counter() < end:
                pass

        return Trial(call, lambda: answer, "fake", True, 64, {"width": 8}, "nearest layer")
