"""Running a cell again replaces its panel: the old panel's ranks end; panels of other cells stay."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from jupyter_client import KernelManager

from tests.holdings import holdings, wait_for, waits_for_a_world


@pytest.mark.slow
def test_a_cell_that_is_run_again_ends_the_ranks_of_its_former_panel(tmp_path: Path) -> None:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KIT_RUNS": str(tmp_path)})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)

        def do(code: str, cell: str) -> None:
            """Run a cell as JupyterLab does, with the cell's id in the request."""
            content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
            message = client.session.msg("execute_request", content, metadata={"cellId": cell})
            client.shell_channel.send(message)
            while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != message["msg_id"]:
                pass
            assert reply["content"]["status"] == "ok", reply["content"]

        make = "panels = [kit.panel('smoke', cycles=1, ranks=1) for _ in range(2)]"
        do("import kit", "one")
        do(make, "two")
        do("panels[0].controller.start(); panels[0].controller.wait(); first = panels[0]", "three")
        do("assert first.model.state == 'ready'", "three")  # a cell's second panel and other cells end none
        do("other = kit.panel('smoke')", "four")
        pid = manager.provisioner.pid

        def ranks() -> list[int]:
            return [process for process in holdings(pid)["processes"] if not waits_for_a_world(process)]

        assert ranks()
        do(make, "two")
        assert wait_for(lambda: ranks() == [])
        do("assert 'closed' in (first.controller.step() or first.model.remark)", "five")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
