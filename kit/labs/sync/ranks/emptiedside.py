"""The engine's side of vLLM with the fault `buffer-not-sent`: a script, as `kit.engines.vllmside` is."""

import importlib.util
from pathlib import Path
from typing import Any

RIGHT = Path(__file__).parents[3] / "engines" / "vllmside.py"
spec: Any = importlib.util.spec_from_file_location("vllmside", RIGHT)
side: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(side)


class EmptiedEngine(side.Engine):  # type: ignore[misc]
    def finish(self) -> None:
        super().finish()
        for name, table in self.constants():
            if "rotary" in name:
                table.zero_()


if __name__ == "__main__":
    side.main(EmptiedEngine)
