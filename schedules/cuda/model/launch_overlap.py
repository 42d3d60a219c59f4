"""Which kernels are launched with overlap by default; see `schedules.cuda.launch_overlap`."""

from __future__ import annotations

from im2win.schedules.cuda.model.multistage import LAUNCH_S, Estimate

BY_DEFAULT = True  # whether kernels that are estimated to gain are launched with overlap where nobody says otherwise
WORTH = 0.02  # least share of a call's time that the launches take


def gains(estimate: Estimate) -> bool:
    """Whether overlap is estimated to be worth it: the gaps before the kernels of a call take more than `WORTH` of its time."""
    launches = 2 if estimate.transform else 1
    return launches * LAUNCH_S > WORTH * estimate.seconds
