"""Winograd's matrices by exact rationals, their straight-line programs, what they do to rounding, and transformed filters."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
from oracle import exact_tensors

from im2win.numerics.matvec_program import program
from im2win.numerics.reference import error, random_tensors, reference
from im2win.numerics.tolerance import TRUSTED, tolerance, trusted
from im2win.numerics.winograd_error import HALF_MARGIN, HALVES, expected, half_forms
from im2win.numerics.winograd_matrices import Transform, WinogradError, default_points, minimal_operations, transform
from im2win.numerics.winograd_measured import measure, table
from im2win.packing import codec as packs
from im2win.packing.winograd import WinogradPack, transformed
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.conv2d import Conv2d

SIZES = [(m, r) for m in range(1, 9) for r in range(1, 8) if m + r <= 12]
LAVIN = (0, 1, -1, 2, -2)


def times(matrix: Any, vector: Any) -> list[Fraction]:
    return [sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]


def outputs(form: Transform, d: list[Fraction], g: list[Fraction]) -> list[Fraction]:
    """A^T [(G g) * (B^T d)]."""
    return times(form.at, [u * v for u, v in zip(times(form.g, g), times(form.bt, d), strict=True)])


def correlation(d: list[Fraction], g: list[Fraction]) -> list[Fraction]:
    return [sum((tap * d[i + k] for k, tap in enumerate(g)), Fraction(0)) for i in range(len(d) - len(g) + 1)]


# --- matrices


@pytest.mark.parametrize(("m", "r"), SIZES)
def test_the_form_is_the_correlation(m: int, r: int) -> None:
    """Both are bilinear in d and g: equal on all pairs of unit vectors, they are equal everywhere."""
    form = transform(m, r)
    size = minimal_operations(m, r)
    assert (len(form.at), len(form.g), len(form.bt)) == (m, size, size) and form.size == size
    units = [[Fraction(i == k) for i in range(size)] for k in range(size)]
    for d, g in itertools.product(units, units[:r]):
        assert outputs(form, d, g[:r]) == correlation(d, g[:r])


@pytest.mark.parametrize("points", [LAVIN, ("1/3", "-1/3", 5, "2/7", -4), (0, "3/2", "-3/2", "2/3", "-2/3")], ids=str)
def test_any_points_will_do(points: Any) -> None:
    draw = random.Random(0)
    form = transform(4, 3, points)
    for _ in range(5):
        d, g = ([Fraction(draw.randint(-9, 9), draw.randint(1, 9)) for _ in range(count)] for count in (6, 3))
        assert outputs(form, d, g) == correlation(d, g)


def test_two_dimensions() -> None:
    """Y = A^T [(G g G^T) * (B^T d B)] A, with different kernels down and across."""
    draw = random.Random(1)
    down, across = transform(2, 5), transform(3, 2)
    d = [[Fraction(draw.randint(-9, 9)) for _ in range(across.size)] for _ in range(down.size)]
    g = [[Fraction(draw.randint(-9, 9)) for _ in range(2)] for _ in range(5)]

    def both(one: Any, other: Any, values: Any) -> list[list[Fraction]]:
        columns = [times(one, column) for column in zip(*values, strict=True)]
        return [times(other, row) for row in zip(*columns, strict=True)]

    products = [
        [u * v for u, v in zip(a, b, strict=True)] for a, b in zip(both(down.g, across.g, g), both(down.bt, across.bt, d), strict=True)
    ]
    for i, row in enumerate(both(down.at, across.at, products)):
        for j, value in enumerate(row):
            assert value == sum(g[u][v] * d[i + u][j + v] for u in range(5) for v in range(2))


def test_lavins_points_give_lavins_matrix() -> None:
    """arXiv 1509.09308, eq. 15, up to the signs of rows."""
    printed = "4 0 -5 0 1 0, 0 -4 -4 1 1 0, 0 4 -4 -1 1 0, 0 -2 -1 2 1 0, 0 2 -1 -2 1 0, 0 4 0 -5 0 1"
    assert [" ".join(map(str, row)) for row in transform(4, 3, LAVIN).bt] == printed.split(", ")
    assert transform(2, 3).bt[1:3] == ((0, 1, 1, 0), (0, -1, 1, 0))


@pytest.mark.parametrize("points", [None, ("1/3", "-1/3", 5, "2/7", -4)], ids=str)
def test_floats_hold_both_matrices_of_a_kernel(points: Any) -> None:
    """Whatever the points: G takes the denominators that are no powers of two."""
    form = transform(4, 3, points)
    for value in (value for matrix in (form.at, form.bt) for row in matrix for value in row):
        assert Fraction(float(np.float32(float(value)))) == value


@pytest.mark.parametrize("count", [3, 5])
def test_default_points_are_the_quietest_of_their_kind(count: int) -> None:
    """0 and pairs of opposite fractions up to 4 with denominators up to 4, and three taps."""
    fractions = sorted({Fraction(a, b) for b in (1, 2, 4) for a in range(1, 4 * b + 1)})
    noises = {}
    for chosen in itertools.combinations(fractions, count // 2):
        points = [Fraction(0), *(sign * point for point in chosen for sign in (1, -1))]
        noises[frozenset(points)] = transform(count - 1, 3, points).noise
    assert min(noises, key=lambda points: noises[points]) == set(default_points(count))


def test_default_points_are_different() -> None:
    assert all(len(set(default_points(count))) == count for count in range(17))


def test_noise_and_bound_do_not_depend_on_scale() -> None:
    """Lavin's F(4, 3) by hand: the bound of the last output is (4*2 + ...)/3; and the points chosen here are quieter."""
    lavin, ours = transform(4, 3, LAVIN), transform(4, 3)
    assert lavin.bound == 16 and round(lavin.noise, 2) == 5.61
    assert ours.noise < 0.55 * lavin.noise and transform(1, 1).noise == transform(1, 1).bound == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 3), r"`outputs` \(=0\) must be an integer of at least 1"),
        ((2, True), r"`taps` \(=True\) must be an integer of at least 1"),
        ((2.0, 3), r"`outputs` \(=2.0\) must be an integer"),
        ((16, 3), r"points must be from 0 to 16"),
        ((4, 3, (0, 1, -1, 2)), r"`points` \(=0, 1, -1, 2\) must be 5 different numbers"),
        ((4, 3, (0, 1, -1, 2, 2)), r"`points` .* must be 5 different numbers"),
        ((4, 3, (0, 1, -1, 2, "two")), r"`points` must be rational numbers"),
    ],
)
def test_bad_sizes_and_points(arguments: Any, message: str) -> None:
    with pytest.raises(WinogradError, match=message):
        transform(*arguments)


