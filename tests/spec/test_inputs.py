"""Bad inputs: each is refused where it enters, with a message that names the argument, its value and the rule."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ops import default, host, supported

import im2win
from im2win import Conv2d, ConvError, Tile
from im2win.codegen.llvm import TileError
from im2win.device.cpu import Machine
from im2win.packing import codec as packs
from im2win.registry.schedules import schedule_of
from im2win.runtime.manifest import ArtefactError, Manifest, manifest_path
from im2win.runtime.seal import seal
from im2win.runtime.tensors import ArgumentError

BASE: dict[str, Any] = {"batch": 1, "in_channels": 4, "height": 8, "width": 9, "out_channels": 6, "kernel": 3}
INTEGER, ONE = "must be an integer", "must be at least 1"

# (what is wrong with BASE, the message)
PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"batch": 0}, f"`batch` (=0) {ONE}"),
    ({"batch": -1}, f"`batch` (=-1) {ONE}"),
    ({"batch": 1.0}, f"`batch` (=1.0) {INTEGER}"),
    ({"batch": True}, f"`batch` (=True) {INTEGER}"),
    ({"batch": None}, f"`batch` (=None) {INTEGER}"),
    ({"in_channels": "4"}, f"`in_channels` (='4') {INTEGER}"),
    ({"in_channels": 0}, f"`in_channels` (=0) {ONE}"),
    ({"height": -8}, f"`height` (=-8) {ONE}"),
    ({"width": float("nan")}, f"`width` (=nan) {INTEGER}"),
    ({"width": 1 << 31}, "`width` (=2147483648) must be at most 2147483647"),
    ({"height": 10**30}, f"`height` (={10**30}) must be at most 2147483647"),
    ({"out_channels": 0}, f"`out_channels` (=0) {ONE}"),
    ({"kernel": 0}, f"`kernel` (=0) {ONE}"),
    ({"kernel": (3, 0)}, f"`kernel` (=0) {ONE}"),
    ({"kernel": (3,)}, "`kernel` (=(3,)) must be an integer or a pair (vertical, horizontal)"),
    ({"kernel": (3, 3, 3)}, "`kernel` (=(3, 3, 3)) must be an integer or a pair"),
    ({"kernel": "3"}, f"`kernel` (='3') {INTEGER}"),
    ({"kernel": 2.5}, f"`kernel` (=2.5) {INTEGER}"),
    ({"kernel": 9}, "the window of `kernel` (=9) and `dilation` (=1) spans 9 elements; it must fit the padded `height` (=8)"),
    ({"kernel": (1, 12), "padding": 1}, "spans 12 elements; it must fit the padded `width` (=11)"),
    ({"stride": 0}, f"`stride` (=0) {ONE}"),
    ({"stride": (1, -2)}, f"`stride` (=-2) {ONE}"),
    ({"stride": (1, 2, 3)}, "`stride` (=(1, 2, 3)) must be an integer or a pair"),
    ({"dilation": 0}, f"`dilation` (=0) {ONE}"),
    ({"dilation": 4}, "the window of `kernel` (=3) and `dilation` (=4) spans 9 elements"),
    ({"padding": -1}, "`padding` (=-1) must be at least 0"),
    ({"padding": (0, 0, -1, 0)}, "`padding` (=-1) must be at least 0"),
    ({"padding": (1, 2, 3)}, "must be an integer, a pair (vertical, horizontal) or four sides (top, left, bottom, right)"),
    ({"padding": "full"}, "`padding` (='full') must be integers, 'same' or 'valid'"),
    ({"padding": 0.5}, f"`padding` (=0.5) {INTEGER}"),
    ({"groups": 0}, f"`groups` (=0) {ONE}"),
    ({"groups": 3}, "`groups` (=3) must divide `in_channels` (=4)"),
    ({"groups": 4}, "`groups` (=4) must divide `out_channels` (=6)"),
    ({"dtype": "float64"}, "`dtype` (='float64') must be one of float32, float16, bfloat16, int8"),
    ({"dtype": np.float32}, "must be one of float32, float16, bfloat16, int8"),
    ({"layout": "NCWH"}, "`layout` (='NCWH') must be one of NCHW, NHWC"),
    ({"layout": "nchw"}, "`layout` (='nchw') must be one of NCHW, NHWC"),
    ({"bias": 1}, "`bias` (=1) must be True or False"),
    ({"residual": None}, "`residual` (=None) must be True or False"),
    ({"activation": "mish"}, "`activation` (='mish') must be one of none, relu, relu6, silu, leaky_relu"),
    ({"activation": "leaky_relu2"}, "`activation` (='leaky_relu2') must be leaky_relu with a slope of at least 0.000001 and below 1"),
    ({"height": 1 << 16, "width": 1 << 16}, "the input (1, 4, 65536, 65536) has 17179869184 elements; it must have at most 2147483647"),
    ({"in_channels": 1 << 12, "out_channels": 1 << 17}, "the filter (131072, 4096, 3, 3) has 4831838208 elements"),
    ({"height": 1 << 13, "width": 1 << 13, "out_channels": 40, "padding": 1}, "the output (1, 40, 8192, 8192) has 2684354560 elements"),
]


@pytest.mark.parametrize(("change", "message"), PROBLEMS, ids=[str(change) for change, _ in PROBLEMS])
def test_conv2d(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvError, match=re.escape(message)):
        Conv2d(**{**BASE, **change})
    if not set(change) & {"height", "width", "out_channels"}:
        with pytest.raises(ConvError, match=re.escape(message)):
            Conv2d(**BASE).with_(**change)


FORM = "must look like n8-c64x56x56-k64x3x3-s2-p1"
KEYS = [
    ("", FORM),
    ("resnet50", FORM),
    ("n1-c3x8-k4x3x3", FORM),
    ("n1-c3x8x8", FORM),
    ("c3x8x8-k4x3x3", FORM),
    ("n-1-c3x8x8-k4x3x3", FORM),
    ("n1-c3x8x8-k4x3x3 ", FORM),
    ("n1-c3x8x8-k4x3x3-", FORM),
    ("N1-C3x8x8-K4x3x3", FORM),
    (None, "key None must look like"),
    ("n1-c3x8x8-k4x3x3-mish", "has the unknown part 'mish'"),
    ("n1-c3x8x8-k4x3x3-s", "has the unknown part 's'"),
    ("n1-c3x8x8-k4x3x3-float64", "has the unknown part 'float64'"),
    ("n1-c3x8x8-k4x3x3-s2-s1", "names `stride` twice"),
    ("n1-c3x8x8-k4x3x3-relu-silu", "names `activation` twice"),
    ("n1-c3x8x8-k4x3x3-p1x2x3", "must be an integer, a pair (vertical, horizontal) or four sides"),
    ("n1-c3x8x8-k4x3x3-g2", "`groups` (=2) must divide `in_channels` (=3)"),
    ("n0-c3x8x8-k4x3x3", "`batch` (=0) must be at least 1"),
    ("n1-c3x8x8-k4x9x9", "spans 9 elements; it must fit the padded `height` (=8)"),
    ("n1-c99999999999x8x8-k4x3x3", "`in_channels` (=99999999999) must be at most 2147483647"),
]


@pytest.mark.parametrize(("key", "message"), KEYS, ids=[repr(key) for key, _ in KEYS])
def test_key(key: Any, message: str) -> None:
    with pytest.raises(ConvError, match=re.escape(message)):
        Conv2d.parse(key)


# --- tensors

CONV = Conv2d.parse("n1-c4x8x9-k6x3x3")
FULL = CONV.with_(bias=True, residual=True)


def tensor(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def arguments(conv: Conv2d) -> dict[str, Any]:
    """Good arguments of a call."""
    good = {"x": tensor(conv.input_shape), "w": tensor(conv.filter_shape)}
    if conv.bias:
        good["bias"] = tensor((conv.out_channels,))
    if conv.residual:
        good["residual"] = tensor(conv.output_shape)
    return good


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def torch_zeros(*shape: int, **options: Any) -> Any:
    return pytest.importorskip("torch").zeros(shape, **options)


X, W, Y = CONV.input_shape, CONV.filter_shape, CONV.output_shape
KINDS = "must be a numpy array, a torch tensor or a DLPack tensor"
TENSORS: list[tuple[str, Conv2d, str, Callable[[], Any], str]] = [
    ("x of batch 2", CONV, "x", lambda: tensor((2, 4, 8, 9)), "`x` has shape (2, 4, 8, 9); it must be (1, 4, 8, 9)"),
    ("x channels last", CONV, "x", lambda: tensor((1, 8, 9, 4)), "`x` has shape (1, 8, 9, 4); it must be (1, 4, 8, 9)"),
    ("x of three axes", CONV, "x", lambda: tensor(X[1:]), "`x` has shape (4, 8, 9); it must be"),
    ("x empty", CONV, "x", lambda: tensor((0, 4, 8, 9)), "`x` has shape (0, 4, 8, 9); it must be"),
    ("x float64", CONV, "x", lambda: tensor(X, np.float64), "`x` has dtype float64; it must be float32"),
    ("x int32", CONV, "x", lambda: tensor(X, np.int32), "`x` has dtype int32; it must be float32"),
    ("x of objects", CONV, "x", lambda: tensor(X, object), "`x` has dtype object; it must be float32"),
    ("x big-endian", CONV, "x", lambda: tensor(X, ">f4"), "`x` has dtype >f4; it must be float32"),
    ("x in Fortran order", CONV, "x", lambda: np.asfortranarray(tensor(X)), "`x` is not contiguous"),
    ("x every second column", CONV, "x", lambda: tensor((1, 4, 8, 18))[..., ::2], "`x` is not contiguous"),
    ("x backwards", CONV, "x", lambda: tensor(X)[..., ::-1], "`x` is not contiguous"),
    ("x broadcast", CONV, "x", lambda: np.broadcast_to(np.float32(1), X), "`x` is not contiguous"),
    ("x a list", CONV, "x", lambda: tensor(X).tolist(), f"`x` (a list) {KINDS}"),
    ("x None", CONV, "x", lambda: None, f"`x` (a NoneType) {KINDS}"),
    ("x torch meta", CONV, "x", lambda: torch_zeros(*X, device="meta"), "`x` is on device meta; this kernel runs on the CPU"),
    ("x torch requires grad", CONV, "x", lambda: torch_zeros(*X, requires_grad=True), "`x` requires grad and kernels record no gradients"),
    ("x torch half", CONV, "x", lambda: torch_zeros(*X).half(), "`x` has dtype float16; it must be float32"),
    ("x torch channels last", CONV, "x", lambda: torch_zeros(1, 8, 9, 4).permute(0, 3, 1, 2), "`x` is not contiguous"),
    ("w transposed", CONV, "w", lambda: tensor((4, 6, 3, 3)), "`w` has shape (4, 6, 3, 3); it must be (6, 4, 3, 3)"),
    ("w float64", CONV, "w", lambda: tensor(W, np.float64), "`w` has dtype float64; it must be float32"),
    ("w a number", CONV, "w", lambda: 1.0, f"`w` (a float) {KINDS}"),
    ("w torch meta", CONV, "w", lambda: torch_zeros(*W, device="meta"), "`w` is on device meta"),
    ("bias not wanted", CONV, "bias", lambda: tensor((6,)), "`bias` must be left out: the problem is n1-c4x8x9-k6x3x3."),
    ("bias missing", FULL, "bias", lambda: None, "`bias` must be given: the problem is n1-c4x8x9-k6x3x3-bias-add."),
    ("bias too long", FULL, "bias", lambda: tensor((7,)), "`bias` has shape (7,); it must be (6,)"),
    ("bias with axes", FULL, "bias", lambda: tensor((6, 1, 1)), "`bias` has shape (6, 1, 1); it must be (6,)"),
    ("residual not wanted", CONV, "residual", lambda: tensor(Y), "`residual` must be left out: the problem is n1-c4x8x9-k6x3x3."),
    ("residual missing", FULL, "residual", lambda: None, "`residual` must be given: the problem is n1-c4x8x9-k6x3x3-bias-add."),
    ("residual of x's shape", FULL, "residual", lambda: tensor(X), "`residual` has shape (1, 4, 8, 9); it must be (1, 6, 6, 7)"),
    ("residual strided", FULL, "residual", lambda: tensor((1, 6, 6, 14))[..., ::2], "`residual` is not contiguous"),
    ("out of x's shape", CONV, "out", lambda: tensor(X), "`out` has shape (1, 4, 8, 9); it must be (1, 6, 6, 7)"),
    ("out float64", CONV, "out", lambda: tensor(Y, np.float64), "`out` has dtype float64; it must be float32"),
    ("out read-only", CONV, "out", lambda: read_only(tensor(Y)), "`out` must be writable; this array is read-only"),
    ("out strided", CONV, "out", lambda: tensor((1, 6, 6, 14))[..., ::2], "`out` is not contiguous"),
    ("out a list", CONV, "out", list, f"`out` (a list) {KINDS}"),
    ("out requires grad", CONV, "out", lambda: torch_zeros(*Y, requires_grad=True), "`out` requires grad"),
]


@pytest.mark.parametrize(("conv", "name", "make", "message"), [row[1:] for row in TENSORS], ids=[row[0] for row in TENSORS])
def test_tensor(conv: Conv2d, name: str, make: Callable[[], Any], message: str) -> None:
    op = default(conv)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        op(**{**arguments(conv), name: make()})


@pytest.mark.parametrize("shift", [0, 1, 35], ids=["the same memory", "one element on", "the last element"])
@pytest.mark.parametrize("name", ["x", "residual"])
def test_out_overlaps(name: str, shift: int) -> None:
    """A convolution in place would read what it has already written."""
    conv = Conv2d.parse("n1-c4x3x3-k4x1x1-add")
    memory = tensor((2 * 36,))
    call = {**arguments(conv), name: memory[:36].reshape(conv.input_shape)}
    with pytest.raises(ArgumentError, match=r"`out` must not overlap x or residual\."):
        default(conv)(**call, out=memory[shift : shift + 36].reshape(conv.output_shape))
    default(conv)(**call, out=memory[36:].reshape(conv.output_shape))  # right behind it is fine


# --- building

TILE = Tile("channels", lanes=4, vectors=2, rows=1, cols=7, row_block=2, pass_blocks=1, order="cuv", unroll=1).as_dict()  # legal
BUILDS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("target", {"target": "vulkan"}, ValueError, "`target` (='vulkan') must be one of cpu"),
    ("algorithm", {"algorithm": "fft"}, ValueError, "`algorithm` (='fft') must be auto, one of direct, im2win"),
    ("dtype", {"conv": CONV.with_(dtype="float16"), "algorithm": "im2win"}, ValueError, "its CPU schedule computes float32, not float16"),
    ("key", {"conv": "conv1"}, ConvError, "key 'conv1' must look like"),
    ("threads 0", {"threads": 0}, ValueError, "`threads` (=0) must be an integer from 1 to"),
    ("threads 1000", {"threads": 1000}, ValueError, "`threads` (=1000) must be an integer from 1 to"),
    ("threads True", {"threads": True}, ValueError, "`threads` (=True) must be an integer from 1 to"),
    ("tile without algorithm", {"tile": TILE}, ValueError, "`tile` needs a named `algorithm`"),
]


@pytest.mark.parametrize(("options", "kind", "message"), [row[1:] for row in BUILDS], ids=[row[0] for row in BUILDS])
def test_build(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        im2win.build(**{"conv": CONV, **options})


TILES: list[tuple[dict[str, Any], str]] = [
    ({"axis": "rows"}, "`axis` (=rows) must be one of channels, windows"),
    ({"order": "vuc"}, "`order` (=vuc) must be one of cuv, cvu, uvc"),
    ({"lanes": 5}, "`lanes` (=5) must be one of (1, 2, 4, 8, 16)"),
    ({"lanes": 2}, "`lanes` (=2) must be at least 4, what shuffles can transpose to NCHW"),
    ({"vectors": 0}, "`vectors` (=0) must be at least 1"),
    ({"row_block": 0}, "`row_block` (=0) must be at least 1"),
    ({"row_block": -1}, "`row_block` (=-1) must be at least 1"),
    ({"pass_blocks": 0}, "`pass_blocks` (=0) must be at least 1"),
    ({"row_block": 4, "rows": 1}, "`row_block` (=4) must divide the output's rows (=6)"),
    ({"row_block": 3, "rows": 2}, "`rows` (=2) must divide `row_block` (=3)"),
    ({"rows": 6, "row_block": 6}, f"sums and operands must fit the {host().registers} registers"),
    ({"cols": 8}, "the tile's windows (=8) must fit the line (=7)"),
    ({"vectors": 3}, "the block (=12) must not hold a whole vector of padding beyond 6 channels"),
    ({"vectors": 1, "pass_blocks": 3}, "`pass_blocks` (=3) must divide the channel blocks (=2)"),
    ({"axis": "windows", "cols": 5}, "the block (=5) must divide a group's channels (=6)"),
]


def test_the_tile_that_is_spoilt_below_is_legal() -> None:
    assert im2win.build(CONV, algorithm="direct/tiled", tile=TILE).tile == TILE


@pytest.mark.parametrize(("change", "message"), TILES, ids=[str(change) for change, _ in TILES])
def test_tile(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TileError, match=re.escape(message)):
        im2win.build(CONV, algorithm="direct/tiled", tile=Tile.from_dict({**TILE, **change}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**TILE, "cols": "4"}, "`cols` (='4') must be of type int"),
        ({**TILE, "cols": True}, "`cols` (=True) must be of type int"),
        ({**TILE, "axis": 1}, "`axis` (=1) must be of type str"),
        ({**TILE, "depth": 1}, "must be ['axis', 'chunks', 'cols', 'inputs', 'lanes'"),
        ({}, "fields [] must be ['axis'"),
    ],
    ids=["text for a number", "bool for a number", "number for text", "unknown field", "no fields"],
)
def test_tile_as_dict(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        im2win.build(CONV, algorithm="direct/tiled", tile=values)


def test_tile_of_a_matrix() -> None:
    tile = Tile.from_dict({**TILE, "rows": 2})
    with pytest.raises(TileError, match="`rows` must be 1: the windows of a matrix have no rows"):
        im2win.build(CONV, algorithm="im2col/tiled", tile=tile)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'im2win' has no attribute 'convolve'"):
        im2win.convolve  # noqa: B018
    with pytest.raises(ValueError, match="`threads` \\(=-1\\) must be an integer from 1 to"):
        Machine.host(-1)


# --- files


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[Path]:
    yield default(CONV).export(tmp_path / "conv.so")


def edit(library: Path, **changes: Any) -> None:
    manifest = manifest_path(library)
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))


def replace(library: Path, content: bytes) -> None:
    """Another file in its place: the first one is mapped, and code in it runs when the process ends."""
    partial = library.with_name("partial")
    partial.write_bytes(content)
    os.replace(partial, library)


def truncate(library: Path) -> None:
    replace(library, library.read_bytes()[: library.stat().st_size // 2])


def one_bit(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    replace(library, content)


def built_elsewhere(library: Path) -> None:
    """What a machine with other instructions would have written."""
    manifest = dataclasses.replace(Manifest.read(manifest_path(library))[0], isa="avx9000")
    replace(library, library.read_bytes())
    seal(library, manifest.facts())
    manifest_path(library).write_text(manifest.to_json(library))


def another_problem(library: Path) -> None:
    """The library of one problem with the manifest of another: right in themselves, wrong together."""
    other = default(CONV.with_(batch=2)).export(library.with_name("other.so"))
    os.replace(other, library)


PACK = {"kind": "filters", "block": 16, "order": "cuv"}

FILES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("manifest missing", lambda f: manifest_path(f).unlink(), "conv.so.json: no manifest there; `im2win build` writes it beside"),
    ("library missing", lambda f: f.unlink(), "conv.so: cannot read the library (No such file or directory)"),
    ("library truncated", truncate, "conv.so: truncated, or not the library its manifest describes (checksums differ)"),
    ("library empty", lambda f: replace(f, b""), "(checksums differ)"),
    ("library changed in one bit", one_bit, "(checksums differ)"),
    ("library of another problem", another_problem, "(checksums differ)"),
    ("library a folder", lambda f: (f.unlink(), f.mkdir()), "conv.so: cannot read the library (Is a directory)"),
    ("manifest empty", lambda f: manifest_path(f).write_text(""), "conv.so.json: not a readable manifest"),
    ("manifest truncated", lambda f: os.truncate(manifest_path(f), 100), "conv.so.json: not a readable manifest"),
    ("manifest not text", lambda f: manifest_path(f).write_bytes(b"\xff\x00\xfe"), "conv.so.json: not a readable manifest"),
    ("manifest a folder", lambda f: (manifest_path(f).unlink(), manifest_path(f).mkdir()), "conv.so.json: not a readable manifest"),
    ("manifest of something else", lambda f: manifest_path(f).write_text('{"name": "model"}'), "not a manifest of im2win"),
    ("manifest a list", lambda f: manifest_path(f).write_text("[]"), "not a manifest of im2win"),
    ("manifest of the future", lambda f: edit(f, schema=99), "manifest schema 99 is not 6; build the library again"),
    ("manifest without problem", lambda f: edit(f, conv="conv1"), "key 'conv1' must look like"),
    ("manifest with a bad problem", lambda f: edit(f, conv="n0-c1x1x1-k1x1x1"), "`batch` (=0) must be at least 1"),
    ("manifest with a bad block", lambda f: edit(f, pack={**PACK, "block": "wide"}), "`block` (='wide') must be of type int"),
    ("manifest of an unknown packing", lambda f: edit(f, pack={"kind": "bricks"}), "must be of a kind among filters, "),
    ("manifest of half a packing", lambda f: edit(f, pack={"kind": "winograd", "block": 8}), "must be ['block', 'channels', 'order'"),
    ("another instruction set", built_elsewhere, "conv.so: built for avx9000"),
    ("manifest changed", lambda f: edit(f, isa="avx9000"), "changed since it was written: conv.so is sealed with other facts"),
]


@pytest.mark.parametrize(("spoil", "message"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_load(exported: Path, spoil: Callable[[Path], Any], message: str) -> None:
    im2win.load(exported)
    spoil(exported)
    with pytest.raises(ArtefactError, match=re.escape(message)):
        im2win.load(exported)


def test_export_where_nothing_can_be_written(tmp_path: Path) -> None:
    op = default(CONV)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"^`path` \(=.*conv\.so\'\) must be a file that can be written: "):
        op.export(tmp_path / "file" / "conv.so")  # a file where a folder should be
    (tmp_path / "folder.so").mkdir()
    with pytest.raises(ArtefactError, match=r"^`path` \(=.*folder\.so\'\) must be a file that can be written: Is a directory\.$"):
        op.export(tmp_path / "folder.so")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.so"], "a failed export leaves nothing behind"


@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="needs a file system that even root cannot write")
def test_export_into_a_read_only_folder() -> None:
    with pytest.raises(ArtefactError, match=r"^`path` \(=.*conv\.so\'\) must be a file that can be written: "):
        default(CONV).export("/proc/sys/im2win/conv.so")


def test_logs_that_are_a_file(tmp_path: Path) -> None:
    path = tmp_path / "logs"
    path.write_text("")
    with pytest.raises(ValueError, match="logs"):
        im2win.build(CONV, logs=path)


def test_there_are_enough_bad_inputs() -> None:
    assert len(PROBLEMS) + len(KEYS) + len(TENSORS) + len(BUILDS) + len(TILES) + len(FILES) >= 60
    assert len({row[0] for row in TENSORS}) == len(TENSORS)


def test_packing_takes_only_what_fits() -> None:
    """The manifest's pack alone says how filters are packed; the algorithm's tile says the same."""
    for name in supported(CONV):
        op, row = default(CONV, name), schedule_of(name)
        assert op.manifest.pack == row.scheduler.tile(op.tile).pack == packs.from_dict(packs.as_dict(op.manifest.pack))
