"""The HTML page in a browser: on a phone and a desktop, light and dark, it is not blank and nothing is wider than the window."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pages
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium, on Debian: apt-get install chromium")

PHONE, DESKTOP = 390, 1280
LIGHT, DARK = "1", "0"  # values of Chromium's setting
PROBE = """
<script>
const wide = [...document.querySelectorAll("body *")].filter(one => {
  const box = one.getBoundingClientRect();
  return box.right > innerWidth + 0.5 && !one.closest(".scroll") && !one.closest(".hidden") && box.width > 0;
});
document.body.dataset.scroll = document.documentElement.scrollWidth;
document.body.dataset.wide = wide.map(one => one.tagName + "." + one.getAttribute("class")).join(" ");
document.body.dataset.paper = getComputedStyle(document.body).backgroundColor;
</script>
"""
FRAME = """<body style="margin: 0"><iframe src="probed.html" style="width: WIDTHpx; height: 4000px; border: 0"></iframe>
<script>
onload = () => {
  const found = frames[0].document.body.dataset;
  document.body.textContent = [found.scroll, found.wide, found.paper].join("|");
};
</script>"""


def browser(folder: Path, page: Path, width: int, scheme: str, *words: str) -> str:
    """Opens a page in a window of this width, with a profile of its own, and returns what Chromium prints."""
    command = [
        BROWSER or "", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},4000", *words, page.as_uri(),
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all kinds of parts, long names and everything opened."""
    folder = tmp_path_factory.mktemp("page")
    long = pages.result(suite="a" * 120, versions={"library" * 9: "1.2.3+" + "b" * 90})
    long.layers[0].layer, long.layers[2].failed = "layer" * 30, "no schedule " + "c" * 300
    long.save(folder / "results" / "a" / "long.json")
    text = pages.everything(folder).replace("<details", "<details open")
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_nothing_is_wider_than_the_window(page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    probed = tmp_path / "probed.html"
    text = page.read_text(encoding="utf-8").replace("style-src 'unsafe-inline'", "style-src 'unsafe-inline'; script-src 'unsafe-inline'")
    # Headless windows may be no narrower than 500 pixels: a frame has the width of a phone.
    probed.write_text(text.replace("</body>", PROBE.replace("innerWidth", str(width)) + "</body>"), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    printed = browser(tmp_path, frame, max(width, 600), scheme, "--allow-file-access-from-files", "--dump-dom")
    scroll, wide, paper = printed.rpartition('<body style="margin: 0">')[2].partition("</body>")[0].split("|")
    assert wide == "" and int(scroll) <= width
    brightness = sum(int(part) for part in paper.removeprefix("rgb(").removesuffix(")").split(",")) / 3
    assert brightness > 200 if scheme == LIGHT else brightness < 60


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_screenshot_is_not_blank(page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    image = pytest.importorskip("matplotlib.image")
    browser(tmp_path, page, width, scheme, f"--screenshot={tmp_path / 'shot.png'}")
    pixels = image.imread(tmp_path / "shot.png")[..., :3]
    colours = {tuple(colour) for colour in np.round(pixels[::4, ::4].reshape(-1, 3) * 15).astype(int)}
    darkest, brightest = pixels.min(axis=2).min(), pixels.max(axis=2).max()
    assert pixels.shape[1] >= width and len(colours) > 30 and brightest - darkest > 0.6
    rows = (np.abs(pixels - pixels[0, 0]).max(axis=2) > 0.1).any(axis=1)
    assert rows[: len(rows) // 2].mean() > 0.5
