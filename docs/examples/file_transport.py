"""Weights through files in a temporary folder, with a header before the bytes as in safetensors.
kit run sync --set transport=docs.examples.file_transport:Files"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from kit.sync.transports import Transport


class Files(Transport):
    """The sender writes one file per bucket and removes the folder at the end; receivers read the files."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.folder = tempfile.mkdtemp(prefix="weights-") if ctx.role == "sender" else ""

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        path = Path(self.folder) / f"bucket-{index}"
        self.write(path, buffer)
        self.say({"kind": "file", "path": str(path)})

    def write(self, path: Path, buffer: torch.Tensor) -> None:
        header = json.dumps({"bytes": len(buffer)}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + buffer.numpy().tobytes())

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the sender names the file
        message, _ = self.ctx.sender.expect("file")
        with Path(message["path"]).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            self.read(file, header["bytes"], into)
        return into

    def read(self, file: Any, size: int, into: torch.Tensor) -> None:
        if file.readinto(into.numpy()) != size:
            raise EOFError(f"{file.name} ends before its {size} bytes")

    def close(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder)
        self.folder = ""


# -- with one bug each ---------------------------------------------------------------------------------------------------


class FilesThatStay(Files):
    """Leaves the last file of every sync in the temporary folder."""

    def close(self) -> None:
        for path in sorted(Path(self.folder).iterdir())[:-1] if self.folder else []:
            path.unlink()


class FilesThatStayAfterAFailure(Files):
    """Cleans up in flush(), which a failed sync never reaches."""

    def flush(self) -> None:
        super().flush()
        super().close()

    def close(self) -> None: ...


class FilesAnnouncedTooEarly(Files):
    """Announces a file before its bytes are written: receivers read the zeros of a preallocated file."""

    def write(self, path: Path, buffer: torch.Tensor) -> None:
        super().write(path, torch.zeros_like(buffer) if self.ctx.sizes[-1] == len(buffer) else buffer)


class FilesThatStayOpen(Files):
    """Receivers leave the files that they read open."""

    opened: list[Any] = []  # noqa: RUF012 - as real code often has it

    def read(self, file: Any, size: int, into: torch.Tensor) -> None:
        super().read(file, size, into)
        self.opened.append(os.dup(file.fileno()))
