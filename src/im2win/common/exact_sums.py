"""Sums of integers that ONNX Runtime computes exactly on every CPU."""

from __future__ import annotations

from typing import Any


def exact_sums(options: Any) -> None:
    """Makes the sessions of `options` (an onnxruntime.SessionOptions) add products of uint8 and int8 without saturation.

    On x86 CPUs without VNNI, ONNX Runtime by default adds two such products in 16 bits (`vpmaddubsw`), which saturates them. Its sums then
    differ from what ONNX defines where filters exceed 6 bits. With this entry it takes a slower instruction; on other CPUs nothing changes.
    Without VNNI it refuses sessions with inputs of int8 (QLinearConv, QGemm) then, whose sums are exact anyway.
    """
    options.add_session_config_entry("session.x64quantprecision", "1")
