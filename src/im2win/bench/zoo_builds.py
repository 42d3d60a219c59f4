"""Builds the operators of many networks of the zoo in one batch, before the first network is measured.

`optimize` builds the operators of one network on all CPUs, but starts its worker processes anew for every network. Here the problems of all
networks are listed first, several networks at once, and one set of workers then selects and builds the operators of all of them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from im2win.bench.zoo import OURS, Setting, Way
from im2win.builder.batch import Builders, Chooser
from im2win.builder.batch import build_ahead as build_batch
from im2win.builder.cache import Artefacts
from im2win.builder.devices import device_for
from im2win.common.progress import reporting
from im2win.frontends.torch.optimizing import problems
from im2win.spec.conv2d import Conv2d

LISTING = 8  # processes that list problems, most; each holds networks and a context of the device


def build_ahead(networks: Sequence[str], batch: int, dtype: str, device: str, names: Sequence[str]) -> dict[str, str]:
    """Builds what `optimize` wants for the networks, on all CPUs, into the cache of operators. Networks are not measured.

    Args:
        names: subjects; those of im2win say in which layouts.

    Returns:
        Of networks whose problems could not be listed, why.
    """
    failed: dict[str, str] = {}
    found: dict[Conv2d, None] = {}
    ours = [one for one in names if one in OURS]
    with ProcessPoolExecutor(min(LISTING, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(_listed, Setting(name, batch, dtype, device), ours): name for name in networks}
        for job in as_completed(jobs):
            if refused := job.exception():
                failed[jobs[job]] = f"{type(refused).__name__}: {refused}"[:500]
            else:
                found |= dict.fromkeys(map(Conv2d.parse, job.result()))
    with Builders() as builders, reporting("building the operators of all networks") as reporter:
        where = device_for(device, None, builders.host)
        build_batch(Chooser(Artefacts(None).folder), [(conv, where) for conv in found], builders, reporter)
    return failed


def _listed(setting: Setting, names: Sequence[str]) -> list[str]:
    """The problems of a network, in the layouts of these subjects."""
    torch.set_num_threads(1)
    convs = [conv for name in names for conv, _ in problems(*Way(name, setting).given())]
    return list(dict.fromkeys(map(str, convs)))
