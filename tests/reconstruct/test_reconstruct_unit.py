"""The model of a translation unit: what it finds in generated CUDA, and what it says it does not understand."""

from __future__ import annotations

import numpy as np
import pytest
import winograd_pair
from paths import ROOT
from winograd_pair import Pair

from im2win.emulator import Launch
from im2win.reconstruct import ReconstructError
from im2win.reconstruct.fusion import uniform
from im2win.reconstruct.parse.expressions import ExpressionError, names, parse, plain_type, size_of, terms, text, total
from im2win.reconstruct.parse.scan import written
from im2win.reconstruct.parse.statements import Assignment, Declaration, If, Loop, Opaque, blanked, every, statements
from im2win.reconstruct.parse.unit import Edit, Unit, read
from im2win.reconstruct.rulesets import split
from im2win.reconstruct.trace.values import evaluate

KERNEL = 'extern "C" __global__ void k(float* x, int n) {\n  x[0] = n;\n}\n'
SCOPE = {"a": np.array(7), "b": np.array(-7), "i": np.arange(4), "threadIdx.x": np.arange(4), "unknown": None}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a + 2 * 3", 13), ("(a + 2) * 3", 27), ("a - 2 - 3", 2), ("b / 2", -3), ("b % 4", -3), ("b >> 1", -4), ("-a / 2", -3),
        ("a / -2", -3), ("b / -2", 3), ("a % -4", 3), ("b % -4", -3),
        ("a << 2 | 1", 29), ("a & 3 ^ 1", 2), ("1 + (a > 6)", 2), ("a == 7 && b < 0", True), ("!a || b", True), ("~a", -8),
        ("a < b ? 1 : i < 9 ? 2 : 3", [2] * 4), ("min(a, max(b, 3))", 3), ("((int)threadIdx.x) - 2", [-2, -1, 0, 1]), ("0x1F + 1u", 32),
        ("(char)200", None), ("(uint)b", None), ("threadIdx.x - 2", None), ("a / (i - 1)", None), ("unknown + 1", None), ("1.5f", None),
        ("x[a]", None), ("0x0p+0f", None), ("(float)a", None), ("i % 2 * 4 + i / 2", [0, 4, 1, 5]),
    ],
)  # fmt: skip
def test_expressions_have_cs_values(expression: str, value: object) -> None:
    found = evaluate(parse(expression), SCOPE)
    if value is None:
        assert found is None
    else:
        assert found is not None
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    "expression",
    ["(&(s[(i * 4)]))", "*(float4*)(s + (i * 4))", "im2win::copy_async<16>((&(s[1])), (&(d[2])), ((0 <= i) && (i < 3)))", "((int*)s)[3].x",
     "4 .x", "f(4 .x)[1].y"],
)
def test_expressions_with_memory_are_written_as_they_were_read(expression: str) -> None:
    tree = parse(expression)
    assert parse(text(tree)) == tree


@pytest.mark.parametrize("expression", ["a +", "a b", "f(a", "a ? b", "[1]", "a @ b", "(a))"])
def test_what_is_no_expression(expression: str) -> None:
    with pytest.raises(ExpressionError, match="not an expression that is understood"):
        parse(expression)


def test_a_broken_source_is_the_reconstructors_error() -> None:
    """Whatever the parser says of it."""
    launch = "// launch: k(x, 3) grid 2 1 1 block 32 1 1 dynamic 0\n"
    with pytest.raises(ReconstructError, match="a bracket that nothing closes"):
        read(launch + KERNEL.rstrip("}\n"))
    with pytest.raises(ReconstructError, match="not an expression that is understood"):
        parse("a +")


NESTED = {
    "brackets": "a[0] = " + "(" * 5000 + "1" + ")" * 5000 + ";",
    "signs": "a[0] = " + "- " * 5000 + "1;",
    "conditions": "a[0] = " + "b ? 1 : " * 5000 + "1;",
    "terms": "a[0] = " + "1 + " * 5000 + "1;",
    "indices": "a[0] = " + "a[" * 5000 + "0" + "]" * 5000 + ";",
    "scopes": "{" * 2000 + "a[0] = 1;" + "}" * 2000,
    "branches": "if (b) { a[0] = 1; }" + " else if (b) { a[0] = 1; }" * 1000,
}


@pytest.mark.parametrize("what", NESTED)
def test_deep_nesting_is_text_that_is_not_followed(what: str) -> None:
    text_ = NESTED[what]
    found = list(every(statements(text_, 0, len(text_))))
    assert any(isinstance(part, Opaque) for part in found), what
    assert read(f"extern \"C\" __global__ void k(float* a) {{ {text_} }}").kernel("k").barriers == []


