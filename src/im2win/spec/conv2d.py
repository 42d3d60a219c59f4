"""The problem: one 2-D convolution layer as a frozen value that prints, parses, hashes and validates itself."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from im2win.common.caching import derived, hashed_once
from im2win.spec.activations import ACTIVATIONS, activation_of, checked, found
from im2win.spec.dtypes import DTYPES, ELEMENT_TYPES

IntPair = int | Sequence[int]
Padding = int | Sequence[int] | Literal["same", "valid"]

LAYOUTS = ("NCHW", "NHWC")
MAX_ELEMENTS = 2**31 - 1  # kernels index with 32 bits
STEP_NUMBERS = 5  # low, high, a, b, c of `Conv2d.own_steps`

_RULE = "Conv2d: `{name}` (={value!r}) must be {rule}."


class ConvError(ValueError):
    """An invalid convolution. The message names the argument, its value and the rule."""


def _fail(name: str, value: object, rule: str) -> ConvError:
    return ConvError(_RULE.format(name=name, value=value, rule=rule))


def _integer(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _fail(name, value, "an integer")
    number = int(value.__index__())
    if number < least:
        raise _fail(name, value, f"at least {least}")
    if number > MAX_ELEMENTS:
        raise _fail(name, value, f"at most {MAX_ELEMENTS}")
    return number


def _pair(name: str, value: IntPair, least: int) -> tuple[int, int]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        number = _integer(name, value, least)
        return number, number
    if len(value) != 2:
        raise _fail(name, value, "an integer or a pair (vertical, horizontal)")
    return _integer(name, value[0], least), _integer(name, value[1], least)


def _same(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Padding (before, after) that makes the output ceil(size / stride). The odd element goes after, as in ONNX SAME_UPPER."""
    total = max((math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


@hashed_once
@dataclass(frozen=True, init=False)
class Conv2d:
    """A 2-D convolution (cross-correlation, as in every deep-learning framework) with its fused epilogue.

    ``y = activation(conv(x, w) + bias + residual)``; bias and residual are optional.

    Products of int8 are summed in int32, which is also the type of their bias. Outputs are these sums, or, with another `out_dtype`,
    requantised: ``y = convert(activation(float32(conv(x, w) + bias) * scale + float32(residual)))`` with a float32 scale for every output
    channel. Every operation on float32 is rounded by itself, to nearest even. `convert` converts to `out_dtype`: for int8 it rounds to
    nearest even and saturates to -128 to 127, for uint8 to 0 to 255. The filters of uint8 inputs are int8.

    Products of float8_e4m3fn are summed in float32. Its layers always have a scale: that of the input times that of a channel's filters (or
    of all), over that of the output if this is float8_e4m3fn, too:
    ``y = convert(activation(conv(x, w) * scale + bias + float32(residual)))`` with a float32 bias. Conversion to float8_e4m3fn rounds to
    nearest even and saturates to -448 to 448.

    With `own_steps` the convolution and the residual are quantised in steps of their own, and their sum in a third one:
    ``y = convert(activation(limit(round(float32(conv(x, w) + bias) * scale)) * a + (float32(residual) * b + c)))``, where round is to
    nearest even and limit to `low` and `high`. These five float32 numbers, low, high, a, b, c, follow the scales of the channels.

    Zero points: with `zero_point` z the convolution is ``conv(x - z, w)``, and padding adds elements that equal z, which are zeros after
    the subtraction. With `out_zero_point`, `convert` rounds, adds it, and then saturates.

    Shapes: x is ``[batch, in_channels, height, width]`` (NCHW) or ``[batch, height, width, in_channels]`` (NHWC); w is always
    ``[out_channels, in_channels / groups, kernel_h, kernel_w]``; bias and scale are ``[out_channels]``, scale with `own_steps`
    ``[out_channels + 5]``; residual and y have `output_shape`. `dtypes` gives their element types.

    Args:
        batch: images; this and all other sizes are at least 1.
        in_channels: channels of x.
        height: rows of x.
        width: columns of x.
        out_channels: channels of y, which is the number of filters.
        kernel: size of a filter: an integer or a pair (vertical, horizontal).
        stride: steps between windows: an integer or a pair (vertical, horizontal).
        padding: zeros around the input: an integer, a pair (vertical, horizontal), four sides (top, left, bottom, right) as in ONNX,
            ``"valid"`` (none) or ``"same"`` (output = ceil(input / stride)).
        dilation: steps between taps: an integer or a pair (vertical, horizontal).
        groups: channels are split into this many independent convolutions; with `in_channels` groups the convolution is depthwise.
        dtype: of x and w: float32, float16, bfloat16, int8 or float8_e4m3fn; or uint8 for x, with w in int8.
        layout: of x, y and residual: NCHW or NHWC.
        bias: whether the epilogue adds a number for every output channel.
        residual: whether the epilogue adds a tensor of the output's shape.
        activation: applied last: none, relu, relu6, silu, leaky_relu, sigmoid, tanh, hardsigmoid, hardswish, gelu (with the error function)
            or gelu_tanh (its approximation). A slope follows its name: ``leaky_relu0.1``; without one it is 0.01. int8 outputs support none
            and relu, and so do uint8 and float8_e4m3fn outputs, whose scale is part of `scale`; int32 sums also relu6.
        out_dtype: of y and residual. The default is `dtype`, and int32 for int8 and uint8. For these it may also be int8, uint8, float16,
            bfloat16 or float32: the outputs are then requantised. For float8_e4m3fn the default is float16, and it may also be bfloat16,
            float32 or float8_e4m3fn.
        zero_point: value of x that stands for zero; for int8 and uint8.
        out_zero_point: value of y that stands for zero; for outputs requantised to int8 or uint8.
        own_steps: whether the residual has other quantisation steps than y; for a residual and outputs requantised to int8 or uint8.

    Raises:
        ConvError: a message that names the argument, its value and the rule.
    """

    batch: int
    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    dtype: str
    layout: str
    bias: bool
    residual: bool
    activation: str
    out_dtype: str
    zero_point: int = 0
    out_zero_point: int = 0
    own_steps: bool = False

    def __init__(
        self,
        batch: int,
        in_channels: int,
        height: int,
        width: int,
        out_channels: int,
        kernel: IntPair,
        stride: IntPair = 1,
        padding: Padding = 0,
        dilation: IntPair = 1,
        groups: int = 1,
        dtype: str = "float32",
        layout: str = "NCHW",
        bias: bool = False,
        residual: bool = False,
        activation: str | None = None,
        out_dtype: str | None = None,
        zero_point: int = 0,
        out_zero_point: int = 0,
        own_steps: bool = False,
    ) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("batch", "in_channels", "height", "width", "out_channels", "groups"):
            put(name, _integer(name, locals()[name], 1))
        put("kernel", _pair("kernel", kernel, 1))
        put("stride", _pair("stride", stride, 1))
        put("dilation", _pair("dilation", dilation, 1))
        put("padding", self._sides(padding))
        for name, value, allowed in (("dtype", dtype, tuple(DTYPES)), ("layout", layout, LAYOUTS)):
            if value not in allowed:
                raise _fail(name, value, "one of " + ", ".join(allowed))
            put(name, value)
        for name, flag in (("bias", bias), ("residual", residual), ("own_steps", own_steps)):
            if not isinstance(flag, bool):
                raise _fail(name, flag, "True or False")
            put(name, flag)
        try:
            put("activation", checked("none" if activation is None else activation))
        except ValueError as error:
            raise _fail("activation", activation, str(error)) from None
        put("out_dtype", self._output_type(out_dtype))
        put("zero_point", self._zero_point("zero_point", zero_point, self.dtype, "`dtype`"))
        outputs = self.out_dtype if self.requantised else "int32"
        put("out_zero_point", self._zero_point("out_zero_point", out_zero_point, outputs, "`out_dtype`"))
        self._check()

    def _sides(self, padding: Padding) -> tuple[int, int, int, int]:
        if isinstance(padding, str):
            if padding == "valid":
                return 0, 0, 0, 0
            if padding == "same":
                top, bottom = _same(self.height, self.kernel[0], self.stride[0], self.dilation[0])
                left, right = _same(self.width, self.kernel[1], self.stride[1], self.dilation[1])
                return top, left, bottom, right
            raise _fail("padding", padding, "integers, 'same' or 'valid'")
        if isinstance(padding, Sequence) and len(padding) == 4:
            top, left, bottom, right = (_integer("padding", side, 0) for side in padding)
            return top, left, bottom, right
        if isinstance(padding, Sequence) and len(padding) != 2:
            raise _fail("padding", padding, "an integer, a pair (vertical, horizontal) or four sides (top, left, bottom, right)")
        vertical, horizontal = _pair("padding", padding, 0)
        return vertical, horizontal, vertical, horizontal

    def _output_type(self, out_dtype: str | None) -> str:
        known = ELEMENT_TYPES[self.dtype].outputs
        if out_dtype is not None and out_dtype not in known:
            raise _fail("out_dtype", out_dtype, f"{'one of ' * (len(known) > 1)}{', '.join(known)} for `dtype` {self.dtype}")
        if out_dtype in ("int8", "uint8", "float8_e4m3fn") and not activation_of(self.activation).int8_outputs:
            able = " or ".join(name for name, row in ACTIVATIONS.items() if row.int8_outputs)
            raise _fail("activation", self.activation, f"{able} for `out_dtype` {out_dtype}")
        return out_dtype or known[0]

    @staticmethod
    def _zero_point(name: str, value: object, dtype: str, of: str) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise _fail(name, value, "an integer")
        number, limits = int(value.__index__()), ELEMENT_TYPES[dtype].limits
        if number and (limits is None or ELEMENT_TYPES[dtype].itemsize > 1):
            raise _fail(name, value, f"0 unless {of} is int8 or uint8" + (" and outputs are requantised" if of == "`out_dtype`" else ""))
        if number and limits is not None and not limits[0] <= number <= limits[1]:
            raise _fail(name, value, f"from {limits[0]} to {limits[1]} for {of} {dtype}")
        return number

    def _check(self) -> None:
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise ConvError(f"Conv2d: `groups` (={self.groups}) must divide `{name}` (={getattr(self, name)}).")
        if self.own_steps and not (self.residual and self.requantised and self.out_dtype in ("int8", "uint8")):
            raise _fail("own_steps", True, "False unless `residual` is True and outputs are requantised to int8 or uint8")
        for axis, name in enumerate(("height", "width")):
            padded, window = self.padded_size[axis], self.window[axis]
            if window > padded:
                raise ConvError(
                    f"Conv2d: the window of `kernel` (={self.kernel[axis]}) and `dilation` (={self.dilation[axis]}) "
                    f"spans {window} elements; "
                    f"it must fit the padded `{name}` (={padded})."
                )
        for name, shape in (("input", self.input_shape), ("filter", self.filter_shape), ("output", self.output_shape)):
            if math.prod(shape) > MAX_ELEMENTS:
                raise ConvError(f"Conv2d: the {name} {shape} has {math.prod(shape)} elements; it must have at most {MAX_ELEMENTS}.")

    # --- derived sizes -------------------------------------------------------------------------------------------

    @derived
    def window(self) -> tuple[int, int]:
        """Input rows and columns under one output: (kernel - 1) * dilation + 1."""
        return (self.kernel[0] - 1) * self.dilation[0] + 1, (self.kernel[1] - 1) * self.dilation[1] + 1

    @derived
    def padded_size(self) -> tuple[int, int]:
        """Height and width of the input with its padding."""
        top, left, bottom, right = self.padding
        return self.height + top + bottom, self.width + left + right

    @derived
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return tuple((self.padded_size[i] - self.window[i]) // self.stride[i] + 1 for i in (0, 1))  # type: ignore[return-value]

    def _laid_out(self, channels: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        return (self.batch, channels, *size) if self.layout == "NCHW" else (self.batch, *size, channels)

    @derived
    def input_shape(self) -> tuple[int, int, int, int]:
        """Shape of x in this problem's layout."""
        return self._laid_out(self.in_channels, (self.height, self.width))

    @derived
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of y and of the residual in this problem's layout."""
        return self._laid_out(self.out_channels, self.output_size)

    @derived
    def filter_shape(self) -> tuple[int, int, int, int]:
        """Shape of w: [out_channels, in_channels / groups, kernel_h, kernel_w] in every layout."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def scales(self) -> int:
        """Number of elements of scale: one for each output channel, and with `own_steps` five more."""
        return self.out_channels + STEP_NUMBERS * self.own_steps

    @derived
    def flops(self) -> int:
        """Floating-point operations of direct convolution, with a multiplication and an addition counted as two."""
        return 2 * math.prod(self.output_shape) * math.prod(self.filter_shape[1:])

    @derived
    def itemsize(self) -> int:
        """Bytes of one element of input and filter."""
        return ELEMENT_TYPES[self.dtype].itemsize

    @derived
    def out_itemsize(self) -> int:
        """Bytes of one element of output and residual."""
        return ELEMENT_TYPES[self.out_dtype].itemsize

    @derived
    def output_bytes(self) -> int:
        """Bytes of the output."""
        return self.out_itemsize * math.prod(self.output_shape)

    @derived
    def bytes_moved(self) -> int:
        """Bytes that must move at least once: input, filter, output, and the residual if there is one."""
        given = self.itemsize * (math.prod(self.input_shape) + math.prod(self.filter_shape))
        return given + self.output_bytes * (1 + self.residual)

    @property
    def types(self) -> str:
        """Element types as in the key: `dtype`, and `out_dtype` where outputs are scaled."""
        return f"{self.dtype}-out.{self.out_dtype}" if self.requantised else self.dtype

    @property
    def requantised(self) -> bool:
        """Whether sums are scaled: int32 sums to outputs of another type, and those of float8_e4m3fn always."""
        return self.out_dtype != ELEMENT_TYPES[self.dtype].outputs[0] or ELEMENT_TYPES[self.dtype].scaled

    @property
    def depthwise(self) -> bool:
        """Whether every group has a single input channel."""
        return self.groups == self.in_channels and self.groups > 1

    @property
    def pointwise(self) -> bool:
        """Whether it is a plain matrix product: 1x1, stride 1, no padding."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and not any(self.padding)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the tensors that a kernel takes, in order, the output last."""
        added = (("bias", self.bias), ("scale", self.requantised), ("residual", self.residual))
        return ("data", "filter", *(name for name, on in added if on), "output")

    @derived
    def dtypes(self) -> dict[str, str]:
        """Element types of `arguments`: the bias has the type of the sums, as they are stored without a scale; the scale is float32."""
        element = ELEMENT_TYPES[self.dtype]
        bias = element.sums if element.scaled else element.outputs[0]
        known = {"data": self.dtype, "filter": element.filters or self.dtype, "bias": bias, "scale": "float32"}
        return {name: known.get(name, self.out_dtype) for name in self.arguments}

    def with_(self, **changes: Any) -> Conv2d:
        """A validated copy with some fields changed. With another dtype it has the default `out_dtype` and zero points, unless given."""
        if changes.get("dtype", self.dtype) != self.dtype:
            changes.setdefault("out_dtype", None)
            changes.setdefault("zero_point", 0)
        if changes.get("out_dtype", self.out_dtype) != self.out_dtype:
            changes.setdefault("out_zero_point", 0)
            changes.setdefault("own_steps", False)
        if not changes.get("residual", self.residual):
            changes.setdefault("own_steps", False)
        try:
            return _changed(self, tuple((name, type(value), value) for name, value in changes.items()))  # True is not 1
        except TypeError:  # an unhashable value, such as a list
            return replace(self, **changes)

    # --- the key -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The key: unique, short (defaults are left out), safe in file names and on a command line."""

        def pair(value: tuple[int, ...]) -> str:
            if len(value) == 4:
                if value[:2] != value[2:]:
                    return ".".join(map(str, value))
                value = value[:2]
            return str(value[0]) if value[0] == value[1] else "x".join(map(str, value))

        parts = [
            f"n{self.batch}",
            f"c{self.in_channels}x{self.height}x{self.width}",
            f"k{self.out_channels}x{self.kernel[0]}x{self.kernel[1]}",
        ]
        if self.stride != (1, 1):
            parts.append("s" + pair(self.stride))
        if any(self.padding):
            parts.append("p" + pair(self.padding))
        if self.dilation != (1, 1):
            parts.append("d" + pair(self.dilation))
        if self.groups != 1:
            parts.append(f"g{self.groups}")
        parts += [self.types] if self.dtype != "float32" else []
        zeros = (("zero", self.zero_point), ("outzero", self.out_zero_point))
        parts += [f"{name}{'m' * (value < 0)}{abs(value)}" for name, value in zeros if value]
        parts += [self.layout] if self.layout != "NCHW" else []
        words = (("bias", self.bias), ("add", self.residual and not self.own_steps), ("addsteps", self.own_steps))
        parts += [word for word, on in words if on]
        parts += [self.activation] if self.activation != "none" else []
        return "-".join(parts)

    @classmethod
    def parse(cls, key: str) -> Conv2d:
        """The inverse of ``str(conv)``: ``Conv2d.parse("n8-c64x56x56-k64x3x3-p1-bias-relu")``.

        Raises:
            ConvError: the key is not of that form, or names an invalid convolution.
        """
        if not isinstance(key, str) or not (head := _HEAD.fullmatch(key)):
            raise ConvError(f"Conv2d.parse: key {key!r} must look like n8-c64x56x56-k64x3x3-s2-p1-d1-g1-float32-NCHW-bias-add-relu.")
        batch, channels, height, width, filters, kernel_h, kernel_w = map(int, head.groups()[:7])
        options: dict[str, Any] = {}
        for word in filter(None, head.group(8).split("-")):
            name, value = cls._option(word, key)
            if name in options:
                raise ConvError(f"Conv2d.parse: key {key!r} names `{name}` twice.")
            options[name] = value
            if word == "addsteps":
                options["own_steps"] = True
        return cls(batch, channels, height, width, filters, (kernel_h, kernel_w), **options)

    @staticmethod
    def _option(word: str, key: str) -> tuple[str, Any]:
        if numbers := re.fullmatch(r"([spdg])(\d+(?:[x.]\d+)*)", word):
            name = {"s": "stride", "p": "padding", "d": "dilation", "g": "groups"}[numbers[1]]
            values = [int(n) for n in re.split("[x.]", numbers[2])]
            return name, values[0] if len(values) == 1 else values
        for name, allowed in (("dtype", tuple(DTYPES)), ("layout", LAYOUTS)):
            if word in allowed:
                return name, word
        if found(word) is not None:
            return "activation", word
        if word.startswith("out."):
            return "out_dtype", word.removeprefix("out.")
        if zero := re.fullmatch(r"(out)?zero(m?)(\d+)", word):
            return f"{'out_' if zero[1] else ''}zero_point", int(zero[3]) * (-1 if zero[2] else 1)
        if word in ("bias", "add", "addsteps"):
            return "bias" if word == "bias" else "residual", True
        raise ConvError(f"Conv2d.parse: key {key!r} has the unknown part {word!r}.")


_HEAD = re.compile(r"n(\d+)-c(\d+)x(\d+)x(\d+)-k(\d+)x(\d+)x(\d+)((?:-[A-Za-z0-9._]+)*)")


@functools.lru_cache(maxsize=4096)
def _changed(conv: Conv2d, changes: tuple[tuple[str, type, Any], ...]) -> Conv2d:
    return replace(conv, **{name: value for name, _, value in changes})
