"""The measures that the rules of several labs share."""

from __future__ import annotations

import pandas as pd
import pytest

from kit.results.growth import worst


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_equal_values_the_lowest_rank_is_named_whoever_wrote_first(order: tuple[int, int]) -> None:
    rows = pd.DataFrame(
        [
            {"metric": "wrong_values", "value": 1.0, "rank": rank, "cycle": cycle, "phase": "talk"}
            for cycle in (2, 1)
            for rank in order
        ]
    )
    assert worst(rows).why == "wrong_values: 1 after talk (rank 0, cycle 1)"
