"""What the tests of the tuner share."""

from __future__ import annotations

import pytest

from im2win.device.cpu import Machine


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.host()
