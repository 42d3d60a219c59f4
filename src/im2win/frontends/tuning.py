"""Tunes the layers of a model that no record of this device is about, before they are built."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from im2win.builder.batch import Chooser
from im2win.common.files import default_folder
from im2win.common.progress import Reporter, reporting
from im2win.common.quantities import counted
from im2win.records.folders import Logs
from im2win.records.record import Record
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

_log = logging.getLogger("im2win")


def checked_trials(trials: int | None) -> int | None:
    """The number of trials, if it is one.

    Raises:
        ValueError: it is neither None nor an integer of at least 1.
    """
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 1):
        raise ValueError(f"`trials` (={trials!r}) must be None or an integer of at least 1.")
    return trials


def tune_untuned(
    convs: Iterable[Conv2d],
    target: str,
    *,
    trials: int,
    logs: Logs = None,
    threads: int | None = None,
    accuracy: Accuracy = "float32",
    reporter: Reporter | None = None,
) -> None:
    """Tunes every distinct problem that im2win computes and that has no record of this device. A warning names those that cannot be tuned.

    Args:
        trials, logs, threads, accuracy: as for `im2win.tune`.
        reporter: shows the progress; a new one if None.

    Raises:
        LogError: the records cannot be written.
    """
    from im2win.registry.backends import device_for
    from im2win.tuner.layers import tune_layers

    device, chooser = device_for(target, threads), Chooser(default_folder(), logs, accuracy)
    untuned = [conv for conv in dict.fromkeys(convs) if chooser.untuned_layer(conv, device)]
    if not untuned:
        return
    if reporter is None:
        with reporting(f"tuning {counted(len(untuned), 'layer')}") as made:
            found = tune_layers(untuned, target, trials=trials, logs=logs, threads=threads, accuracy=accuracy, reporter=made)
    else:
        found = tune_layers(untuned, target, trials=trials, logs=logs, threads=threads, accuracy=accuracy, reporter=reporter)
    for conv, result in found.items():
        if not isinstance(result, Record):
            _log.warning("%s is not tuned: %s", conv, result)
