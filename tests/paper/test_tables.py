"""The paper's tables, and what the code counts beside them."""

import pytest

from vitlab.paper import tables
from vitlab.paper.figures import Request
from vitlab.paper.show import show
from vitlab.paper.tables import HERE, PAPER_TABLES


def test_tables_count_what_the_paper_prints() -> None:
    """Millions of parameters, exaFLOPs and core-days that the code counts, beside the printed ones."""
    for row in tables.table1():
        printed, counts = int(row["parameters"].rstrip("M")), row[f"{HERE}parameters"]
        here = [float(count.split(": ")[1].rstrip("M")) for count in counts.split(", ")]
        assert min(abs(count - printed) for count in here) < 1
    ratios = [row[f"{HERE}exaFLOPs"] / row["exaFLOPs"] for row in tables.table6()]
    assert sorted(ratios)[1:] == pytest.approx([1] * 17, abs=0.08)
    days = [(row["TPUv3-core-days"], row[f"{HERE}TPUv3-core-days"]) for row in tables.table2()]
    assert [here for _, here in days][3:] == ["", ""]
    assert all(abs(float(a[:-1]) / float(b[:-1]) - 1) < 0.25 for a, b in days[:3])


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_a_table_is_shown(name: str) -> None:
    text = show(name, Request()).as_text()
    rows = PAPER_TABLES[name]()
    assert all(str(value) in text for value in rows[0].values() if not isinstance(value, int))
