"""What a study found, in its folder: report.md, figure.png, figure.svg, and study.json for programs.

Nothing in them comes from the clock, so a study that was killed and started again ends with the same bytes.
"""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitlab.inspect import figures, plots
from vitlab.io import replacing_file
from vitlab.studies.statistics import points
from vitlab.studies.study import Claim, Done, Report, Scale, Study
from vitlab.train.workdir import write_json

COVERED = {2: "50 %", 3: "75 %"}
"""How often the bootstrap interval of so few seeds, from the smallest to the largest, holds the middle difference."""


def write_report(study: Study, scale: Scale, done: Sequence[Done], out: Path) -> dict[str, Any]:
    """Makes the report of finished points and leaves it in the folder `out`; returns what study.json holds.

    study.json is written last. Figures that are not finite are null in it, as are the bounds of a single seed.
    """
    report = study.report(done)
    drawn = plots.panels(report.panels)
    result = _result(study, scale, done, report)
    files = {
        "figure.png": figures.png(drawn),
        "figure.svg": figures.svg(drawn),
        "report.md": as_markdown(result).encode(),
    }
    for name, data in files.items():
        with replacing_file(out / name) as file:
            file.write(data)
    write_json(out / "study.json", result)
    return json.loads((out / "study.json").read_bytes())


def _result(study: Study, scale: Scale, done: Sequence[Done], report: Report) -> dict[str, Any]:
    for row in report.rows:
        assert len(row) == len(report.columns), f"a row of {len(row)} cells under {len(report.columns)} columns"
    return {
        "study": study.name,
        "source": study.source,
        "about": study.about,
        "scale": scale,
        "lead": report.lead,
        "table": {"columns": report.columns, "rows": report.rows},
        "claims": list(map(_claim, report.claims)),
        "panels": list(map(asdict, report.panels)),
        "points": [
            {
                "name": each.point.name,
                "seed": each.seed,
                "labels": dict(each.point.labels),
                "start": each.point.start,
                "examples": each.examples,
                "figures": dict(each.figures),
                "exaflops": each.exaflops,
            }
            for each in done
        ],
        "exaflops": sum(each.exaflops for each in done),
    }


def _claim(claim: Claim) -> dict[str, Any]:
    return {
        "claim": claim.text,
        "paper": claim.paper,
        "expected": claim.expected,
        "measured": asdict(claim.measured),
        "points": points(claim.measured),
        "verdict": claim.verdict,
    }


def as_markdown(result: Mapping[str, Any]) -> str:
    """report.md, of what study.json holds."""
    claims = [[each["claim"], each["paper"], each["points"], each["verdict"]] for each in result["claims"]]
    parts = [
        f"# {result['study']}, {result['scale']}",
        f"{result['source']}. {result['about']}",
        result["lead"],
        f"![{_cell(result['about'])}](figure.png)",
        _markdown_table(result["table"]["columns"], result["table"]["rows"]),
    ]
    if claims:
        parts += ["## What the paper says", _markdown_table(["claim", "the paper", "here", "verdict"], claims)]
        parts.append(_meaning(result["claims"]))
    parts += ["## What it cost", _cost(result)]
    return "\n\n".join(parts) + "\n"


def as_text(result: Mapping[str, Any]) -> str:
    """The same for a terminal."""
    lines = [f"{result['study']}, {result['scale']}: {result['about']} ({result['source']})", ""]
    lines += [*_text_table(result["table"]["columns"], result["table"]["rows"]), ""]
    for each in result["claims"]:
        lines += textwrap.wrap(f"{each['verdict']}: {each['claim']}", 100, subsequent_indent="    ")
        lines.append(f"    {each['points']}; the paper: {each['paper']}")
    return "\n".join([*lines, *([""] if result["claims"] else []), _cost(result)])


def _meaning(claims: Sequence[Mapping[str, Any]]) -> str:
    """What the intervals and verdicts are worth."""
    told = (
        "Differences are in percentage points, paired by seed. In brackets is the percentile bootstrap interval over "
        "seeds; the test images are the same throughout. A claim `shows` where the whole interval is on its side, "
        "and is `contradicted` where the whole interval is on the other."
    )
    if any(each["expected"] == "equal" for each in claims):
        told += (
            " That two are equal `shows` where the interval holds 0, which finds no difference and proves none; else "
            "they `differ`."
        )
    for pairs in sorted({each["measured"]["pairs"] for each in claims}):
        if pairs == 1:
            told += " One seed has no interval, and shows nothing."
        elif pairs in COVERED:
            told += (
                f" With {pairs} seeds the interval spans their differences, and holds the middle of all differences "
                f"in {COVERED[pairs]} of such studies, not in 95 %; where there is no difference at all, it excludes 0 "
                f"in all the others."
            )
    return told


def _cost(result: Mapping[str, Any]) -> str:
    runs = len(result["points"])
    return (
        f"{runs} run{'' if runs == 1 else 's'}, {operations(result['exaflops'])} of training: 6 x multiply-accumulates "
        f"of a forward pass x images seen, as Table 6 counts."
    )


def operations(exaflops: float) -> str:
    """Compute in the unit that suits it: "223 exaFLOPs", "51.8 teraFLOPs"."""
    for power, unit in ((0, "exa"), (3, "peta"), (6, "tera"), (9, "giga")):
        if exaflops * 10**power >= 1 or unit == "giga":
            break
    return f"{float(f'{exaflops * 10**power:.3g}'):,.10g} {unit}FLOPs"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rules = ["--:" if right else "---" for right in _numbers(rows, len(columns))]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in [columns, rules, *rows])


def _cell(text: str) -> str:
    """On one line, and without a sign that would end it."""
    return " ".join(text.split()).replace("|", "\\|")


def _text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    right = _numbers(rows, len(columns))
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [columns, *rows]
    ]


def _numbers(rows: Sequence[Sequence[str]], columns: int) -> list[bool]:
    """Which columns hold numbers alone (and absences of them): these stand to the right."""
    number = re.compile(r"[+-]?\d[\d.,]*( ± [\d.]+)?( %)?|-?")
    return [bool(rows) and all(number.fullmatch(row[column]) for row in rows) for column in range(columns)]