# --- programs


@pytest.mark.parametrize(("m", "r"), SIZES)
def test_programs_are_their_matrices(m: int, r: int) -> None:
    form = transform(m, r)
    for matrix in (form.at, form.g, form.bt):
        made = program(matrix)
        assert made.matrix() == [list(row) for row in matrix]
        assert made.operations <= sum(1 for row in matrix for value in row if value)


@pytest.mark.parametrize(("m", "r", "into", "back"), [(2, 3, 4, 4), (4, 3, 12, 12), (6, 3, 24, 20), (2, 5, 12, 8), (4, 5, 24, 16)])
def test_programs_are_as_short_as_those_written_by_hand(m: int, r: int, into: int, back: int) -> None:
    form = transform(m, r)
    assert (program(form.bt).operations, program(form.at).operations) == (into, back)
    assert program(form.bt).operations < sum(1 for row in form.bt for value in row if value)


def test_a_program_writes_code() -> None:
    """The same steps on names instead of numbers: what a code generator does."""
    lines: list[str] = []

    def step(left: str | None, factor: Fraction, right: str) -> str:
        lines.append(f"t{len(lines)} = {f'{left} + ' if left else ''}({factor}) * {right}")
        return f"t{len(lines) - 1}"

    made = program(transform(4, 3).bt)
    names = made.run([f"d{i}" for i in range(6)], step)
    values: dict[str, Any] = {f"d{i}": Fraction(3**i) for i in range(6)} | {"Fraction": Fraction}
    for line in lines:
        exec(line.replace("(", "Fraction('").replace(")", "')"), {}, values)
    assert len(lines) == made.operations
    assert [values[name] for name in names] == times(transform(4, 3).bt, [3**i for i in range(6)])


