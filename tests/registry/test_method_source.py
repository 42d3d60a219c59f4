"""What of the source counts for the kernels of one method: nothing that runs is left out, and other methods' files are."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from im2win.bench.source import methods_of
from im2win.device.cpu import Machine
from im2win.device.gpu import H200
from im2win.records.emission import emitted
from im2win.records.folders import PACKAGED
from im2win.records.log import Log
from im2win.registry import method_source, sources
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

CPU = Machine("intel-xeon", "emeraldrapids", "avx512f", 2, 16, 32, 48 << 10, 2 << 20, 32 << 20)

FUTURE = "from __future__ import annotations\n"

# Files of the generator that no method's kernels need. A new one must be listed here, or be imported by what makes kernels: a file that is
# run by other means than an import would be left out of the digests.
UNREACHED = {
    "cpu": {
        "common/tvm_hooks.py", "compute/lowered.py", "numerics/reference.py", "numerics/tolerance.py", "numerics/winograd_error.py",
        "numerics/winograd_int8.py", "numerics/winograd_measured.py", "numerics/winograd_tiling.py", "spec/accuracy.py",
        "spec/recognition.py",
    },
    "cuda": {  # `dot_product` is for CPUs; that it counts for CUDA's choices only asks for proofs that are made again
        "compute/dot_product.py", "numerics/reference.py", "numerics/winograd_measured.py", "packing/codec.py",
        "reconstruct/validate/validators.py", "spec/recognition.py",
    },
}  # fmt: skip

# Which methods a file counts for, by target.
WINDOWS = {"direct/tiled", "im2win/stored", "im2win/fused", "im2col/tiled", "implicit_gemm/tiled", "mec/tiled", "mcfa/tiled"}
EXPECTED: dict[tuple[str, str], set[str]] = {
    ("cpu", "schedules/cpu_dot/kernel.py"): {"direct/dot_product"},
    ("cpu", "schedules/cpu_dot/instructions.py"): {"direct/dot_product"},
    ("cpu", "schedules/cpu_dot/legality.py"): set(),
    ("cpu", "compute/dot_product.py"): {"direct/dot_product"},
    ("cpu", "packing/cpu_dot.py"): {"direct/dot_product"},
    ("cpu", "schedules/cpu_winograd/kernel.py"): {"winograd/tiled"},
    ("cpu", "schedules/cpu_depthwise/kernel.py"): {"direct/depthwise"},
    ("cpu", "schedules/cpu/kernel.py"): WINDOWS,
    ("cpu", "schedules/cpu/model.py"): set(),
    ("cpu", "compute/mec.py"): {"mec/tiled"},
    ("cpu", "codegen/llvm.py"): set(methods_of("cpu")),
    ("cpu", "spec/conv2d.py"): set(methods_of("cpu")),
    ("cuda", "schedules/cuda/kernels/warp_specialized.py"): {"direct/warp_specialized"},
    ("cuda", "schedules/cuda/kernels/persistent.py"): {"direct/persistent"},
    ("cuda", "schedules/cuda/kernels/split_k.py"): {"implicit_gemm/split_k"},
    ("cuda", "schedules/cuda/scheduled/depthwise.py"): {"direct/depthwise"},
    ("cuda", "schedules/cuda/scheduled/tensorized.py"): {key for key in SCHEDULES if key.endswith("/scheduled")},
    ("cuda", "schedules/cuda/legality/scheduled_mma.py"): {key for key in SCHEDULES if key.endswith("/scheduled")},  # parts of it
    ("cuda", "schedules/cuda/legality/winograd.py"): {"winograd/tiled"},  # its windows
    ("cuda", "schedules/cuda/space/winograd.py"): set(),
    ("cuda", "schedules/studies/winograd_tc/kernel.py"): {"winograd/tensor_cores"},
    ("cuda", "codegen/cuda.py"): set(methods_of("cuda")),
    ("cuda", "schedules/cuda/device.hpp"): set(methods_of("cuda")),
    ("cuda", "reconstruct/rulesets.py"): set(methods_of("cuda")),
}


def below(paths: Iterable[Path]) -> set[str]:
    return {path.relative_to(sources.ROOT).as_posix() for path in paths}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], dict[Path, list[ast.stmt] | None]]:
    """What counts, by target and method."""
    return {(target, method): sources.parts(target, method) for target in sources.TARGETS for method in methods_of(target)}


def test_rows_are_read_as_the_registry_has_them() -> None:
    assert list(sources.methods()) == list(SCHEDULES)
    with pytest.raises(ValueError, match=r"`method` \(='direct/none'\) must be one of direct/tiled, "):
        sources.code_digest("cpu", "direct/none")
    assert not sources.is_current("cpu", "direct/none", "0" * 16)
    assert sources.is_current("cpu", "direct/tiled", sources.code_digest("cpu", "direct/tiled"))


@pytest.mark.parametrize("target", sources.TARGETS)
def test_every_file_of_the_generator_counts_for_a_method(target: str, found: dict[tuple[str, str], Any]) -> None:
    counted = set[str]().union(*(below(one) for (of, _), one in found.items() if of == target))
    assert below(sources.files(target)) - counted == UNREACHED[target]


def test_files_count_for_the_methods_that_they_serve(found: dict[tuple[str, str], Any]) -> None:
    for (target, name), expected in EXPECTED.items():
        assert (sources.ROOT / name).is_file()
        assert {method for (of, method), one in found.items() if of == target and sources.ROOT / name in one} == expected, name


def test_digests_of_methods_differ() -> None:
    for target in sources.TARGETS:
        assert len({sources.code_digest(target, method) for method in methods_of(target)}) == len(methods_of(target))


# --- changes of a copy ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's generator, in which `sources` looks."""
    every = {path for target in sources.TARGETS for path in sources.choice_files(target)}
    for path in every:
        other = tmp_path / path.relative_to(sources.ROOT)
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, other)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    return tmp_path


