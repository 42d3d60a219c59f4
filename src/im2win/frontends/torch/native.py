"""Runs calls without Python, through `operator.cpp`, which is compiled once against PyTorch's headers."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import sysconfig
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
import tvm_ffi.libinfo

from im2win.codegen.toolchain import kept_library
from im2win.runtime.cuda import ALIGNMENT
from im2win.runtime.op import Launch

_log = logging.getLogger("im2win.torch")
SOURCE = Path(__file__).with_name("operator.cpp")
HEADERS = [SOURCE.with_name(f"{name}.hpp") for name in ("calls", "dispatch", "functions", "places", "python")]
_MEMORY = ("--param", "ggc-min-heapsize=500000")  # GCC compiles faster where it collects no garbage below so many KiB
_FLAGS = ("-std=c++20", "-O1", "-DNDEBUG", "-fvisibility=hidden", "-w", *_MEMORY)
_LIBRARIES = ("torch_python", "torch_cpu", "c10", "tvm_ffi")
_lock = threading.Lock()
_module: Any = None
_failed = False
_introduced: set[str] = set()
_making: threading.Thread | None = None


def begin() -> None:
    """Starts to compile the library beside what the caller does next, if the cache lacks it. `load` waits for it."""
    global _making

    def make() -> None:
        with contextlib.suppress(OSError):  # `load` finds out why
            _library(True)

    with _lock:
        if _module is None and not _failed and _making is None:
            _making = threading.Thread(target=make, name="im2win-operator")
            _making.start()


def load(*, make: bool = True) -> bool:
    """Lets calls from now on go through the library. Returns whether they do.

    Calls keep passing through Python where there is no C++ compiler, Python's headers are missing, or the system is not Linux.

    Args:
        make: compile the library if the cache lacks it, which takes about 5 seconds.
    """
    global _module, _failed, _making, site
    with _lock:
        if make and _making is not None:
            _making.join()
            _making = None
        if _module is None and not _failed:
            try:
                _module = _imported(_library(make))
            except (ImportError, OSError) as error:
                _failed = make
                _log.info("calls of operators pass through Python (%s)", error)
        if _module is not None:
            _module.enter()
            site = _module.site
    return _module is not None


def unload() -> None:
    """Lets calls pass through Python again, until `load`."""
    global site
    with _lock:
        if _module is not None:
            _module.leave()
        site = in_python


def in_python(place: Any, given: tuple[Any, ...], x: Any, residual: Any) -> Any:
    """A call of a call site without the library."""
    return place.general(x, residual)


def introduce(site: Any, given: tuple[Any, ...], channels_last: bool) -> None:
    """Lets calls of compiled programs, which name a call site by its number, go through the library too.

    Args:
        given: the parameters that the library checks.
        channels_last: whether the filters are channels-last.
    """
    if _module is not None and site.place not in _introduced:
        _introduced.add(site.place)
        _module.introduce(site.place, given, channels_last)
        weakref.finalize(site, _dismiss, site.place)


def _dismiss(place: str) -> None:
    _introduced.discard(place)
    if _module is not None:
        _module.dismiss(place)


site = in_python
"""A site's call: (site, what the library reads of it, x, residual or None)."""


def place(launch: Launch, conv: Any, held: list[torch.Tensor], versions: tuple[int, ...]) -> Any:
    """The library's entry for remembered calls: a kernel with the packed parameters of one conv call site.

    Args:
        launch: the kernel and its packed parameters.
        conv: the problem.
        held: the parameters, as tensors that no other code sees.
        versions: of the parameters, -1 for a tensor without versions.
    """
    packed = [one if isinstance(one, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(one) for one in launch.packed]
    return _module.Place(
        product=launch.product.__chandle__(),
        transform=launch.transform.__chandle__() if launch.transform is not None else 0,
        made=launch.made,
        packed=[one.__chandle__() for one in packed],
        input=conv.input_shape,
        output=conv.output_shape,
        like=(torch.empty(0, dtype=getattr(torch, conv.out_dtype)),),
        channels_last=conv.layout == "NHWC",
        alignment=alignment(held[0]),
        held=held,
        versions=versions,
    )


def alignment(tensor: torch.Tensor) -> int:
    """Alignment in bytes that kernels on the tensor's device require of their inputs."""
    return ALIGNMENT if tensor.is_cuda else 1


def _library(make: bool) -> Path:
    if not sys.platform.startswith("linux"):
        raise OSError(f"they are compiled on Linux; this system is {sys.platform}")
    root, tvm = Path(torch.__file__).parent, tvm_ffi.libinfo
    headers = root / "include", tvm.find_include_path(), tvm.find_dlpack_include_path(), sysconfig.get_path("include")
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [word for folder in dict.fromkeys(map(str, headers)) for word in ("-isystem", folder)]
    folders = root / "lib", Path(tvm.find_libtvm_ffi()).parent
    libraries = ["-Wl,--no-as-needed", *(f"-L{folder}" for folder in folders), *(f"-l{name}" for name in _LIBRARIES)]
    versions = torch.__version__, tvm_ffi.__version__, sys.version
    return kept_library(SOURCE, "CXX", flags, libraries, versions, headers=HEADERS, make=make)


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("im2win_operator", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if torch.cuda.is_available() and not module.has_streams:
        raise ImportError("this version of PyTorch does not tell its current stream")
    return module
