"""The magics in a real kernel: the messages that JupyterLab would receive."""

from __future__ import annotations

import os
import queue
import time

import pytest
from jupyter_client.manager import start_new_kernel


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    env = {**os.environ, "KIT_RUNS": str(tmp_path_factory.mktemp("runs"))}
    manager, client = start_new_kernel(kernel_name="python3", env=env)
    client.manager = manager
    yield client
    client.execute("%ranks stop")
    client.get_shell_msg(timeout=30)
    client.stop_channels()
    manager.shutdown_kernel()


def execute(client, code, on_stream=str):
    """Run a cell; return the reply, the streamed text and the other outputs in order."""
    ident = client.execute(code)
    streamed, outputs = "", []
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != ident:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            break
        if kind == "stream":
            streamed += content["text"]
            on_stream(content["text"])
        elif kind not in {"status", "execute_input"}:
            outputs.append((kind, content))
    while True:
        try:
            reply = client.get_shell_msg(timeout=60)
        except queue.Empty:
            raise AssertionError("no reply") from None
        if reply["parent_header"].get("msg_id") == ident:
            return reply["content"], streamed, outputs


def test_an_afternoon_in_a_kernel(client):
    assert execute(client, "%load_ext kit")[0]["status"] == "ok"

    reply, streamed, outputs = execute(client, "%%ranks\nprint('here')\nrank // 2")
    assert reply["status"] == "ok"
    assert "started a World of 2 ranks" in streamed
    assert "[0] here" in streamed
    assert "[1] here" in streamed
    assert outputs[-1][1]["data"]["text/plain"] == "[0-1] 0"

    reply, _, outputs = execute(client, "%%ranks\nraise ValueError('on purpose')")
    assert reply["status"] == "error"
    assert reply["ename"] == "RankError"
    shown = "\n".join(outputs[-1][1]["traceback"])
    assert outputs[-1][0] == "error"
    assert shown.count("Traceback") == 1
    assert "kit/world" not in shown

    _, _, outputs = execute(client, "%ranks status")
    assert "<b>World of 2 ranks, idle</b>" in outputs[-1][1]["data"]["text/html"]


def test_output_streams_while_the_cell_runs(client):
    execute(client, "%load_ext kit")
    came = []
    code = "%%ranks 0\nimport time\nprint('first', flush=True)\ntime.sleep(1.0)\nprint('last')"
    execute(client, code, on_stream=lambda text: came.append((time.monotonic(), text)))
    moments = {word: at for at, text in came for word in ("first", "last") if word in text}
    assert moments["first"] < moments["last"]
    assert len({text for _, text in came}) > 1


@pytest.mark.slow
def test_a_bar_after_two_seconds_is_one_display(client):
    execute(client, "%load_ext kit")
    _, _, outputs = execute(client, "%%ranks\nimport time\ntime.sleep(2.6 + rank / 2)")
    kinds = [kind for kind, _ in outputs]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data"}
    idents = {content["transient"]["display_id"] for _, content in outputs}
    assert len(idents) == 1
    assert "waiting for: 0-1" in outputs[0][1]["data"]["text/plain"]
    assert any("answered: 0 · waiting for: 1" in content["data"]["text/plain"] for _, content in outputs)


SLOW = "print('begun', flush=True)\nimport time\nfor _ in range(600): time.sleep(0.1)"


def interrupted(client, code):
    """Run a cell, interrupt it once it has begun, and return the lines that it ends with."""
    pressed = []

    def press(text):
        if "begun" in text and not pressed:
            pressed.append(text)
            client.manager.interrupt_kernel()

    reply, _, outputs = execute(client, code, on_stream=press)
    assert reply["status"] == "error"
    return outputs[-1][1]["traceback"]


def test_an_interrupted_call_shows_its_line_and_no_frames_of_the_kit(client):
    execute(client, "%load_ext kit")
    execute(client, "%%ranks\nrank")
    lines = interrupted(client, f"slow = {SLOW!r}\nworld.run(slow)")
    assert lines[0] == "line 2 of the cell: world.run(slow)"
    assert "KeyboardInterrupt" in lines[1]
    assert len(lines) == 2
    lines = interrupted(client, SLOW)  # without the kit: as ever
    assert "Traceback" in "\n".join(lines)


def test_an_interrupt_gives_the_prompt_back(client):
    execute(client, "%load_ext kit")
    shown = "\n".join(interrupted(client, f"%%ranks\n{SLOW}"))
    assert "KeyboardInterrupt" in shown
    assert "are usable" in shown
    assert "kit/world" not in shown
    _, _, outputs = execute(client, "%%ranks\n7")
    assert outputs[-1][1]["data"]["text/plain"] == "[0-1] 7"


def test_a_stop_button_ends_run_all(client):
    """JupyterLab stops at a reply with an error status, so a wrong option must cause one too."""
    execute(client, "%load_ext kit")
    reply, streamed, _ = execute(client, "%%ranks --bogus\n1")
    assert reply["status"] == "error"
    assert "usage: %%ranks" in streamed