def test_bad_programs() -> None:
    with pytest.raises(ValueError, match="no row of `matrix` may be all zeros"):
        program([[Fraction(1), Fraction(0)], [Fraction(0), Fraction(0)]])
    for matrix in ([], [[]], [[Fraction(1)], [Fraction(1), Fraction(2)]]):
        with pytest.raises(ValueError, match="`matrix` must have rows, all of one length"):
            program(matrix)
    with pytest.raises(ValueError, match=r"`values` \(=2 of them\) must be 1"):
        program([[Fraction(1)]]).run([1, 2], lambda left, factor, right: right)


# --- numerics


def problem(m: int, r: int, channels: int, **changes: Any) -> Conv2d:
    return Conv2d(1, channels, m + r - 1, m + r - 1, 16, r).with_(**changes)


FORMS = [(2, 2), (2, 3), (3, 3), (4, 3), (5, 3), (6, 3), (4, 4), (2, 5), (4, 5)]


def test_the_rule_refuses_what_measures_badly_and_nothing_else_far_away() -> None:
    """Over channels of 1 to 512: what is trusted measures at most 0.6 of the tolerance; what measures above it is refused."""
    rows = table(FORMS, (1, 16, 64, 256, 512), tiles=36)
    for row in rows:
        conv = problem(row.outputs, row.taps, row.channels)
        assert row.tolerance == tolerance(conv)
        if trusted(conv, row.outputs):
            assert row.share <= 0.6, row
        else:
            assert row.share > 0.25, row
    refused = {(row.outputs, row.taps) for row in rows if not trusted(problem(row.outputs, row.taps, row.channels), row.outputs)}
    assert refused == {(4, 4), (5, 3), (6, 3), (4, 5)}
    assert not any(trusted(problem(m, 3, c), m) for m in (5, 6) for c in (1, 16, 64, 256, 512))
    assert all(trusted(problem(m, r, c), m) for m, r in ((2, 3), (4, 3), (2, 5)) for c in (1, 16, 512))


def test_points_are_worth_it() -> None:
    """F(4x4, 3x3) with Lavin's points is off by three times as much, and would not be trusted."""
    ours, lavin = measure(4, 3, 64), measure(4, 3, 64, points=LAVIN)
    assert lavin.error > 2.5 * ours.error
    assert lavin.noise > 30 > 10 > ours.noise


def test_float16_has_no_room_for_transforms() -> None:
    """Transformed inputs and filters rounded to float16: even F(2x2, 3x3) is near the tolerance, F(4x4, 3x3) far beyond."""
    two, four = measure(2, 3, 64, "float16"), measure(4, 3, 64, "float16")
    assert 0.5 < two.share < 1.3 and four.share > 2
    assert not trusted(problem(2, 3, 64, dtype="float16"), 2) and not trusted(problem(2, 3, 64, dtype="int8"), 2)
    with pytest.raises(ValueError, match=r"`dtype` \(='int8'\) must be float32 or float16"):
        measure(2, 3, 4, "int8")


def test_halves_keep_the_tolerance_of_accuracy_winograd() -> None:
    """Over channels of 1 to 512: the largest form keeps 0.7 of it, and one that is left out would not keep it."""
    for taps, outputs in HALVES["float16"].items():
        rows = table([(m, taps) for m in outputs], (1, 16, 512), "float16", tiles=36)
        shares = [row.error / tolerance(problem(row.outputs, taps, row.channels, dtype="float16"), "winograd") for row in rows]
        assert 0.2 < max(shares) < 0.7
        out = measure(outputs[-1] + 2, taps, 64, "float16")
        assert out.error > tolerance(problem(2, taps, 64, dtype="float16"), "winograd")


def test_the_tolerance_of_accuracy_winograd_is_for_halves_in_winograds_form_only() -> None:
    half, whole = problem(2, 3, 64, dtype="float16"), problem(2, 3, 64)
    pointwise = Conv2d(1, 8, 4, 4, 8, 1, dtype="float16")
    assert tolerance(half) == tolerance(half, "tf32") < tolerance(half, "winograd") == HALF_MARGIN * expected(half, 4) < 2**-6
    assert tolerance(whole, "winograd") == tolerance(whole, "tf32") and tolerance(pointwise.with_(dtype="int8"), "winograd") == 0
    assert half_forms(pointwise) == () and tolerance(pointwise, "winograd") == tolerance(pointwise)
    clipped = [half.with_(activation="relu6"), problem(2, 3, 256, dtype="float16", activation="relu6")]
    assert [half_forms(conv) for conv in clipped] == [(2, 4), (2,)]


