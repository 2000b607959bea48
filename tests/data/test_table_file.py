"""Lists of labels in the cells of a table; test_table.py has whole tables."""

import pytest

from vitlab.data.table_file import list_in


@pytest.mark.parametrize(
    ("cell", "items"),
    [
        ("['cat', 'big']", ["cat", "big"]),
        ('["cat"]', ["cat"]),
        ("['cat' 'big']", ["cat", "big"]),  # NumPy's
        ("{'cat'}", ["cat"]),
        ("('red car', 'big')", ["red car", "big"]),
        ('["Alzheimer\'s", "x"]', ["Alzheimer's", "x"]),
        ("[1 2]", ["1", "2"]),
        ("[red car, big]", ["red car", " big"]),
        ("[]", [""]),
        ("cat", None),
        ("(unknown)", None),
        (3, None),
    ],
)
def test_lists_written_as_text(cell: object, items: list[str] | None) -> None:
    assert list_in(cell) == items
