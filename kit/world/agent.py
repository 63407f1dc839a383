"""Start of the process on each node that runs torchrun: `python -m kit.world.agent`, or by path where the kit is not installed.

torchrun runs this file too, as each rank: a fork of that process, in which torch and the kit are loaded already. With `--wait` it is the
start of the process that forks agents: see kit.world.warmside.

The ranks' environment need not have the kit: run by path, this file makes the package `kit` importable from where it lies and
nothing else beside it, so that no library of the notebook's environment reaches the ranks.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

RANK = "kit.world.rankside"


def make_kit_importable() -> None:
    """Bind the name `kit` to this very folder, without putting any folder on `sys.path`."""
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location("kit", root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kit"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if RANK in sys.modules:
        sys.modules[RANK].rank_main()
    else:
        if "kit" not in sys.modules:
            sys.path.pop(0)  # run by path: the folder of this file would shadow modules of the same names
            make_kit_importable()
        if sys.argv[1:2] == ["--wait"]:
            from kit.world.warmside import wait_main

            wait_main(sys.argv[2:])
        from kit.world.agentside import agent_main

        agent_main(preload=RANK)
