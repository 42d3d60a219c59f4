"""What Winograd's form costs in float16, as a table: errors measured in numpy, in the arithmetic of the kernels."""

from __future__ import annotations

from im2win import markdown
from im2win.problem import Conv2d
from im2win.reference import tolerance
from im2win.winograd import transform
from im2win.winograd_error import HALVES, measure
from im2win.winograd_tiles import FORMS

CHANNELS = (16, 64, 512)


def half_table() -> str:
    """One row a form: the largest error over the largest output by input channels, beside what is allowed; and what tiles may grow to."""
    columns = ["form", "offered", "fewer products", "inputs grow", *(f"error, {count} channels" for count in CHANNELS), "allowed"]
    rows = []
    for taps, outputs in ((taps, m) for taps, forms in FORMS.items() for m in forms):
        form, offered = transform(outputs, taps), outputs in HALVES[taps]
        allowed = tolerance(Conv2d(1, 64, 32, 32, 64, taps, padding=taps // 2, dtype="float16"), "winograd")
        errors = [f"{100 * measure(outputs, taps, count, 'float16').error:.2f} %" for count in CHANNELS]
        fewer, growth = (outputs * taps / form.size) ** 2, float(max(sum(map(abs, row)) for row in form.bt)) ** 2
        name = f"F({outputs}x{outputs}, {taps}x{taps})"
        rows.append(
            [name, "yes" if offered else "no", f"{fewer:.2f}", f"{growth:.1f}", *errors, f"{100 * allowed:.2f} %" if offered else ""]
        )
    return markdown.table(columns, rows, words=2)
