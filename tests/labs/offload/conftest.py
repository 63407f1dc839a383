"""Real runs of the offload lab, each made once for all tests of a module; the ranks can import the tests' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kit
from kit.results import Verdict
from tests.holdings import nothing_added

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"cycles": 1, "steps": 1, "layers": 2, "seq": 8, "microbatches": 1}
OWN = '''
import torch
from kit.labs.offload.ranks.releaser import KitReleaser

class Whole:
    """release and restore of everything, by the kit's means."""
    def __init__(self, ctx):
        self.kit = KitReleaser(ctx)
        assert ctx.chunks and ctx.optimizer and ctx.scheduler and ctx.groups and ctx.config.tp and ctx.device.type
    def release(self):
        return self.kit.release()
    def restore(self, state):
        return self.kit.restore(state)

class Moves:
    """The calls of the documented mover, and nothing else."""
    def __init__(self, ctx):
        self.mover = ctx.mover
    def release(self):
        self.mover.release()
    def restore(self, state):
        self.mover.restore()

class StartsAThreadOnce(Moves):
    """Right: a pool and a file that the first reload makes and every later one uses."""
    pool = None
    def restore(self, state):
        import tempfile
        from concurrent.futures import ThreadPoolExecutor
        if self.pool is None:
            self.pool, self.file = ThreadPoolExecutor(1), tempfile.TemporaryFile()
        self.pool.submit(int).result()
        super().restore(state)

class StartsAThreadEachTime(StartsAThreadOnce):
    def restore(self, state):
        super().restore(state)
        self.kept = [*getattr(self, "kept", []), (self.pool, self.file)]
        self.pool = None

class LeavesSettings(Moves):
    def restore(self, state):
        import torch
        super().restore(state)
        torch.backends.cudnn.benchmark = True

class Retries(Whole):
    """Right: promises that a failed reload can be tried again, as the kit's can."""
    retries = True

class Recovers(Retries):
    """Right: a release that fails can be tried again too."""
    def release(self):
        try:
            return super().release()
        except Exception:
            self.kit.restore_tensors()
            self.failed()
            raise
    def failed(self): ...

class LeaksWhenRefused(Recovers):
    """A release that fails leaves a descriptor open."""
    def failed(self):
        vars(self).setdefault("leaked", []).append(open("/dev/null"))

class RetriesAlone(Moves):
    """Promises it, but the other ranks know nothing of the one that failed."""
    retries = True

class Nothing:
    def __init__(self, ctx): ...
    def release(self): ...
    def restore(self, state): ...

class Raises(Nothing):
    def release(self):
        raise LookupError("my own release failed")

class Empty:
    def __init__(self, ctx): ...

class Plain:
    """A torch module and optimizer; Megatron has no part in it."""
    def __init__(self, ctx):
        torch.manual_seed(ctx.rank)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.chunks = [self.net]
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.done = 0
    def step(self, n):
        return [self.one() for _ in range(n)]
    def one(self):
        self.done += 1
        self.optimizer.zero_grad()
        loss = self.net(torch.full((4, 64), 1.0 / self.done)).square().sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm.item()}

class QuasiNewton(Plain):
    """Its optimizer's state has lists of tensors."""
    def __init__(self, ctx):
        super().__init__(ctx)
        self.optimizer = torch.optim.LBFGS(self.net.parameters(), max_iter=2)
    def one(self):
        self.done += 1
        return {"loss": float(self.optimizer.step(self.loss)), "grad_norm": 0.0}
    def loss(self):
        self.optimizer.zero_grad()
        loss = self.net(torch.full((4, 64), 1.0 / self.done)).square().sum()
        loss.backward()
        return loss
'''


@pytest.fixture(scope="module", autouse=True)
def _places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in a folder of the module, where ranks can import `mine` and the docs' examples; nothing may be left behind."""
    folder = tmp_path_factory.mktemp("offload")
    (folder / "mine.py").write_text(OWN)
    for name in ("moved.py", "referred.py"):
        (folder / name).write_text(Path(__file__).with_name(name).read_text())
    for example in ("own_pair.py", "own_wrapper.py"):
        (folder / example).write_text((ROOT / "docs" / "examples" / example).read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        with nothing_added():
            yield


@pytest.fixture(scope="module")
def offload() -> Callable[..., kit.Run]:
    """offload(**config) returns a finished small run, the same one for equal arguments."""
    made: dict[str, kit.Run] = {}

    def run(fault: str | None = None, **config: object) -> kit.Run:
        key = repr((fault, sorted(config.items())))
        if key not in made:
            made[key] = kit.run("offload", fault=fault, **{**SMALL, **config})
        return made[key]

    return run


def unanswered(verdict: Verdict) -> set[str]:
    return {row.check for row in verdict if row.passed is None}
