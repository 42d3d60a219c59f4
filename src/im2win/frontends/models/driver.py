"""Generates the C code that runs a model: one function for each batch, which calls the kernels in order on the planned memory.

A function is a packed function as tvm-ffi defines them: `run_BATCH(weights, workspace, inputs..., outputs...)`. All arguments are tensors.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm_ffi.libinfo
from tvm.support import cc

from im2win.codegen.llvm import ToolchainError
from im2win.frontends.models.memory import Place
from im2win.frontends.models.program import Shape

_HEAD = """#include <stddef.h>
#include <stdint.h>
#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>

typedef struct { int32_t base, ndim; int64_t offset; int32_t shape; uint8_t code, bits; } Argument;
typedef struct { TVMFFISafeCallType kernel; int32_t first, count; } Step;

static const DLTensor* tensor_of(const TVMFFIAny* value) {
  if (value->type_index == kTVMFFIDLTensorPtr) return (const DLTensor*)value->v_ptr;
  return (const DLTensor*)((const char*)value->v_obj + sizeof(TVMFFIObject));
}

static int run(const Step* steps, int32_t count, const Argument* arguments, int64_t* numbers, const TVMFFIAny* given, int32_t bases) {
  char* base[MOST_BASES];
  DLTensor tensors[MOST_ARGUMENTS];
  TVMFFIAny packed[MOST_ARGUMENTS];
  DLDevice device = tensor_of(given)->device;
  for (int32_t i = 0; i < bases; ++i) base[i] = (char*)tensor_of(given + i)->data + tensor_of(given + i)->byte_offset;
  for (int32_t s = 0; s < count; ++s) {
    for (int32_t i = 0; i < steps[s].count; ++i) {
      const Argument* one = arguments + steps[s].first + i;
      DLTensor* tensor = tensors + i;
      tensor->data = base[one->base] + one->offset;
      tensor->device = device;
      tensor->ndim = one->ndim;
      tensor->dtype.code = one->code;
      tensor->dtype.bits = one->bits;
      tensor->dtype.lanes = 1;
      tensor->shape = numbers + one->shape;
      tensor->strides = numbers + one->shape + one->ndim;
      tensor->byte_offset = 0;
      packed[i].type_index = kTVMFFIDLTensorPtr;
      packed[i].zero_padding = 0;
      packed[i].v_ptr = tensor;
    }
    TVMFFIAny result;
    result.type_index = kTVMFFINone;
    result.zero_padding = 0;
    result.v_int64 = 0;
    int failed = steps[s].kernel(NULL, packed, steps[s].count, &result);
    if (failed) return failed;
  }
  return 0;
}
"""

_RUN = """
int __tvm_ffi_{name}(void* self, const TVMFFIAny* given, int32_t count, TVMFFIAny* result) {{
  (void)self; (void)result;
  if (count != {bases}) {{
    TVMFFIErrorSetRaisedFromCStr("ValueError", "{name} takes {bases} tensors: weights, workspace, inputs and outputs.");
    return -1;
  }}
  return run(steps_{name}, {steps}, arguments_{name}, numbers_{name}, given, count);
}}
"""

_CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "b": 6}  # DLDataTypeCode by numpy's kind; bfloat16 is the only type of kind V


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a kernel."""

    place: Place
    shape: Shape
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Step:
    """A kernel and its arguments."""

    kernel: str
    arguments: tuple[Argument, ...]


def source(runs: Mapping[str, tuple[int, Sequence[Step]]]) -> str:
    """The C code for functions by name, each with its number of tensors and its steps."""
    kernels = sorted({step.kernel for _, steps in runs.values() for step in steps})
    most = max((len(step.arguments) for _, steps in runs.values() for step in steps), default=1)
    lines = [
        f"#define MOST_BASES {max(bases for bases, _ in runs.values())}", f"#define MOST_ARGUMENTS {most}", _HEAD,
        "#ifdef __cplusplus", 'extern "C" {', "#endif",
        *(f"int __tvm_ffi_{name}(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);" for name in kernels),
    ]  # fmt: skip
    for name, (bases, steps) in runs.items():
        lines += _tables(name, steps)
        lines.append(_RUN.format(name=name, bases=bases, steps=len(steps)))
    return "\n".join([*lines, "#ifdef __cplusplus", "}", "#endif", ""])


def _tables(name: str, steps: Sequence[Step]) -> list[str]:
    numbers: list[int] = []
    places: dict[Shape, int] = {}
    arguments: list[str] = []
    calls: list[str] = []
    for step in steps:
        calls.append(f"{{__tvm_ffi_{step.kernel}, {len(arguments)}, {len(step.arguments)}}}")
        for one in step.arguments:
            if one.shape not in places:
                places[one.shape] = len(numbers)
                numbers += [*one.shape, *_strides(one.shape)]
            dtype = np.dtype(one.dtype)
            code = _CODES[dtype.kind]
            arguments.append(
                f"{{{one.place.base}, {len(one.shape)}, {one.place.offset}LL, {places[one.shape]}, {code}, {8 * dtype.itemsize}}}"
            )
    return [
        f"static int64_t numbers_{name}[] = {{{', '.join(map(str, numbers or [0]))}}};",
        f"static const Argument arguments_{name}[] = {{{', '.join(arguments) or '{0}'}}};",
        f"static const Step steps_{name}[] = {{{', '.join(calls) or '{0}'}}};",
    ]


def _strides(shape: Shape) -> list[int]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return strides[: len(shape)]


def compile_source(text: str, path: Path) -> None:
    """Compiles C code into the object file `path`.

    Raises:
        ToolchainError: there is no compiler, or it reports an error.
    """
    compiler = cc.get_cc()
    if not compiler:
        raise ToolchainError("linking a model needs a C++ compiler on PATH (g++ or clang++); none was found.")
    include = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    with tempfile.TemporaryDirectory(prefix="im2win-driver-") as folder:
        file = Path(folder) / "driver.c"
        file.write_text(text)
        command = [compiler, "-O2", "-fPIC", "-c", str(file), "-o", str(path), *(f"-I{one}" for one in include)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{compiler} cannot compile the model's driver: {done.stderr.strip()[:2000]}")
