"""The subjects of a benchmark, im2win and its peers: their names for people, their order and their colours."""

from __future__ import annotations

from dataclasses import replace

from im2win.bench.results import Result, Row

TITLES = {
    "torch_nchw": "PyTorch NCHW",
    "torch_nhwc": "PyTorch channels-last",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "cudnn": "cuDNN by name",
    "cudnn-graph": "cuDNN graph",
    "cudnn-graph_nchw": "cuDNN graph NCHW",
    "cudnn-graph_nhwc": "cuDNN graph channels-last",
    "inductor_nchw": "Inductor NCHW",
    "inductor_nhwc": "Inductor channels-last",
    "cutlass": "CUTLASS",
    "tvm": "TVM MetaSchedule",
}
# Okabe and Ito's colours, which colour-blind readers can distinguish; a subject has the same colour in every plot.
# Peers on a GPU have further ones.
COLOURS = {
    "ours": "#0072B2",
    "untuned": "#56B4E9",
    "torch_nchw": "#E69F00",
    "torch_nhwc": "#D55E00",
    "onnxruntime": "#009E73",
    "openvino": "#F0E442",
    "cudnn": "#009E73",
    "cudnn-graph": "#000000",
    "cudnn-graph_nchw": "#666666",
    "cudnn-graph_nhwc": "#000000",
    "inductor_nchw": "#F0E442",
    "inductor_nhwc": "#B8A800",
    "cutlass": "#CC79A7",
    "tvm": "#CC79A7",
}
CUDNN = "cudnn_"  # cuDNN's algorithms called by name


def gathered(result: Result) -> Result:
    """The result with cuDNN's algorithms merged into one subject, the best of them on every layer.

    Failures of single algorithms are left out.
    """

    def row_of(row: Row) -> Row:
        named = {name: time for name, time in row.peers.items() if name.startswith(CUDNN)}
        if not named:
            return row
        peers = {name: time for name, time in row.peers.items() if name not in named}
        failed = {name: why for name, why in row.peers_failed.items() if not name.startswith(CUDNN)}
        best = "cudnn" if row.best_peer in named else row.best_peer
        fastest = min(named, key=lambda name: named[name])
        memory = {**row.peers_extra_bytes, "cudnn": row.peers_extra_bytes.get(fastest, 0)} if row.peers_extra_bytes else {}
        times = {**peers, "cudnn": named[fastest]}
        return replace(row, peers=times, peers_failed=failed, best_peer=best, peers_extra_bytes=memory)

    return replace(result, layers=[row_of(row) for row in result.layers])


def subjects(result: Result) -> list[str]:
    """Peers in the result, in the order of `TITLES`, then by name."""
    names = {name for row in result.layers for name in (*row.peers, *row.peers_failed)}
    return [name for name in TITLES if name in names] + sorted(names - TITLES.keys())
