"""The README's pictures come from a real run."""

from __future__ import annotations

import pytest

from docs.pictures import gallery


@pytest.mark.slow
def test_pictures_are_made(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    made = gallery.make(tmp_path / "images", ["smoke"])
    assert [path.name for path in made] == ["smoke.png", "smoke-dark.png"]
    for path in made:
        assert 10_000 < path.stat().st_size < 200_000
    assert not list((tmp_path / "runs").glob("smoke*"))
