"""What the tests of CUDA kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import emulated
import pytest


@pytest.fixture(scope="module")
def unrestored() -> Iterator[None]:
    """Sums of two TF32 parts as the tensor core leaves them: sums of small integers are exact, which restoring would change by a rounding.

    `test_sums_of_parts_do_not_shrink` tests the restoration.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("im2win.schedules.cuda.mma.mma_sync.restored", lambda products: 1.0)
        emulated.forget()
        yield
    emulated.forget()
