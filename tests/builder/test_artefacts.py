"""The cache of built operators: built once, loaded ever after, never a reason to fail."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from ops import host
from oracle import assert_equal, exact_tensors, oracle

from im2win.builder import cache as artefacts
from im2win.builder.cache import Artefacts, artefact_name, conv_of
from im2win.common.files import default_folder, not_ours
from im2win.device.gpu import KNOWN
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile, ranked_tiles
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d

CONV = Conv2d.parse("n1-c5x7x9-k8x3x3-p1.0.2.1-bias")


def test_built_once(tmp_path: Path) -> None:
    machine, (algorithm, tile) = host(), default_tile(CONV, "direct/tiled", host())
    first, second = Artefacts(tmp_path / "new"), Artefacts(tmp_path / "new")
    name, _ = first.get(CONV, algorithm, tile, machine)
    again, op = second.get(CONV, algorithm, tile, machine)
    assert (first.built, second.built, again) == (1, 0, name)
    found = second.find(name)
    assert found is not None and found.conv == CONV and second.find(f"{CONV}.direct.0") is None
    tensors = exact_tensors(CONV)
    assert_equal(CONV, op(tensors["data"], tensors["filter"], tensors["bias"]), oracle(CONV, **tensors))


@pytest.mark.fault("libraries", "a cached library is broken")
def test_a_broken_library_is_built_again(tmp_path: Path) -> None:
    machine, (algorithm, tile) = host(), default_tile(CONV, "direct/tiled", host())
    name, _ = Artefacts(tmp_path).get(CONV, algorithm, tile, machine)
    (library,) = tmp_path.glob("*/*.so")
    for path, content in ((library, b"torn"), (library.with_name(library.name + ".json"), b"{")):
        path.write_bytes(content)
        fresh = Artefacts(tmp_path)
        assert fresh.find(name) is None
        fresh.get(CONV, algorithm, tile, machine)
        assert fresh.built == 1 and fresh.find(name) is not None


@pytest.mark.fault("disks and folders", "the cache cannot be written")
def test_a_folder_that_cannot_be_written_costs_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache, (algorithm, tile) = Artefacts(tmp_path / "file"), default_tile(CONV, "direct/tiled", host())
    with caplog.at_level(logging.WARNING, "im2win"):
        _, op = cache.get(CONV, algorithm, tile, host())
    assert op.conv == CONV and cache.built == 1 and "the next process builds again" in caplog.text


@pytest.mark.fault("disks and folders", "the cache belongs to someone else")
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files to another user")
def test_operators_of_another_user_are_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine, (algorithm, tile) = host(), default_tile(CONV, "direct/tiled", host())
    name, _ = Artefacts(tmp_path).get(CONV, algorithm, tile, machine)
    (library,) = tmp_path.glob("*/*.so")
    folder = library.parent

    def refused(words: str) -> None:
        with caplog.at_level(logging.WARNING, "im2win"):
            assert Artefacts(tmp_path).find(name) is None
        assert words in caplog.text and "set IM2WIN_CACHE to a folder of your own" in caplog.text
        os.chown(library, 0, -1)
        library.chmod(0o644)
        folder.chmod(0o755)
        assert Artefacts(tmp_path).find(name) is not None

    os.chown(library, 12345, -1)
    refused("belongs to another user (12345)")
    library.chmod(0o666)
    refused(f"every user can write {library}")
    folder.chmod(0o777)
    refused(f"every user can write {folder}")
    assert not_ours(folder / "removed.so") == f"{folder / 'removed.so'} cannot be examined (No such file or directory)"


def test_names_say_what_was_built() -> None:
    """The problem can be read back; another tile, algorithm or device has another name."""
    row, (h200, h100) = schedule_of("direct/tiled"), KNOWN.values()
    tiles = [tile.as_dict() for _, tile in ranked_tiles(CONV, row, host())[:2]]
    of_gpus = [tile.as_dict() for _, tile in backend_for(h200).ranked(CONV, row)[:2]]
    names = {artefact_name(CONV, "direct/tiled", tile, host()) for tile in tiles}
    names |= {artefact_name(CONV, "direct/tiled", tile, device) for tile in of_gpus for device in (h200, h100)}
    names.add(artefact_name(CONV, "im2win/stored", tiles[0], host()))
    assert len(names) == 7 and {conv_of(name) for name in names} == {CONV}


def test_the_models_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a problem of one algorithm, so that ranking takes a moment."""
    conv = Conv2d.parse("n1-c4x5x5-k4x1x1")
    first = Artefacts(tmp_path).default_choice(conv, host())
    monkeypatch.setattr("im2win.registry.ranking.default_tile", None)
    assert Artefacts(tmp_path).default_choice(conv, host()) == first
    (path,) = tmp_path.glob("*/defaults/*.json")
    monkeypatch.setattr("im2win.registry.ranking.default_tile", lambda *_: first)
    for text in ("", "[]", '{"algorithm": "none", "tile": {}}', '{"algorithm": "direct/tiled", "tile": {"rows": 1}}'):
        path.write_text(text)
        assert Artefacts(tmp_path).default_choice(conv, host()) == first
        assert path.read_text() != text
    monkeypatch.setattr(artefacts, "_package", lambda: "another")
    Artefacts(tmp_path).default_choice(conv, host())
    assert len(list(tmp_path.glob("*/defaults/*.json"))) == 2


def test_where_artefacts_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path))
    assert default_folder() == tmp_path == Artefacts().folder
    monkeypatch.delenv("IM2WIN_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    for platform, variables, folder in (
        ("linux", {}, "/home/me/.cache/im2win"),
        ("linux", {"XDG_CACHE_HOME": "/caches"}, "/caches/im2win"),
        ("darwin", {}, "/home/me/Library/Caches/im2win"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/im2win"),
    ):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("sys.platform", platform)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert default_folder() == Path(folder)
