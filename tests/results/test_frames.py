from __future__ import annotations

import pytest

from kit.results import to_frame, with_ids


@pytest.fixture
def frame(record):
    return to_frame(
        [
            record(value=1, ids={"tensor": "a", "step": 1}),
            record(value=2, ids={"step": 2, "tensor": "b"}),
            record(value=3, ids={"step": 2}),
            record(value=4, ids={"tensor": "a", "step": 1, "more": 0}),
            record(value=5),
        ]
    )


def test_ids_in_a_table_are_the_same_text_for_the_same_ids(record):
    one, other = ({"b": 1, "a": "ü"}, {"a": "ü", "b": 1})
    assert to_frame([record(ids=one), record(ids=other), record()])["ids"].tolist() == ['{"a":"ü","b":1}'] * 2 + [""]


def test_the_rows_that_have_all_ids_with_a_column_for_each(frame):
    found = with_ids(frame, "tensor", "step")
    assert found[["value", "tensor", "step"]].values.tolist() == [[1, "a", 1], [2, "b", 2], [4, "a", 1]]
    assert found["step"].dtype.kind == "i"
    assert list(found.index) == [0, 1, 3]
    assert with_ids(frame, "step")["step"].tolist() == [1, 2, 2, 1]


def test_no_row_has_them(frame, record):
    assert with_ids(frame, "tensor", "group").empty
    assert "group" in with_ids(to_frame([]), "group")
    assert "group" in with_ids(to_frame([record()]), "group")


def test_an_id_with_the_name_of_a_column_is_refused(frame):
    with pytest.raises(ValueError, match="has a column 'rank' already"):
        with_ids(frame, "rank")
