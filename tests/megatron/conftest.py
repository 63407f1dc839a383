"""Start real torchrun ranks for tests: a script of tests/megatron/ranks runs on N ranks, and each rank returns one JSON value."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Launch = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """launch("script", ranks, *arguments) -> the value that each rank wrote to its result file."""

    def run(script: str, ranks: int, *arguments: str, timeout_s: float = 270) -> list[Any]:
        out = tmp_path_factory.mktemp(script)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(Path(__file__).parent / "ranks" / f"{script}.py"), *arguments]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "KIT_OUT": str(out)}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment |= {"CUDA_VISIBLE_DEVICES": ""}  # these ranks use gloo only
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # not kill(): torchrun ends its ranks on SIGTERM, but leaves them behind on SIGKILL
            text, _ = process.communicate(timeout=60)
            pytest.fail(f"{script} on {ranks} ranks ran past {timeout_s} s:\n{text[-4000:]}")
        assert process.returncode == 0, text[-6000:]
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return run