SIZES = {
    1: "bool char int8_t uint8_t uchar void char1", 2: "short ushort half half_t nv_bfloat16 int16_t __half uchar2",
    4: "int uint unsigned float int32_t uint32_t half2 char4 float1", 8: "double int64_t uint64_t longlong size_t float2 void* float4*",
    12: "float3", 16: "float4 double2 uint4 longlong2", 32: "double4",
}  # fmt: skip


def test_sizes_of_types() -> None:
    for size, types in SIZES.items():
        for name in types.split():
            assert size_of(plain_type(name)) == size, name
    assert size_of("signed char") == size_of(plain_type("unsigned char")) == 1
    assert plain_type("const unsigned  char * __restrict__") == "uchar*" and plain_type("signed char") == "signed char"
    assert size_of("float5") is size_of("half_t2") is size_of("other") is None


@pytest.mark.parametrize(("type_", "least", "most"), [
    ("char", -128, 127), ("uchar", 0, 255), ("short", -32768, 32767), ("ushort", 0, 65535), ("int", -(2**31), 2**31 - 1),
    ("uint", 0, 2**32 - 1), ("bool", 0, 1),
])  # fmt: skip
def test_casts_of_what_a_type_holds_change_nothing(type_: str, least: int, most: int) -> None:
    for value, wanted in ((least, least), (most, most), (least - 1, None), (most + 1, None)):
        found = evaluate(parse(f"({type_})v"), {"v": np.array(value)})
        assert found is None if wanted is None else found == wanted, value


def test_sums_come_apart_and_together() -> None:
    tree = parse("((((e * 512) + ((c << 6) - (((int)blockIdx.x) * 16))) + (2 * (e % 3))) + 5)")
    found = terms(tree)
    assert [factor for factor, _ in found] == [512, 64, -16, 2, 5]
    scope = {"e": np.arange(9), "c": np.array(3), "blockIdx.x": np.array(2)}
    np.testing.assert_array_equal(evaluate(parse(total(found)), scope), evaluate(tree, scope))
    assert names(tree) == {"e", "c", "blockIdx.x"}


def test_statements() -> None:
    code = """
  alignas(64) float sums[32]; extern __shared__ __align__(128) half raw[]; __shared__ float one;
  #pragma unroll
  for (int i = 0; i < 8; i += 2) {
    int cse_v1 = (i * 4);
    if (i < 4) { sums[i] = 1.0f; } else if (i < 6) { sums[i] += 2.0f; } else { touch(&sums[i]); }
  }
  while (sums[0] > 0) { sums[0] = 0; }
  asm volatile("bar.sync 0;" ::: "memory");
"""
    found = statements(blanked(code), 0, len(code))
    assert [type(part).__name__ for part in found] == ["Declaration"] * 3 + ["Loop", "Opaque", "Opaque"]
    arrays = [part for part in found if isinstance(part, Declaration)]
    assert [(part.name, part.type, part.count, part.space) for part in arrays] == [
        ("sums", "float", 32, ""), ("raw", "half", 0, "dynamic"), ("one", "float", 1, "shared"),
    ]  # fmt: skip
    loop = found[3]
    assert isinstance(loop, Loop) and (loop.name, loop.step) == ("i", 2) and isinstance(loop.body[1], If)
    assert [part.operator for part in every(found) if isinstance(part, Assignment)] == ["", "+"]


def test_parameters_that_may_be_written() -> None:
    """Text that is not understood may write whatever it names; so may a function, and whoever has the address."""
    for statement, wanted in {
        "y[0] = x[1];": {"y"},
        'asm volatile("st.global.f32 [%0], %1;" :: "l"(y), "f"(x[0]));': {"x", "y"},
        'asm volatile("bar.sync 0;");': set(),
        "float* alias = y + 4;": {"y"},
        "y[0] = touch(&x[1], x[2]);": {"x", "y"},
        "im2win::copy_async<4>((&(y[0])), (&(x[1])));": {"y"},
        "float value = x[0];": set(),
    }.items():
        unit = read(f'extern "C" __global__ void k(float* __restrict__ x, float* __restrict__ y) {{\n  {statement}\n}}\n')
        assert written(unit.kernel("k")) == wanted, statement


def test_blocks_are_uniform_where_no_data_decides() -> None:
    """The step from block to block along x, in elements; None where data decide whether or where a block writes."""
    place = "((((int)blockIdx.x) * 16) + ((int)threadIdx.x))"
    for statement, wanted in {
        f"y[{place}] = x[{place}];": 16,
        f"if (3 < ((int)threadIdx.x)) {{ y[{place}] = 1.0f; }}": 16,
        f"if (0.0f < x[{place}]) {{ y[{place}] = 1.0f; }}": None,
        f"y[({place} + ((int)x[0]))] = 1.0f;": None,
        f"y[({place} * ((int)blockIdx.x))] = 1.0f;": None,
    }.items():
        source = f'extern "C" __global__ void k(float* __restrict__ x, float* __restrict__ y) {{\n  {statement}\n}}\n'
        kernel = Unit(source, (Launch("k", ("x", "y"), (4, 1, 1), (16, 1, 1)),)).kernel("k")
        assert uniform._step(kernel, "y") == wanted, statement


