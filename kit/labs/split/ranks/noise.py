"""How far rounding alone moves the numbers of a step, in the dtype of the run.

The oracle trains a plain model twice, from the same weights on the same rows. The second time the loss is multiplied by `ODD` before the
backward pass and the gradients are divided by it afterwards, as a split step divides by counts that are known only at its end. Exact
arithmetic would not see the difference. A loss that clips has another slope beyond a ratio, and rounding may move a token across it in one
of two steps only; so the slopes are also taken with every log-probability moved by `FAR` times its rounding. No code under test takes part:
the formulas are those of `oracle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kit.labs.split.ranks import oracle
from kit.labs.split.ranks.oracle import Exact, Tensors
from kit.megatron.config import Geometry
from kit.train.plain import PlainModel, from_weights, plain_logprobs
from kit.train.protocol import Batch, cuts, valid

ODD = 3.0  # no power of two, which would not round
FAR = 2.0  # how often the usual rounding of a log-probability is exceeded once in twenty tokens
WHOLE = 1.0  # an error below this is absolute, as in the check of the float64 computation in bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleTraining:
    """What a plain step needs: `exact` has the loss, `settings` are those of the optimizer."""

    geometry: Geometry
    exact: Exact
    settings: Any
    dtype: torch.dtype
    device: torch.device
    batch: int
    micro_batch: int

    def gradients(self, weights: Tensors, rows: Batch, factor: float = 1.0) -> tuple[dict[str, float], Tensors]:
        """Metrics and gradients of a step. Gradients of microbatches are added in float32 or wider, as in training."""
        net = from_weights(self.geometry, weights, dtype=self.dtype, device=self.device)
        wide = torch.promote_types(self.dtype, torch.float32)
        slopes, table = self.slopes(self.logprobs(net, rows), rows)
        total = {name: torch.zeros(param.shape, dtype=wide) for name, param in net.named_parameters()}
        for place, piece in enumerate(cuts(rows, self.micro_batch)):
            net.zero_grad()
            own = plain_logprobs(net, piece["input_ids"].to(self.device))
            first = place * self.micro_batch
            torch.autograd.backward(own, (factor * slopes[first : first + len(own)]).to(own))
            for name, param in net.named_parameters():
                assert param.grad is not None
                total[name] += param.grad.cpu().to(wide) / factor
        return table, total

    @torch.no_grad()
    def logprobs(self, net: PlainModel, rows: Batch) -> torch.Tensor:
        pieces = [piece["input_ids"].to(self.device) for piece in cuts(rows, self.micro_batch)]
        return torch.cat([plain_logprobs(net, ids).cpu() for ids in pieces]).double()

    def slopes(self, logprobs: torch.Tensor, rows: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        value, table = self.exact(logprobs.requires_grad_(), rows)
        return torch.autograd.grad(value, logprobs)[0], table

    def reach(self, weights: Tensors, rows: Batch) -> float:
        """How far rounding of the log-probabilities may change the slopes of the loss."""
        coarse, exact = (
            self.logprobs(from_weights(self.geometry, weights, dtype=dtype, device=self.device), rows)
            for dtype in (self.dtype, torch.float64)
        )
        usual = float((coarse - exact)[valid(rows) > 0].square().mean().sqrt())
        middle, *sides = (self.slopes(exact.detach() + FAR * usual * side, rows)[0] for side in (0, 1, -1))
        return max(oracle.overall({"slopes": side}, {"slopes": middle}) for side in sides)

    def train(self, start: Tensors, batches: Sequence[Batch], factor: float = 1.0) -> Trajectory:
        """Every step of a run. Masters of the weights are float64."""
        tables, gradients, weights, reaches = [], [], start, []
        for rows in batches:
            reaches.append(self.reach(weights, rows) if factor == 1 else 0.0)
            table, slopes = self.gradients(weights, rows, factor)
            gradients.append(slopes)
            done = oracle.expected_steps(self.settings, gradients, self.batch)
            tables.append({**table, "grad_norm": done[-1].norm})
            weights = {
                name: oracle.replay_tensor(self.settings, value, [step[name] for step in gradients], done)
                for name, value in start.items()
            }
        return Trajectory(tables, gradients, {name: value.to(self.dtype) for name, value in weights.items()}, reaches)


@dataclass(frozen=True, slots=True)
class Trajectory:
    tables: list[dict[str, float]]
    gradients: list[Tensors]
    weights: Tensors
    reaches: list[float]


class Noise(NamedTuple):
    """The error of two roundings, and what tokens may add that rounding moves across a ratio at which the loss clips."""

    rounding: float
    reach: float = 0.0


def measure(training: OracleTraining, start: Tensors, batches: Sequence[Batch], *, floor: float) -> dict[str, Noise]:
    """Of gradients and weights, of what later steps compute, and of the first step against float64 (`exact`). Errors of numbers below
    `floor` are absolute."""
    wide = replace(training, dtype=torch.float64, device=torch.device("cpu"))
    plain, scaled = (training.train(start, batches, factor) for factor in (1.0, ODD))
    later = [oracle.overall(a, b) for a, b in zip(scaled.gradients[1:], plain.gradients[1:], strict=True)]
    later += [worst_apart(a, b, floor) for a, b in zip(scaled.tables[1:], plain.tables[1:], strict=True)]
    sure = oracle.certain(plain.gradients[0])
    for gradients in plain.gradients[1:]:
        sure = {name: sure[name] & mask for name, mask in oracle.certain(gradients).items()}
    kept = [{name: torch.where(sure[name], way.weights[name], 0.0) for name in sure} for way in (scaled, plain)]
    exact_table, exact_gradients = wide.gradients(start, batches[0])
    against_exact = max(
        worst_apart(plain.tables[0], exact_table, WHOLE),
        oracle.overall(plain.gradients[0], exact_gradients),
    )
    return {
        "gradients": Noise(oracle.overall(scaled.gradients[0], plain.gradients[0])),
        "weights": Noise(
            oracle.overall(*kept), max(plain.reaches[1:], default=0.0) * oracle.overall(start, plain.weights)
        ),
        "later": Noise(max(later, default=0.0), max(plain.reaches[1:], default=0.0)),
        "exact": Noise(against_exact, plain.reaches[0]),
    }


def worst_apart(a: Mapping[str, float], b: Mapping[str, float], floor: float) -> float:
    return max((oracle.apart(a[name], number, floor) for name, number in b.items()), default=0.0)
