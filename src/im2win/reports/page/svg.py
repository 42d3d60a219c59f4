"""Figures of matplotlib as SVG elements for an HTML page: small, with the page's colours and fonts, and with a text for screen readers."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

from im2win.reports.page.text import printable, shortened

LONGEST = 48  # characters of a text inside a figure
_NAMESPACE = re.compile(r"\{.*?\}")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_REFERENCE = re.compile(r"url\(#(.*?)\)")
_FONT_FAMILY = re.compile(r"font-family:[^;]*(;|$)")
_FONT = re.compile(r"font:\s*(?P<size>[\d.]+px)[^;]*")
_DROPPED = ("metadata", "style", "title", "desc")
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "im2win", "text.parse_math": False}


def label(text: str) -> str:
    """A text of a file in the form that a figure shows: printable characters of one line, `LONGEST` at most."""
    return shortened(" ".join(printable(text).split()), LONGEST)


def inline(draw: Callable[[], Any], name: str, title: str, description: str) -> str:
    """The SVG element of a figure. Its colours are the CSS variables `--c-RRGGBB`, so that a page can have a dark form.

    Args:
        draw: makes the figure of matplotlib. Texts in it are shown as they are: dollar signs begin no formula.
        name: a word that is the page's own for this figure; prefix of the ids in the element.
        title, description: what the figure shows, for those who do not see it.

    Returns:
        An element `svg` whose texts are escaped.
    """
    data = io.BytesIO()
    with _settings():
        draw().savefig(data, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(data.getvalue())
    _simplify(root, name)
    size = [float(number) for number in root.attrib["viewBox"].split()[2:]]
    head = {"viewBox": f"0 0 {size[0]:g} {size[1]:g}", "role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    root.attrib.clear()
    root.attrib |= {**head, "style": f"--natural: {size[0] * 4 / 3:.0f}px"}
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = printable(text)
        root.insert(place, element)
    return ElementTree.tostring(root, encoding="unicode")


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """The settings of matplotlib while a figure is drawn and written; the page's fonts are others than those that it measures with."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _simplify(root: ElementTree.Element, name: str) -> None:
    """Removes what a page does not need, shortens numbers, and makes ids and colours those of the page."""
    for element in root.iter():
        element.tag = _NAMESPACE.sub("", element.tag)
        element.text, element.tail = (None if text is None or not text.strip() else text for text in (element.text, element.tail))
        for child in [child for child in element if _NAMESPACE.sub("", child.tag) in _DROPPED]:
            element.remove(child)
    used = {match for element in root.iter() for value in element.attrib.values() for match in _referred(value)}
    for element in root.iter():
        values = {_NAMESPACE.sub("", key): value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in values.items():
            if key == "id":
                value = f"{name}-{value}" if value in used else ""
            elif key == "href":
                value = f"#{name}-{value[1:]}"
            elif key == "clip-path":
                value = _REFERENCE.sub(lambda match: f"url(#{name}-{match[1]})", value)
            elif key == "style":
                value = _style(value)
            elif key == "transform" and value.startswith("rotate(-0 "):
                value = ""
            elif key in ("d", "x", "y", "width", "height", "transform"):
                value = _NUMBER.sub(lambda match: f"{float(match[0]):.1f}", " ".join(value.split()))
            if value:
                element.set(key, value)
    _drop_empty(root)


def _referred(value: str) -> Iterator[str]:
    """Ids that an attribute refers to."""
    if value.startswith("#"):
        yield value[1:]
    yield from _REFERENCE.findall(value)


def _style(text: str) -> str:
    text = _FONT.sub(lambda match: f"font-size: {match['size']}", _FONT_FAMILY.sub("", text))
    text = _COLOUR.sub(lambda match: f"var(--c-{match[0][1:]}, {match[0]})", text)
    return text.strip("; ")


def _drop_empty(element: ElementTree.Element) -> None:
    """Replaces groups without attributes by their content."""
    children: list[ElementTree.Element] = []
    for child in list(element):
        _drop_empty(child)
        children += list(child) if child.tag == "g" and not child.attrib else [child]
    element[:] = children
