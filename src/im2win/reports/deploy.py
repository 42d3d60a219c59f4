"""Reports of the studies of deployed convolutions: whole models, ways to run one in PyTorch, and the overhead of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from im2win.bench.results import geometric_mean
from im2win.common import markdown
from im2win.common.markdown import ms, number
from im2win.studies.entries import COLD_PARTS, FLOATS, OURS_COLD, WAITING_FRONTS

ALONE, ANOTHER, PAUSE = "alone", "another", "pause"  # before the timed call: the same one, one with tensors of its own, or none for a while
NO_GRAD = "_no_grad"  # suffix of a way that was called outside inference mode
_TITLES = {"onnxruntime": "ONNX Runtime", "torch": "PyTorch eager"}
_MODES = {"eager": "eager", "compile": "torch.compile"}
_LAYOUTS = {"nchw": "NCHW", "nhwc": "channels-last"}
_WAYS = {
    "kernel": "kernel alone",
    "layer": "layer, arguments checked and output made",
    "site": "site in an optimised module",
    "module": "optimised module",
    "place": "`torch.ops.im2win.site`",
    "operator": "`torch.ops.im2win.conv2d`",
    "torch_conv2d": "`torch.conv2d`",
    "torch_module": "the module in PyTorch",
}

Study = Mapping[str, Any]


def models_table(studies: Sequence[Study]) -> str:
    """Whole models end to end: im2win, each peer, and the peer's time over im2win's, for every device."""
    return "\n\n".join(f"{_models(study)}\n\n{_caption(study)}" for study in studies)


def _models(study: Study) -> str:
    peers = list(dict.fromkeys(name for row in study["models"] for name in (*row["peers"], *row["peers_failed"])))
    inside = any(row.get("inside_ms") or row.get("inside_failed") for row in study["models"])
    rows, of_peer = [], {name: list[float]() for name in peers}
    for row in study["models"]:
        ours = row["ours_ms"]
        ratios = {name: row["peers"][name] / ours for name in peers if ours is not None and name in row["peers"]}
        for name, ratio in ratios.items():
            of_peer[name].append(ratio)
        times = [*([ms(row.get("inside_ms"))] if inside else []), *(ms(row["peers"].get(name)) for name in peers)]
        rows.append([row["model"], ms(ours), *times, *(number(ratios.get(name), 2) for name in peers)])
    means = [number(geometric_mean(of_peer[name]), 2) for name in peers]
    rows.append(["geometric mean", *[""] * (1 + inside + len(peers)), *means])
    titles = [_TITLES.get(name, name) for name in peers]
    heads = ["model", "ours ms", *(["ours in ONNX Runtime ms"] if inside else []), *(f"{title} ms" for title in titles)]
    table = markdown.table([*heads, *(f"over {title}" for title in titles)], rows)
    failures = [
        f"{row['model']}, {_TITLES.get(name, name)}: {reason}"
        for row in study["models"]
        for name, reason in [("ours", row["failed"]), ("ours in ONNX Runtime", row.get("inside_failed")), *row["peers_failed"].items()]
        if reason
    ]
    return "\n\n".join([table, *(["Failed: " + "; ".join(failures)] if failures else [])])


def operators_table(studies: Sequence[Study]) -> str:
    """Single operators: im2win, ONNX Runtime, and the latter's time over im2win's, for every device."""
    return "\n\n".join(f"{_operators(study)}\n\n{_caption(study)}" for study in studies)


def _operators(study: Study) -> str:
    rows, ratios = [], []
    for row in study["models"]:
        inputs = ", ".join("x".join(map(str, shape)) for shape in row["inputs"].values())
        rows.append([row["model"], inputs, ms(row["ours_ms"]), ms(row["peers"].get("onnxruntime")), number(row["ratio"], 2)])
        ratios += [row["ratio"]] if row["ratio"] else []
    rows.append(["geometric mean", "", "", "", number(geometric_mean(ratios), 2)])
    return markdown.table(["operator", "inputs", "im2win ms", "ONNX Runtime ms", "ratio"], rows, words=2)


def quantised_table(studies: Sequence[Study]) -> str:
    """Quantised models end to end: im2win, ONNX Runtime, and both on the float32 models, for every device."""
    return "\n\n".join(f"{_quantised(study)}\n\n{_caption(study)}" for study in studies)


def _quantised(study: Study) -> str:
    rows = []
    ratios: list[list[float]] = [[], []]
    for row in study["models"]:
        ours, theirs = row["ours_ms"], row["peers"].get("onnxruntime")
        floats = [row["spread"].get(name, {}).get("median") for name in FLOATS]
        found = [theirs / ours if ours and theirs else None, floats[0] / ours if ours and floats[0] else None]
        for one, ratio in zip(ratios, found, strict=True):
            one += [ratio] if ratio is not None else []
        rows.append([row["model"], row["activations"], *(ms(one) for one in (ours, theirs, *floats)), *(number(one, 2) for one in found)])
    rows.append(["geometric mean", *[""] * 5, *(number(geometric_mean(one), 2) for one in ratios)])
    columns = ["model", "activations", "ours ms", "ONNX Runtime ms", "ours float32 ms", "ONNX Runtime float32 ms"]
    table = markdown.table([*columns, "over ONNX Runtime", "over our float32"], rows, words=2)
    failures = [
        f"{row['model']}, {name}: {reason}"
        for row in study["models"] for name, reason in [("ours", row["failed"]), *row["peers_failed"].items()] if reason
    ]  # fmt: skip
    return "\n\n".join([table, *(["Failed: " + "; ".join(failures)] if failures else [])])


def pytorch_table(studies: Sequence[Study]) -> str:
    """One model in PyTorch: one line for each way to run it, plain and optimised side by side."""
    rows = []
    for study in studies:
        for mode, layout in ((mode, layout) for mode in _MODES for layout in _LAYOUTS):
            plain, ours = (study["ways"].get(f"{kind}_{mode}_{layout}", {}).get("median") for kind in ("plain", "ours"))
            if plain is None and ours is None:
                continue
            ratio = number(plain / ours if plain is not None and ours is not None else None, 2)
            what = [study["model"], str(study["batch"]), study["dtype"], f"`{study['device']}`"]
            rows.append([*what, f"{_MODES[mode]}, {_LAYOUTS[layout]}", ms(plain), ms(ours), ratio])
    columns = ["model", "images", "dtype", "device", "way", "plain ms", "optimised ms", "ratio"]
    failures = {
        f"{study['model']} {study['dtype']} {way}: {row['failed']}": None
        for study in studies for way, row in study["ways"].items() if "failed" in row
    }  # fmt: skip
    return "\n\n".join([markdown.table(columns, rows, words=5), *(["Failed: " + "; ".join(failures)] if failures else [])])


def overhead_table(studies: Sequence[Study]) -> str:
    """Microseconds of a call of one small layer for every way to call it, and the overhead of each over the kernel alone."""
    rows = [
        [f"`{study['device']}`", layout, _way(way), f"{row['median']:.1f}", f"{row['overhead']:.1f}"]
        for study in studies for layout, ways in study["layouts"].items() for way, row in ways.items()
    ]  # fmt: skip
    return markdown.table(["device", "layout", "call", "us", "over the kernel"], rows, words=3)


def cold_table(studies: Sequence[Study]) -> str:
    """Milliseconds from a new process to its first result, part by part, and what this package takes of them."""
    rows = []
    for study in studies:
        for layer, parts in study["layers"].items():
            times = {part: parts[part]["median"] for part in COLD_PARTS}
            ours = sum(times[part] for part in OURS_COLD)
            rows.append([layer, f"`{study['device']}`", *(number(times[part], 1) for part in COLD_PARTS), number(ours, 1)])
    heads = ["Python", "NumPy", "TVM's runtime", "im2win", "load", "bind", "first call", "second call"]
    return markdown.table(["layer", "device", *(f"{head} ms" for head in heads), "of im2win, to the first result ms"], rows, words=2)


def waiting_table(studies: Sequence[Study]) -> str:
    """Seconds that a call takes the first time, again in a new process, and the imports before it; for every network and device."""
    rows = [
        [network, title, f"`{study['device']}`", *(number(fronts[front][what], 1) for what in ("first", "again", "import"))]
        for study in studies for network, fronts in study["networks"].items()
        for front, title in WAITING_FRONTS.items() if front in fronts
    ]  # fmt: skip
    return markdown.table(["network", "call", "device", "first time s", "again s", "imports s"], rows, words=3)


def shared_table(studies: Sequence[Study]) -> str:
    """Milliseconds of a layer alone, and how many times that it takes right after other libraries' calls in the same process."""
    columns = [ANOTHER, PAUSE, "im2win", "torch_nchw", "onnxruntime", "numpy"]
    rows = []
    for study in studies:
        for layer, subjects in study["layers"].items():
            for name, times in subjects.items():
                ratios = [number(times[what] / times[ALONE] if what in times else None, 2) for what in columns]
                rows.append([layer, f"`{study['device']}`", _library(name), ms(times[ALONE]), *ratios])
    heads = ["itself, other tensors", "a pause", *(_library(name) for name in columns[2:])]
    return markdown.table(["layer", "device", "library", "alone ms", *(f"after {head}" for head in heads)], rows, words=3)


def _library(name: str) -> str:
    return {"torch_nchw": "PyTorch", **_TITLES}.get(name, name)


def _way(name: str) -> str:
    plain = name.removesuffix(NO_GRAD)
    return _WAYS.get(plain, plain) + ("" if plain == name else ", under no_grad")


def _caption(study: Study) -> str:
    shown = ("apache-tvm", "torch", "onnxruntime", "cuda", "cudnn")
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in shown)
    images = f"{study['batch']} image{'s' if study['batch'] > 1 else ''}"
    return f"{images}, {study['brand']} (`{study['device']}`), threads: {study['threads']}; {libraries}; {study['date'][:10]}."
