"""The README's pictures come from a real run, and a Run of the public face draws itself."""

from __future__ import annotations

import pytest

import kit
from kit.view import gallery
from kit.view.plots import Picture


@pytest.mark.slow
def test_pictures_are_made(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    made = gallery.make(tmp_path / "images", ["smoke"])
    assert [path.name for path in made] == ["smoke.png", "smoke-dark.png"]
    for path in made:
        assert 10_000 < path.stat().st_size < 200_000
    assert not list((tmp_path / "runs").glob("smoke*"))


def test_a_loaded_run_draws_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    run = kit.run("smoke", ranks=1, cycles=1, device="cpu", fault="leaked-group")
    picture = kit.load(run.dir).plot()
    assert isinstance(picture, Picture)
    assert "fault: leaked-group" in picture.get_suptitle()
    assert any(text.get_text() == "✗ FAIL" for axes in picture.axes for text in axes.texts)
