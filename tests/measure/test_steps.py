"""A rank's log gets one line per training step with the step's results."""

import re

from kit.measure.phase import log_steps


def test_a_line_for_each_step(capsys):
    log_steps([{"loss": 5.5, "grad_norm": 0.25}, {"loss": 4.0}], done=4, seconds=0.07, device="cpu", what="control")
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"kit: step 3 \(control\): loss 5\.5, grad norm 0\.25, resident \d+\.\d MiB, 35.0 ms", first), (
        first
    )
    assert re.fullmatch(r"kit: step 4 \(control\): loss 4, resident \d+\.\d MiB, 35.0 ms", second), second


def test_the_result_of_a_split_step_is_named_as_a_loss(capsys):
    log_steps([{"global_loss": 1.25, "lr": 1.0}], done=1, seconds=1.5, device="cpu")
    assert capsys.readouterr().out.startswith("kit: step 1: loss 1.25, resident ")


def test_no_step_is_no_line(capsys):
    log_steps([], done=0, seconds=0.0, device="cpu")
    assert not capsys.readouterr().out