def test_tvms_source() -> None:
    unit = winograd_pair.unit(Pair())
    transform, product = unit.kernels.values()
    assert (transform.name, transform.bounds, transform.threads, transform.bound) == (
        "winograd_kernel",
        128,
        128,
        ["blockIdx.x", "threadIdx.x"],
    )
    assert product.bound == ["blockIdx.x", "blockIdx.y", "threadIdx.x", "threadIdx.y"] and product.static_bytes == 2 * 256 * 4
    assert [parameter.name for parameter in product.parameters] == ["V_ptr", "filter_ptr", "output_ptr"]
    assert all(parameter.restrict and parameter.element == "float" for parameter in product.parameters)
    assert len(product.barriers) == 2 and len(product.loops) == 11 and not transform.barriers
    assert not [part for kernel in unit.kernels.values() for part in every(kernel.statements) if isinstance(part, Opaque)]


# "fused" is what the reconstructor has made of a source
SOURCES = [path for path in sorted((ROOT / "tests" / "golden").glob("*.cu")) if path.stem != "fused"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_our_own_source_is_understood(path: object) -> None:
    unit = read(path.read_text())  # type: ignore[attr-defined]
    assert not [part for kernel in unit.kernels.values() for part in every(kernel.statements) if isinstance(part, Opaque)]
    assert all(kernel.barriers or kernel.name == "transform_kernel" for kernel in unit.kernels.values())


def test_the_stored_source_is_what_tvm_generates(request: pytest.FixtureRequest) -> None:
    """`--update-golden` writes it anew; that takes half a minute, and so is all that this test does not do every time."""
    if request.config.getoption("--update-golden"):
        winograd_pair.STORED.write_text(winograd_pair.generated(winograd_pair.TENSOR_CORES).annotated())
    unit = winograd_pair.unit(winograd_pair.TENSOR_CORES)
    assert [launch.kernel for launch in unit.launches] == ["winograd_kernel", "winograd_kernel_1"] and set(unit.workspace) == {"V"}
    assert "nvcuda::wmma::mma_sync" in unit.kernel("winograd_kernel_1").body


def test_launches_travel_in_comments() -> None:
    unit = winograd_pair.unit(Pair())
    again = read(unit.annotated())
    assert (again.launches, again.workspace, again.source.strip()) == (unit.launches, dict(unit.workspace), unit.source.strip())


def test_launches_with_numbers_travel_too() -> None:
    launches = tuple(Launch("k", ("x", n), (1, 1, 1), (32, 1, 1)) for n in (0, -3))
    assert read(Unit(KERNEL, launches).annotated()).launches == launches


def test_kernels_are_split() -> None:
    unit = winograd_pair.unit(Pair())
    parts = split(unit)
    assert list(parts) == list(unit.kernels)
    for name, part in parts.items():
        assert part.kernel(name).text == unit.kernel(name).text and [launch.kernel for launch in part.launches] == [name]
        assert part.head == unit.head and set(part.workspace) == {"V"}


@pytest.mark.parametrize(
    ("source", "launches", "message"),
    [
        (KERNEL + KERNEL, (), "kernel k is defined twice"),
        (KERNEL, (), "its launch is not known; give it as a comment"),
        (KERNEL, (Launch("k", ("x",), (1, 1, 1), (32, 1, 1)),), "2 parameters and 1 arguments"),
        (KERNEL, tuple(Launch("k", ("x", "n"), (i, 1, 1), (32, 1, 1)) for i in (1, 2)), "is launched in 2 ways"),
    ],
)
def test_units_that_rules_cannot_work_on(source: str, launches: tuple[Launch, ...], message: str) -> None:
    with pytest.raises(ReconstructError, match=message):
        _ = Unit(source, launches).kernel("k").launch


def test_a_launch_of_no_kernel() -> None:
    with pytest.raises(ReconstructError, match="there is no kernel 'other'; the source has k"):
        read("// launch: other(x) grid 1 1 1 block 32 1 1 dynamic 0\n" + KERNEL)


def test_changes_must_not_overlap() -> None:
    with pytest.raises(ReconstructError, match="rule 'two' changes what another has changed"):
        Unit("abcdef").edited([Edit((0, 3), "x", "two", ""), Edit((2, 4), "y", "one", "")])
