"""Texts that do not lie: README's blocks and the examples run, its tables are what today's code prints, every path it names exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("command_line", "onnx", "architecture")
COMMANDS, ONNX, ARCHITECTURE = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)


def blocks_of(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


TEXTS = sorted(path for folder in (".", "docs", "benchmarks", "tests") for path in (ROOT / folder).glob("*.md"))
EXAMPLES = {
    "01_tune_and_export.py": ["3"], "02_pytorch_cpu.py": [], "03_layers_of_a_model.py": [], "04_onnx_model.py": ["small.onnx"],
    "05_pytorch_resnet.py": ["18", "32"],
}  # fmt: skip


def run(words: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def test_readme_has_the_blocks_that_are_tested_here() -> None:
    assert re.findall(r"^```(\w+)$", README, re.MULTILINE) == ["sh", "python", "sh"]


def test_readmes_python_runs(tmp_path: Path) -> None:
    [code] = blocks_of(README, "python")
    assert "trials=64" in code
    run([sys.executable, "-c", code.replace("trials=64", "trials=3")], tmp_path)  # the same statements, sooner
    assert (tmp_path / "conv.so").is_file() and (tmp_path / "conv.so.json").is_file() and list((tmp_path / "my_logs").iterdir())


def small_model(path: Path) -> None:
    """A model that compiles in a second, with SqueezeNet's input."""
    onnx = pytest.importorskip("onnx")
    nodes = [onnx.helper.make_node("Conv", ["data_0", "w"], ["c"], strides=[16, 16]), onnx.helper.make_node("Relu", ["c"], ["y"])]
    tensors = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("data_0", ["n", 3, 224, 224]), ("y", None))]
    weights = onnx.numpy_helper.from_array(np.ones((16, 3, 3, 3), np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "small", tensors[:1], tensors[1:], [weights])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)


def test_the_guides_model_runs(tmp_path: Path) -> None:
    [code] = (one for one in blocks_of(ONNX, "python") if "compile_model" in one)
    small_model(tmp_path / "squeezenet.onnx")
    before = "import numpy as np\nimport im2win\nimage = np.ones((1, 3, 224, 224), np.float32)\n"
    run([sys.executable, "-c", before + code + "assert y.shape == (1, 16, 14, 14) and y.min() == 27\n"], tmp_path)


@pytest.mark.slow
def test_commands_run(command: Callable[..., Any], resnet50_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IM2WIN_LOGS", str(tmp_path / "own_logs"))  # no other test finds what is tuned here
    shutil.copy(resnet50_onnx, tmp_path / "resnet50.onnx")
    small_model(tmp_path / "squeezenet.onnx")
    np.save(tmp_path / "image.npy", np.ones((1, 3, 224, 224), np.float32))
    sooner = {"tune": ["--trials", "3"], "bench": ["--rounds", "2"], "ablation": ["--seconds", "0.5", "--rounds", "2"]}
    lines = [line for text in blocks_of(COMMANDS, "sh") for line in text.splitlines() if line.startswith("im2win ")]
    ours = [line for text in blocks_of(README, "sh") for line in text.splitlines() if line.startswith("im2win ")]
    assert len(ours) == 3 and set(ours) <= set(lines)
    assert len(lines) > 8
    of_one = {
        "layers papers12 --batch 8": "layers n1-c64x28x28-k64x3x3-p1 --batch 8",
        "explain resnet50": "explain resnet50 --layers res2_1_3x3",
    }
    assert all(any(line.startswith(f"im2win {many}") for line in lines) for many in of_one)
    for line in lines:
        for many, one in of_one.items():  # of one layer, sooner
            line = line.replace(many, one)
        words = shlex.split(line)[1:]
        done = command(*words, *sooner.get(words[0], []))  # an option given twice counts as it was given last
        assert done.status == 0, f"{line}: {done.err}"
    assert (tmp_path / "result.json").is_file() and list((tmp_path / "my_kernels").glob("*.so"))


def test_every_verb_is_in_the_guide_and_every_verb_there_exists() -> None:
    from im2win.cli.main import app

    verbs = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback}
    verbs |= {group.name for group in app.registered_groups if isinstance(group.name, str)}
    assert set(re.findall(r"^\| `im2win ([a-z]+)` \|", COMMANDS, re.MULTILINE)) == verbs


def test_readmes_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)$", README, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)`", README))
    assert {"demo", "test", "test-all"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(name: str, tmp_path: Path) -> None:
    small_model(tmp_path / "small.onnx")
    assert run([sys.executable, str(ROOT / "examples" / name), *EXAMPLES[name]], tmp_path).strip()
    assert name in README


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name if path.parent == ROOT else f"{path.parent.name}.{path.name}")
def test_paths_named_in_texts_exist(text: Path) -> None:
    content = re.sub(r"^```.*?^```$", "", text.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", content)
    paths = [name for name in named if "/" in name or name.endswith((".py", ".md", ".toml"))]
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", content) if "://" not in link]
    missing = [name for name in (*paths, *links) if not any((folder / name).exists() for folder in (ROOT, text.parent))]
    assert not missing, f"{text}: {missing}"


def test_the_table_of_algorithms_is_todays(command: Callable[..., Any]) -> None:
    written = re.search(r"<!-- matrix:algorithms -->\n(.*?)<!-- /matrix -->", ARCHITECTURE, re.DOTALL)
    assert written and written[1] == command("algorithms", "--markdown").out, "paste the output of: im2win algorithms --markdown"


@pytest.mark.slow
def test_the_guide_to_pytorch_runs(tmp_path: Path) -> None:
    """Its Python blocks, one after another."""
    text = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    assert "2 of 2 convolutions on im2win" in run([sys.executable, "-c", "\n".join(blocks)], tmp_path)
