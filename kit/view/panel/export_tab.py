"""The table of the run as a file, with its provenance, and the run as a trace for Perfetto."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.errors import KitError
from kit.results import write_trace
from kit.view.panel import look
from kit.view.panel.look import Tab

if TYPE_CHECKING:
    from kit.view.panel.model import PanelModel

KINDS = {
    "CSV, provenance beside it": ".csv",
    "Parquet": ".parquet",
    "Markdown": ".md",
    "LaTeX": ".tex",
    "HTML": ".html",
    "JSON": ".json",
    "Trace for Perfetto": ".trace.json",
}
MIME = {
    ".csv": "text/csv",
    ".md": "text/markdown",
    ".tex": "text/x-tex",
    ".html": "text/html",
    ".json": "application/json",
}
LINKED = 4 * 2**20  # bytes: a larger file is for scp, not for a page


class ExportTab(Tab):
    """Writes into the run's folder, or where a person says; a small file can be taken from the page as well."""

    def __init__(self, model: PanelModel) -> None:
        super().__init__()
        self.model = model
        self.kind = widgets.Dropdown(
            description="Format", options=KINDS, tooltip="what kind of file", layout={"width": "24em"}
        )
        self.name = widgets.Text(description="File", tooltip="the file's name", layout={"width": "30em"})
        self.folder = widgets.Text(
            description="Folder", tooltip="where it is written; ~ is your home", layout={"width": "100%"}
        )
        self.go = widgets.Button(
            description="Export",
            icon="download",
            button_style="primary",
            tooltip="write the file",
            layout={"width": "auto"},
        )
        self.link = widgets.HTML()
        self.widget = widgets.VBox(
            [look.box(self.kind, self.name), self.folder, look.box(self.go), self.said, self.link]
        )
        self.kind.observe(self._rename, "value")
        self.go.on_click(lambda _: self.export())
        model.observe(self._another, "run")
        self._another()

    def _another(self, _: Any = None) -> None:
        run = self.model.run
        self.go.disabled = run is None
        if run is None:
            self._say("There is no run yet.")
            return
        self.folder.value = str(run.dir)
        self.name.value = run.dir.name + self.kind.value
        self.link.value = ""
        self._say("")

    def _rename(self, change: Any) -> None:
        """Another ending for the name that is there."""
        self.name.value = self.name.value.removesuffix(change["old"]) + change["new"]

    def export(self) -> Path | None:
        """Write the file; where that is, or None where it could not be."""
        run, kind = self.model.run, self.kind.value
        self.link.value = ""
        if run is None:
            return None
        name = self.name.value.strip()
        if not name or Path(name).name != name:
            self._say(f"the file's name must be one name without a folder, not {name!r}", bad=True)
            return None
        target = Path(self.folder.value).expanduser() / (name if name.endswith(kind) else name + kind)
        try:
            path = write_trace(run, target) if kind == ".trace.json" else run.save(target)
        except (KitError, OSError) as error:
            self._say(str(error), bad=True)
            return None
        beside = f", its provenance in {path.name}.provenance.json beside it" if kind == ".csv" else ""
        self._say(f"written: {path}{beside}")
        self.link.value = linked(path)
        return path

    def _changed(self, _: Any = None) -> None:
        """Nothing here is slow: it is always up to date."""


def linked(path: Path) -> str:
    """A link that has the file in itself, for a browser that is not on this machine; none for a large file."""
    if path.stat().st_size > LINKED:
        return look.span(
            "faint",
            f"{path.stat().st_size / 2**20:.0f} MiB is too large for a download link; copy the file from its folder",
        )
    data = base64.b64encode(path.read_bytes()).decode()
    kind = MIME.get(path.suffix, "application/octet-stream")
    name = look.text(path.name)
    return (
        f'<a style="text-decoration:underline" download="{name}" href="data:{kind};base64,{data}">Download {name}</a>'
    )