def test_a_missing_channel_is_beyond_every_tolerance() -> None:
    """One of 512, the least that a wrong kernel may leave out."""
    conv = Conv2d(1, 512, 8, 8, 8, 3, dtype="float16")
    tensors = random_tensors(conv, 0)
    right = reference(conv, tensors["data"], tensors["filter"])
    tensors["filter"][:, 100] = 0
    assert error(reference(conv, tensors["data"], tensors["filter"]), right) > 3 * tolerance(conv, "winograd")


def test_accuracies_are_ordered() -> None:
    names = get_args(Accuracy)
    assert names == ("exact", "float32", "tf32", "winograd")
    for place, name in enumerate(names):
        assert [allows(name, other) for other in names] == [True] * (place + 1) + [False] * (len(names) - place - 1)


def test_relu6_cuts_off_what_errors_are_relative_to() -> None:
    conv = problem(4, 3, 64)
    clipped = conv.with_(activation="relu6")
    assert expected(clipped, 4) == pytest.approx(expected(conv, 4) * 4 * math.sqrt(576) / 6)
    assert trusted(clipped, 2) and not trusted(clipped, 4) and expected(clipped, 4) > TRUSTED * tolerance(clipped)


# --- filters


@pytest.mark.parametrize("order", ["bijck", "bkcij", "ijbck"])
@pytest.mark.parametrize("key", ["n1-c6x9x11-k10x3x2", "n1-c6x9x11-k15x3x3-g3"])
def test_packed_filters_by_the_formula(key: str, order: str) -> None:
    conv, pack = Conv2d.parse(key), WinogradPack(2, 4, order, 4)
    w, bias = exact_tensors(conv)["filter"], np.arange(conv.out_channels, dtype=np.float32)
    packed, wide = pack.filter(conv, w), pack.bias(conv, bias)
    assert packed.shape == pack.shape(conv) and packed.dtype == np.float32 and packed.flags.c_contiguous
    per_group, seen = conv.out_channels // conv.groups, np.zeros(packed.shape, bool)
    down, across = (transform(2, taps).g for taps in conv.kernel)
    for (j, c), kernel in np.ndenumerate(w[:, :, 0, 0]):
        del kernel
        block, k = j // per_group * pack.blocks_per_group(conv) + j % per_group // 4, j % per_group % 4
        assert wide[block, k] == bias[j]
        for i, row in enumerate(down):
            for t, col in enumerate(across):
                value = sum(a * b * Fraction(float(w[j, c, u, v])) for u, a in enumerate(row) for v, b in enumerate(col))
                place = tuple({"b": block, "i": i, "j": t, "c": c, "k": k}[axis] for axis in order)
                assert packed[place] == value, "exact: F(2, 3) divides by 2 only"
                seen[place] = True
    assert not packed[~seen].any(), "what is not a filter is zero"
    assert packs.from_dict(packs.as_dict(pack)) == pack


def test_transformed_filters_are_rounded_once() -> None:
    conv = Conv2d(1, 3, 8, 8, 4, 3)
    w = np.random.default_rng(0).standard_normal(conv.filter_shape).astype(np.float32)
    exact = transformed(conv, w, 4)
    assert exact.dtype == np.float64
    packed = WinogradPack(4, 4, "bkcij").filter(conv, w)
    assert (packed[0] == exact.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 4, "bijc"), r"`order` \(='bijc'\) must be a permutation of bkcij"), ((0, 4), r"`outputs` \(=0\) must be at least 1")],
)
def test_bad_packs(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WinogradPack(*arguments)


def test_integers_are_not_transformed() -> None:
    conv = Conv2d(1, 3, 8, 8, 4, 3, dtype="int8")
    with pytest.raises(ValueError, match="`w` has dtype int8; Winograd's transformed filters are fractions"):
        WinogradPack(2, 4).filter(conv, np.ones(conv.filter_shape, np.int8))
