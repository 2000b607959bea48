"""The table of the data sets that have a name."""

import importlib

from vitlab.data.dataset_table import DATASETS


def test_the_table_is_complete() -> None:
    for name, info in DATASETS.items():
        assert info.source
        assert info.license
        assert (":" in name) == (info.num_classes is None) == (not info.reader)
        module, _, function = info.reader.partition(":")
        assert not info.reader or callable(getattr(importlib.import_module(f"vitlab.data.{module}"), function))
        assert info.splits or name in ("folder:PATH", "csv:PATH", "shards:PATH", "hub:OWNER/NAME")
    sizes = {name: info.num_classes for name, info in DATASETS.items()}
    assert sizes["digits"] == sizes["svhn"] == 10
    assert (sizes["cifar100"], sizes["flowers102"], sizes["pets"], sizes["sun397"]) == (100, 102, 37, 397)
