"""Which weights gave each token? Every token's log-probability is computed again under the weights of every version.

The oracle is a plain model loaded by tensor names, one full forward a sample without a cache, in float64: other code than what generated,
trained or sent anything. A token is *decidable* if no other version comes within `APART` noises of its stamped version; the noise is that
of float32 arithmetic, measured with the oracle's own model. Limits: the whole model on one rank, once for each version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kit.train.plain import from_weights
from kit.train.rollout import END

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kit.labs.stream.ranks.rows import Row
    from kit.megatron.config import Geometry

APART = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One sample. A list has one entry for each token of its answer.

    `error` is the recorded log-probability against the stamped version's, `nearest` against the closest version's, `closest` is that
    version. `wrong_gap` is how far the stamped version is from the closest other one.
    """

    row: Row
    error: list[float]
    nearest: list[float]
    closest: list[int]
    wrong_gap: list[float]

    def decidable(self, noise: float) -> list[bool]:
        return [gap >= APART * noise for gap in self.wrong_gap]

    def wrong_stamps(self, noise: float) -> int:
        """Decidable tokens whose stamp is not the version that gives their log-probability."""
        found = zip(self.decidable(noise), self.closest, self.row.versions, strict=True)
        return sum(decidable and closest != stamp for decidable, closest, stamp in found)


class Oracle:
    """The models of all versions. `temperature` is that of sampling."""

    def __init__(
        self, geometry: Geometry, weights: Mapping[int, Mapping[str, torch.Tensor]], temperature: float
    ) -> None:
        self.temperature = temperature
        self.versions = sorted(weights)
        self.models = {
            version: from_weights(geometry, weights[version], dtype=torch.float64) for version in self.versions
        }

    def judge(self, rows: Sequence[Row]) -> list[Judged]:
        return [self._judge(row) for row in rows]

    def noise(self, rows: Sequence[Row]) -> float:
        """The largest difference that float32 arithmetic makes, over these samples and all versions."""
        worst = 0.0
        for version, model in self.models.items():
            single = from_weights(model.geometry, dict(model.named_parameters()), dtype=torch.float32)
            for row in rows:
                worst = max(
                    worst, float((answer_logprobs(single, row, self.temperature) - self.of(version, row)).abs().max())
                )
        return worst

    def of(self, version: int, row: Row) -> torch.Tensor:
        """The log-probabilities of a sample's answer under a version, as it was sampled."""
        return answer_logprobs(self.models[version], row, self.temperature)

    def _judge(self, row: Row) -> Judged:
        recorded = torch.tensor(row.logprobs, dtype=torch.float64)
        table = torch.stack([self.of(version, row) for version in self.versions])  # [versions, tokens]
        unknown = [stamp for stamp in row.versions if stamp not in self.models]
        places = torch.tensor([self.versions.index(stamp) if stamp in self.models else 0 for stamp in row.versions])
        stamped = table.gather(0, places[None])[0]
        errors = (table - recorded).abs()
        gaps = (table - stamped).abs().scatter(0, places[None], torch.inf)
        error = torch.full_like(recorded, torch.inf) if unknown else (stamped - recorded).abs()
        return Judged(
            row=row,
            error=error.tolist(),
            nearest=errors.min(0).values.tolist(),
            closest=[self.versions[place] for place in errors.argmin(0).tolist()],
            wrong_gap=gaps.min(0).values.tolist(),
        )


@torch.no_grad()
def answer_logprobs(model: torch.nn.Module, row: Row, temperature: float) -> torch.Tensor:
    """float64, one for each token of the answer: END is impossible before the minimum, and logits are divided by the temperature."""
    ids = torch.tensor(row.tokens)[None]
    begin = len(row.prompt)
    logits = model(ids)[0, begin - 1 : -1].double() / temperature
    logits[: max(0, row.minimum - 1), END] = -torch.inf
    found: torch.Tensor = logits.log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]
    return found
