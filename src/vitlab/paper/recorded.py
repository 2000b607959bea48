"""What was measured here once and is shown again: the studies' results, and the speeds of Fig. 12 and Fig. 13."""

import json
from importlib.resources import files
from typing import Any

from vitlab.panels import Panel, Series

STUDIES = {
    "fig3": "data-size",
    "fig4": "data-size",
    "fig5": "scaling",
    "fig8": "shape",
    "fig9": "head",
    "fig13": "axial",
    "table6": "scaling",
    "table7": "optimizer",
    "table8": "positions",
}
"""Part of the paper -> the study whose recorded results belong to it."""


def read_record(name: str) -> dict[str, Any]:
    """A file of `recorded`: what `vitlab study` wrote to study.json, or the panels of a measurement."""
    return json.loads(files("vitlab.paper").joinpath("recorded", f"{name}.json").read_text("utf-8"))


def read_panels(name: str) -> list[Panel]:
    """The panels of a record's figure."""
    return [
        Panel(**panel | {"series": [Series(**series) for series in panel["series"]]})
        for panel in read_record(name)["panels"]
    ]
