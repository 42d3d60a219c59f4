"""What is installed: wheels hold the whole package, however they are built, and building leaves the source tree as it was."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="needs the build backend: pip install hatchling")

ROOT = Path(__file__).parents[2]
LINKED = ("compute", "schedules", "reconstruct", "tuning_logs")
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.lock", "*.so", "*.egg-info")  # as .gitignore


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, with its links as they are."""
    root = tmp_path_factory.mktemp("tree")
    for name in FILES:
        shutil.copy2(ROOT / name, root / name)
    for folder in ("src", *LINKED):
        shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=LEFT_OUT)
    return root


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution and, in other folders, a wheel of it, one of the tree, and an editable one."""
    out = tmp_path_factory.mktemp("built")
    before, editable = listing(tree), out / "editable"
    editable.mkdir()
    build(tree, out)  # as `python -m build`: the source distribution, then a wheel of that
    build(tree, out / "direct", "--wheel")  # as `pip install .`
    hook = f"import hatchling.build as b; print(b.build_editable({str(editable)!r}))"
    subprocess.run([sys.executable, "-c", hook], cwd=tree, check=True, capture_output=True, timeout=100)
    assert listing(tree) == before, "a build writes into the source tree"
    return out


def build(tree: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, tree]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def listing(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.lstat().st_mtime_ns for path in root.rglob("*")}


def package(tree: Path) -> dict[str, bytes]:
    """The package's files and contents, folders behind links included."""
    folders = [tree / "src" / "im2win", *(tree / "src" / "im2win" / name for name in LINKED)]
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    return {path.relative_to(tree / "src").as_posix(): path.read_bytes() for path in files}


def test_wheels_are_complete(tree: Path, built: Path) -> None:
    expected = package(tree)
    suffixes = {name.rpartition(".")[2] for name in expected}
    assert {"py", "typed", "jsonl", "json", "hpp", "cpp", "c", "h", "html", "css"} <= suffixes
    (of_sdist,), (direct,) = built.glob("im2win-*-none-any.whl"), (built / "direct").glob("*.whl")
    for wheel in (of_sdist, direct):
        with zipfile.ZipFile(wheel) as opened:
            held = {name: opened.read(name) for name in opened.namelist() if ".dist-info/" not in name}
            (entry_points,) = (name for name in opened.namelist() if name.endswith("entry_points.txt"))
            assert b"im2win = im2win.cli.main:main" in opened.read(entry_points)
            assert any(name.endswith("licenses/LICENSE") for name in opened.namelist())
        assert held == expected


def test_the_source_distribution_holds_each_file_once(tree: Path, built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        assert all(member.isfile() for member in opened.getmembers())
        names = {member.name.partition("/")[2] for member in opened.getmembers()}
    assert names == {f"src/{name}" for name in package(tree)} | {*FILES, "PKG-INFO"}


def test_an_editable_installation_leads_to_the_sources(tree: Path, built: Path) -> None:
    (wheel,) = (built / "editable").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (path,) = (name for name in opened.namelist() if name.endswith(".pth"))
        assert opened.read(path).decode().split() == [str(tree / "src")]
        assert not [name for name in opened.namelist() if name.endswith(".py")]
