"""Elementary functions of operators that are no convolutions, as expressions that LLVM vectorises, in place of calls of the C library.

`LEGALIZATIONS` is for `relax.transform.LegalizeOps`: operators of float32 become the expressions of `compute.arithmetic` that convolutions
apply in their epilogues, and conversions from and to bfloat16 those of `compute.dot_product`: TVM's own evaluate their argument several
times, and bind its variables as often. An operator's argument may be any number, so that exp is continued to 0 and to infinity here;
activations need no more of exp than epilogues do, as what it adds to 1 or is divided by hides the difference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from im2win.compute.arithmetic import TensorExpressions
from im2win.compute.dot_product import cast
from im2win.spec.activations import apply

_ABOVE, _BELOW = 8.0, 24.0  # exp(x) is exp(x - 8) * exp(8) for large x, and exp(x + 24) * exp(-24) for small x


class WholeExponential(TensorExpressions):
    """`TensorExpressions` with an exp that reaches 0 and infinity, as C's does."""

    def exp(self, value: Any) -> Any:
        """exp, with a relative error of at most 2 eps from the least normal number on; its argument is evaluated more than once."""
        large, small = value > self._const(80.0), value < self._const(-80.0)
        shift = tirx.Select(large, self._const(_ABOVE), tirx.Select(small, self._const(-_BELOW), self._const(0.0)))
        factor = tirx.Select(
            large, self._const(math.exp(_ABOVE)), tirx.Select(small, self._const(math.exp(-_BELOW)), self._const(1.0))
        )
        return super().exp(value - shift) * factor

    def exp_negative(self, value: Any) -> Any:
        """exp of a number that is at most 0, or NaN; 0 from -86.6 on."""
        return tirx.Select(value < self._const(-86.6), self._const(0.0), super().exp(value))


ARITHMETIC = WholeExponential()


def _elementwise(name: str, formula: Callable[[Any], Any], builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (tensor,) = call.args
    if str(tensor.ty.dtype) != "float32":
        return call

    def function(data: te.Tensor) -> te.Tensor:
        return te.compute(data.shape, lambda *at: formula(data(*at)), name=name)

    return builder.call_te(function, tensor, primfunc_name_hint=name)


def _activation(word: str) -> Callable[[Any], Any]:
    return lambda value: apply(word, TensorExpressions(), value)


_FORMULAS: dict[str, Callable[[Any], Any]] = {
    "relax.exp": ARITHMETIC.exp,
    "relax.tanh": ARITHMETIC.tanh,
    "relax.erf": ARITHMETIC.erf,
    "relax.sigmoid": _activation("sigmoid"),
    "relax.nn.silu": _activation("silu"),
    "relax.nn.gelu": _activation("gelu"),
    "relax.nn.gelu_tanh": _activation("gelu_tanh"),
}


def _astype(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.astype` between float types of which one is bfloat16; other calls as they are."""
    (tensor,) = call.args
    types = str(tensor.ty.dtype), str(call.ty.dtype)
    if "bfloat16" not in types or not all("float" in dtype for dtype in types):
        return call

    def function(data: te.Tensor) -> te.Tensor:
        return te.compute(data.shape, lambda *at: cast(data(*at), types[1]), name="cast")

    return builder.call_te(function, tensor, primfunc_name_hint="cast")


LEGALIZATIONS: dict[str, Callable[[relax.BlockBuilder, relax.Call], relax.Expr]] = {
    "relax.astype": _astype,
    **{name: functools.partial(_elementwise, name.rpartition(".")[2], formula) for name, formula in _FORMULAS.items()},
}