def digests_now(target: str) -> dict[str, str]:
    return {method: sources.code_digest.__wrapped__(target, method) for method in methods_of(target)}


def changed(target: str, before: dict[str, str]) -> set[str]:
    return {method for method, digest in digests_now(target).items() if digest != before[method]}


def rewritten(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_copy_has_the_same_digests(copy: Path) -> None:
    for target in sources.TARGETS:
        assert digests_now(target) == {method: sources.code_digest(target, method) for method in methods_of(target)}


FILES = ("schedules/cpu_dot/vectors.py", "schedules/cuda/mma/wgmma_shared.hpp")


@pytest.mark.parametrize("name", [*FILES, pytest.param("", marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_a_change_of_any_file_changes_the_methods_that_it_counts_for(name: str, copy: Path) -> None:
    """Of the files above, and of all schedules."""
    for target in [target for target in sources.TARGETS if not name or copy / name in sources.files(target)]:
        before = digests_now(target)
        counts = {method: sources.parts(target, method) for method in before}
        for path in sources.files(target):
            if not path.is_relative_to(copy / (name or "schedules")):
                continue
            text = path.read_text(encoding="utf-8")
            path.write_text(text + ("\n# a comment\n" if path.suffix == ".py" else "\n// a comment\n"), encoding="utf-8")
            assert not name or not changed(target, before), path
            path.write_text(text + ("\nprint('changed')\n" if path.suffix == ".py" else "\nint changed;\n"), encoding="utf-8")
            assert changed(target, before) == {method for method, one in counts.items() if path in one}, path
            path.write_text(text, encoding="utf-8")


def test_a_row_s_own_facts_count_and_those_of_other_rows_do_not(copy: Path) -> None:
    table, before = copy / method_source.SCHEDULES, {target: digests_now(target) for target in sources.TARGETS}
    rewritten(table, '"the whole tensor stored", Multistage', '"another title", Multistage')
    assert [changed(target, before[target]) for target in sources.TARGETS] == [{"im2win/stored"}, {"im2win/stored"}]
    before = {target: digests_now(target) for target in before}
    rewritten(table, "def _mcfa(conv: Conv2d) -> Plan:\n", "def _mcfa(conv: Conv2d) -> Plan:\n    print(conv)\n")
    assert [changed(target, before[target]) for target in sources.TARGETS] == [{"mcfa/tiled"}, {"mcfa/tiled"}]
    before = {target: digests_now(target) for target in sources.TARGETS}
    rewritten(copy / method_source.ALGORITHMS, '"MEC, memory-efficient convolution"', '"MEC"')
    assert changed("cpu", before["cpu"]) == {"mec/tiled"} and changed("cuda", before["cuda"]) == {"mec/tiled", "mec/scheduled"}


def test_code_of_one_family_in_a_file_of_many_counts_for_it_alone(copy: Path) -> None:
    before, path = digests_now("cpu"), copy / "registry" / "cpu_schedules.py"
    rewritten(path, "return any_alignment(dot_cpu.module(conv, tile, SYMBOL), 1)", "return dot_cpu.module(conv, tile, SYMBOL)")
    assert changed("cpu", before) == {"direct/dot_product"}
    before = digests_now("cpu")
    path.write_text(path.read_text(encoding="utf-8") + "\nOwnModules.dtypes = ()\n", encoding="utf-8")  # whoever it is about
    assert changed("cpu", before) == set(before)
    before = digests_now("cuda")
    rewritten(copy / "schedules/cuda/families/tma.py", "persistent_model.BEGIN_CYCLES, persistent_kernel,", "0, persistent_kernel,")
    assert changed("cuda", before) == {"direct/persistent"}


def test_a_new_row_leaves_the_other_methods_alone_and_a_new_import_counts(copy: Path) -> None:
    before, table = digests_now("cpu"), copy / method_source.SCHEDULES
    rewritten(table, "_ROWS = (\n", '_ROWS = (\n    Schedule(ALGORITHMS["direct"], "new", "title", scheduler=DotProduct()),\n')
    assert method_source.keys(copy)[0] == "direct/new" and not changed("cpu", before)
    new, module = sources.code_digest.__wrapped__("cpu", "direct/new"), copy / "schedules" / "cpu_dot" / "new.py"
    module.write_text("NEW = 1\n", encoding="utf-8")
    assert not changed("cpu", before)
    stage = copy / "schedules/cpu_dot/stage.py"
    rewritten(stage, FUTURE, f"{FUTURE}from im2win.schedules.cpu_dot.new import NEW\n")
    assert changed("cpu", before) == {"direct/dot_product"} and sources.code_digest.__wrapped__("cpu", "direct/new") != new
    before = digests_now("cpu")
    module.write_text("NEW = 2\n", encoding="utf-8")
    assert changed("cpu", before) == {"direct/dot_product"}
    rewritten(table, '"new", "title"', 'name, "title"')
    with pytest.raises(ValueError, match="a row must be a call with literal names"):
        method_source.keys(copy)


# --- the rules, on small packages ----------------------------------------------------------------------------------------

MAIN = FUTURE + "from im2win.registry.schedules import schedule_of\n"
TABLES = {
    "main.py": MAIN,
    "registry/algorithms.py": '_ROWS = (Algorithm("a", 1), Algorithm("b", 2))\nALGORITHMS = {row.name: row for row in _ROWS}\n',
    "registry/schedules.py": FUTURE
    + "from im2win.families import one, two\nfrom im2win.registry.algorithms import ALGORITHMS\n"
    + '_ROWS = (Schedule(ALGORITHMS["a"], "one", one.ONE), Schedule(ALGORITHMS["b"], "two", two.TWO))\n'
    + "SCHEDULES = {row.key: row for row in _ROWS}\ndef schedule_of(name):\n    return SCHEDULES[name]\n",
    "families/one.py": FUTURE + "ONE = 1\n",
    "families/two.py": FUTURE + "TWO = 2\n",
}


def counted(folder: Path, files: dict[str, str], choosing: Iterable[str] = (), method: str = "a/one") -> dict[str, list[str] | None]:
    """What counts of a package of these files: by file its statements, None for a whole file."""
    for name, text in {**TABLES, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    making = frozenset({*TABLES, *files} - {*choosing})
    parts = method_source.parts(method_source.Area(folder, frozenset({"main.py"}), making, frozenset(choosing)), method)
    named = {path.relative_to(folder).as_posix(): part for path, part in parts.items()}
    shown = {name: part for name, part in named.items() if not name.startswith("registry/")}
    return {name: None if part is None else [ast.unparse(one) for one in part] for name, part in shown.items()}


@pytest.mark.parametrize(
    ("one", "helper"),
    [
        ("from im2win.helper import help\nONE = help", True),
        ("from im2win import helper\nONE = helper.help", True),
        ("import im2win.helper\nONE = 1", True),
        ("from im2win.helper import *\nONE = 1", True),
        ("from ..helper import help\nONE = help", True),
        ("from im2win.helper import help  # for what it does\nONE = 1", True),
        ("def make():\n    from im2win.helper import help\n    return help\nONE = make", True),
        ("from im2win.helper import Help\nONE = isinstance(1, Help)", True),
        ("from im2win.helper import Help\ndef make(x: Help) -> Help:\n    y: Help = x\n    return y\nONE = make", False),
        ("from im2win.other import help\nONE = help", False),
        ("ONE = 1", False),
    ],
)
def test_what_a_file_imports_counts_unless_it_only_annotates(tmp_path: Path, one: str, helper: bool) -> None:
    files = {"families/one.py": FUTURE + one, "helper.py": "help = 1\n"}
    assert ("helper.py" in counted(tmp_path, files)) == helper
    assert "helper.py" not in counted(tmp_path, files, method="b/two") and "families/two.py" in counted(tmp_path, files, method="b/two")


def test_annotations_that_are_evaluated_count(tmp_path: Path) -> None:
    text = "from im2win.helper import Help\nclass One:\n    field: Help\nONE = One()\n"
    assert "helper.py" in counted(tmp_path, {"families/one.py": text, "helper.py": "Help = 1\n"})


def test_packages_count(tmp_path: Path) -> None:
    files = {"families/__init__.py": "", "families/one.py": "ONE = 1\n", "other/__init__.py": ""}
    assert set(counted(tmp_path, files)) == {"main.py", "families/__init__.py", "families/one.py"}


ASKS = """from im2win.model import estimate
from im2win.model import SIZES, WIDTH
from im2win import legality
class One:
    def estimate(self, conv):
        return estimate(conv) + SIZES
    def violations(self, conv):
        return legality.violations(conv)
    def kernels(self, conv):
        return conv * WIDTH
ONE = One()
"""


def test_of_files_that_choose_what_makes_kernels_counts(tmp_path: Path) -> None:
    """An interface asks them to choose, which is no part of a kernel; a definition that makes kernels is, with all that it names."""
    model = "from im2win.helper import deep\nBASE = 2\nSIZES = 1\nWIDTH = BASE * deep\ndef estimate(conv):\n    return SIZES\n"
    files = {"families/one.py": FUTURE + ASKS, "model.py": model, "legality.py": "def violations(conv): ...\n", "helper.py": "deep = 1\n"}
    found = counted(tmp_path, files, {"model.py", "legality.py"})
    assert found["model.py"] == ["BASE = 2", "WIDTH = BASE * deep"] and "legality.py" not in found and found["helper.py"] is None
    kernel = {**files, "families/one.py": "from im2win.kernel import make\nONE = make\n"}
    kernel["kernel.py"] = "from im2win import legality\ndef make(conv):\n    return legality.violations(conv)\n"
    assert counted(tmp_path, kernel, {"model.py", "legality.py"})["legality.py"] is None


# --- what runs ---------------------------------------------------------------------------------------------------------


@contextmanager
def watched() -> Iterator[set[tuple[str, str]]]:
    """The functions that run, as file and name of the module's definition that they are in."""
    ran: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            ran.add((frame.f_code.co_filename, frame.f_code.co_qualname.partition(".")[0]))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield ran
    finally:
        sys.setprofile(before)


ROOTS = {f"{path.resolve()}/" for path in (sources.ROOT, *(path for path in sources.ROOT.iterdir() if path.is_dir()))}
# They hand a tile's values over; of LLVM's code a GPU's takes the hash function of fingerprints. The command line's import hook, which
# another test may have left in the process, finds no file of this package.
_EVERYWHERE = {"registry/backends.py", "records/record.py", "common/torch_import.py"}
NO_PART = {
    "cpu": {*_EVERYWHERE, "registry/cpu_backend.py"}, "cuda": {*_EVERYWHERE, "registry/cuda_backend.py", "codegen/llvm.py"},
}  # fmt: skip


def left_out(ran: set[tuple[str, str]], target: str, method: str) -> set[tuple[str, str]]:
    """What ran of the files that generate kernels, or that choose tiles, and does not count."""
    parts = {str(path.resolve()): part for path, part in sources.parts(target, method).items()}
    others = {str((sources.ROOT / name).resolve()) for name in NO_PART[target]}
    found = set()
    for name, definition in ran:
        path = str(Path(name).resolve())
        part = parts.get(path, [])
        defined = {one.name for one in part or () if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
        ours = path.startswith(tuple(ROOTS)) and path not in others and not definition.startswith("<")
        if ours and part is not None and definition not in defined:
            found.add((name, definition))
    return found


SAMPLES = [(target, method) for target in sources.TARGETS for method in methods_of(target)]
CONVS = {
    "direct/depthwise": "n1-c32x14x14-k32x3x3-p1-g32", "direct/dot_product": "n1-c32x8x8-k32x3x3-p1-bfloat16",
    "direct/persistent": "n32-c64x56x56-k64x3x3-p1-float16-NHWC", "direct/warp_specialized": "n32-c64x56x56-k64x3x3-p1-float16",
    "winograd/tensor_cores": "n8-c64x28x28-k64x3x3-p1-float16-NHWC", "implicit_gemm/split_k": "n1-c128x14x14-k64x3x3-p1",
}  # fmt: skip


@pytest.mark.parametrize(("target", "method"), SAMPLES)
def test_all_that_runs_for_a_default_tile_counts(target: str, method: str) -> None:
    conv = Conv2d.parse(CONVS.get(method, "n4-c16x14x14-k32x3x3-p1-bias-relu"))
    accuracy: Accuracy = "winograd" if schedule_of(method).algorithm.name == "winograd" else "float32"
    _, tile = default_tile(conv, method, H200 if target == "cuda" else CPU, accuracy)
    with watched() as ran:
        emitted(conv, method, tile.as_dict(), target)
    assert ran and left_out(ran, target, method) == set()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_that_runs_for_shipped_records_counts() -> None:
    """Of every method some records of every device, far apart."""
    log = Log(PACKAGED)
    for device in log.devices():
        every: dict[str, list[Any]] = {}
        for record in (record for conv in log.convs(device) for record in log.read(conv, device)):
            every.setdefault(record.method, []).append(record)
        for method, records in every.items():
            with watched() as ran:
                for record in records[:: max(len(records) // 12, 1)]:
                    emitted(record.conv2d, method, record.tile, record.target)
            assert ran and left_out(ran, records[0].target, method) == set(), f"{device} {method}"
