"""Reports of the sliding-window study (studies/sliding.py): its times by image and stride, and by thread block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.spec.methods import shown
from im2win.studies.entries import DEFAULT, IM2COL

BLOCKS_OF = 4096  # size of the image whose thread blocks are shown, as in the source; the largest image if it was not measured

Entry = Mapping[str, Any]


def table(studies: Sequence[Mapping[str, Any]]) -> str:
    """Markdown for every device: one line for each image and stride, one for each thread block, and where and with what it was measured."""
    return "\n\n".join(f"{_images(study['entries'])}\n\n{_blocks(study['entries'])}\n\n{_caption(study)}" for study in studies)


def _images(entries: Sequence[Entry]) -> str:
    """Times by image and stride: of forms with thread blocks that of the fastest block, and that of the fastest peer."""
    rows = []
    for image, stride in sorted({(entry["image"], entry["stride"]) for entry in entries}):
        here = [entry for entry in entries if (entry["image"], entry["stride"]) == (image, stride)]
        named = {form: _fastest(entry for entry in here if entry["form"] == form) for form in ("global", "shared", IM2COL, DEFAULT)}
        peer, ours = _fastest(entry for entry in here if _is_peer(entry)), named[DEFAULT]
        ratio = f"{peer['ms'] / ours['ms']:.2f}" if peer and ours else "-"
        sliding = [_with_block(named[form]) for form in ("global", "shared")]
        method = shown(ours["algorithm"]) if ours else ""
        rows.append([f"{image}x{image}", str(stride), *sliding, _ms(named[IM2COL]), _ms(ours), method, _ms(peer), ratio])
    columns = ["image", "stride", "global ms", "shared ms", "im2col ms", "ours ms", "our algorithm", "cuDNN ms", "ratio"]
    return markdown.table(columns, rows, words=1)


def _blocks(entries: Sequence[Entry]) -> str:
    """Times by thread block on one image. A block that could not be launched has its reason below the table instead of a time."""
    images = {entry["image"] for entry in entries}
    image = BLOCKS_OF if BLOCKS_OF in images else max(images)
    here = [entry for entry in entries if entry["image"] == image and entry["block"] is not None]
    strides = sorted({entry["stride"] for entry in here})
    rows, reasons = [], dict[str, None]()
    for block in sorted({entry["block"] for entry in here}):
        cells = []
        for form in ("global", "shared"):
            for stride in strides:
                wanted = (form, block, stride)
                entry = next((one for one in here if (one["form"], one["block"], one["stride"]) == wanted), None)
                cells.append("-" if entry is None else "failed" if entry["ms"] is None else _ms(entry))
                if entry is not None and entry["failed"]:
                    reasons[entry["failed"]] = None
        rows.append([f"{block}x{block}", *cells])
    columns = [f"block, {image}x{image}", *(f"{form} ms, stride {stride}" for form in ("global", "shared") for stride in strides)]
    return "\n\n".join([markdown.table(columns, rows), *(["Failed: " + " ".join(reasons)] if reasons else [])])


def _is_peer(entry: Entry) -> bool:
    return str(entry["form"]).startswith(("torch_", "cudnn_"))


def _fastest(entries: Iterable[Entry]) -> Entry | None:
    return min((entry for entry in entries if entry["ms"] is not None), key=lambda entry: float(entry["ms"]), default=None)


def _ms(entry: Entry | None) -> str:
    return "failed" if entry is None else f"{entry['ms']:.4f}" if entry["ms"] < 1 else f"{entry['ms']:.3f}"


def _with_block(entry: Entry | None) -> str:
    return _ms(entry) if entry is None else f"{_ms(entry)} ({entry['block']}x{entry['block']})"


def _caption(study: Mapping[str, Any]) -> str:
    shown = ("apache-tvm", "torch", "cuda", "cudnn")
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in shown)
    return (
        f"3 channels, 3 filters of 3x3, padding 1, float32, one image; {study['brand']} (`{study['device']}`); {libraries}; "
        f"{study['date'][:10]}. In brackets the fastest thread block. Ratio: cuDNN's best time over ours, above 1 we win."
    )
