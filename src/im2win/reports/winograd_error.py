"""Tables of the error of Winograd's forms in float16 and int8, measured in numpy with the arithmetic of the kernels."""

from __future__ import annotations

from im2win.common import markdown
from im2win.numerics.tolerance import tolerance
from im2win.numerics.winograd_error import HALVES, SPREAD
from im2win.numerics.winograd_int8 import FORMS as QUANTISED
from im2win.numerics.winograd_int8 import SCALES
from im2win.numerics.winograd_matrices import transform
from im2win.numerics.winograd_measured import measure, measure_quantised
from im2win.numerics.winograd_tiling import FORMS
from im2win.spec.conv2d import Conv2d

CHANNELS = (16, 64, 512)


def half_table() -> str:
    """One row for each form: the largest error by number of input channels, the tolerance, and the growth of tile values."""
    columns = ["form", "offered", "fewer products", "inputs grow", *(f"error, {count} channels" for count in CHANNELS), "allowed"]
    rows = []
    for taps, outputs in ((taps, m) for taps, forms in FORMS.items() for m in forms):
        form, offered = transform(outputs, taps), outputs in HALVES["float16"][taps]
        allowed = tolerance(Conv2d(1, 64, 32, 32, 64, taps, padding=taps // 2, dtype="float16"), "winograd")
        errors = [f"{100 * measure(outputs, taps, count, 'float16').error:.2f} %" for count in CHANNELS]
        fewer, growth = (outputs * taps / form.size) ** 2, float(max(sum(map(abs, row)) for row in form.bt)) ** 2
        name = f"F({outputs}x{outputs}, {taps}x{taps})"
        rows.append(
            [name, "yes" if offered else "no", f"{fewer:.2f}", f"{growth:.1f}", *errors, f"{100 * allowed:.2f} %" if offered else ""]
        )
    return markdown.table(columns, rows, words=2)


def quantised_table() -> str:
    """One row for each form of 3x3 kernels and kind of scales: as in `half_table`, and the error for smaller inputs."""
    less = SPREAD / 4
    columns = ["form", "a scale for", "offered", "fewer products", "inputs grow", *(f"error, {count} channels" for count in CHANNELS),
               f"error, inputs of a spread of {less:.0f}", "allowed"]  # fmt: skip
    rows = []
    for outputs, scales in ((m, scales) for m in FORMS[3][:2] for scales in SCALES):
        form, offered = transform(outputs, 3), outputs in QUANTISED[3] and scales != SCALES[-1]
        measured = [measure_quantised(outputs, 3, count, scales=scales) for count in CHANNELS]
        small = measure_quantised(outputs, 3, CHANNELS[1], scales=scales, spread=less)
        fewer, growth = (outputs * 3 / form.size) ** 2, float(max(sum(map(abs, row)) for row in form.bt)) ** 2
        errors = [f"{100 * one.error:.2f} %" for one in (*measured, small)]
        what = {"tensor": "all filters", "channel": "a channel", "position": "a channel's position"}[scales]
        allowed = f"{100 * measured[0].tolerance:.2f} %" if offered else ""
        rows.append([f"F({outputs}x{outputs}, 3x3)", what, "yes" if offered else "no", f"{fewer:.2f}", f"{growth:.1f}", *errors, allowed])
    return markdown.table(columns, rows, words=3)
