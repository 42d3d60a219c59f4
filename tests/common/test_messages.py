"""Errors in one line: the last one that begins a statement, never nothing."""

from __future__ import annotations

import pytest

from im2win.common.messages import brief


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("wrong result", "wrong result"),
        ("Traceback:\n  File a\nInternalError: Check failed\n", "InternalError: Check failed"),
        ("CUDALaunch Error: CUDA_ERROR_INVALID_VALUE\n grid=(392,1,1),  block=(32,4,1)", "CUDALaunch Error: CUDA_ERROR_INVALID_VALUE"),
        ("  all of it indented\n", "all of it indented"),
        ("", "ValueError('')"),
        ("x" * 600, "x" * 500),
    ],
)
def test_the_line_that_says_what_was_wrong(text: str, line: str) -> None:
    assert brief(ValueError(text)) == line
