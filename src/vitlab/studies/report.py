"""A study's results in its folder: report.md, figure.png, figure.svg, and study.json for programs.

Nothing in them depends on the clock: a study that was killed and started again ends with the same bytes.
"""

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitlab.config import DataConfig
from vitlab.display import format_table
from vitlab.inspect import figures, plots
from vitlab.inspect.panels import Panel, Series
from vitlab.io import replacing_file
from vitlab.studies.point import Scale
from vitlab.studies.spec import Cell, Chart, Study, resolve
from vitlab.studies.statistics import Results
from vitlab.train.workdir import write_json

COVERAGE = {2: "50 %", 3: "75 %"}
"""How often the bootstrap interval of so few seeds covers the true mean."""


def write_report(study: Study, scale: Scale, results: Results, out: Path) -> dict[str, Any]:
    """Writes the report of the finished points to the folder `out`, study.json last; returns what that holds.

    Numbers that are not finite are null in study.json, as are the bounds of a single seed.
    """
    panels = study_panels(study, results)
    report = build_report(study, scale, results, panels)
    figure = plots.panels(panels)
    files = {
        "figure.png": figures.png(figure),
        "figure.svg": figures.svg(figure),
        "report.md": as_markdown(report).encode(),
    }
    for name, content in files.items():
        with replacing_file(out / name) as file:
            file.write(content)
    write_json(out / "study.json", report)
    return json.loads((out / "study.json").read_bytes())


def build_report(study: Study, scale: Scale, results: Results, panels: Iterable[Panel]) -> dict[str, Any]:
    """What study.json holds."""
    columns: Mapping[str, Cell] = resolve(study.columns, results)
    return {
        "study": study.name,
        "source": study.source,
        "about": study.question,
        "scale": scale,
        "lead": f"{resolve(study.summary, results)} {describe_runs(results)}",
        "table": {
            "columns": list(columns),
            "rows": [[_cell(cell, row) for cell in columns.values()] for row in results.groups(*study.rows)],
        },
        "claims": [_claim(claim, results) for claim in resolve(study.claims, results)],
        "panels": [asdict(panel) for panel in panels],
        "points": [
            {
                "name": result.point.name,
                "seed": result.seed,
                "labels": dict(result.point.labels),
                "start": result.point.start,
                "examples": result.examples,
                "figures": dict(result.figures),
                "exaflops": result.exaflops,
            }
            for result in results
        ],
        "exaflops": sum(result.exaflops for result in results),
    }


def _cell(cell: Cell, row: Results) -> str:
    if callable(cell):
        return cell(row)
    value = row.labels[cell]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _claim(claim: Any, results: Results) -> dict[str, Any]:
    difference = claim.measure(results)
    return {
        "claim": claim.text,
        "paper": claim.paper,
        "expected": claim.expected,
        "measured": asdict(difference),
        "points": str(difference),
        "verdict": difference.verdict(claim.expected),
    }


def study_panels(study: Study, results: Results) -> list[Panel]:
    """The panels of the study's figure."""
    charts = resolve(study.charts, results)
    return [chart if isinstance(chart, Panel) else chart_panel(chart, results) for chart in charts]


def chart_panel(chart: Chart, results: Results) -> Panel:
    """The chart as a panel: a point with an error bar for each group, in lines that are sorted by x."""
    groups = [group for group in results.groups() if chart.where is None or chart.where(group)]
    categories: list[str | float] = []
    if chart.categories:
        present = dict.fromkeys(group.labels[str(chart.x)] for group in groups)
        order = list(chart.names)
        categories = sorted(present, key=lambda value: order.index(value) if value in order else len(order))
    lines: dict[str, list[tuple[float, float, float, str]]] = {}
    for group in groups:
        value = group.labels[chart.x] if isinstance(chart.x, str) else chart.x(group)
        x = categories.index(value) if chart.categories else float(value)
        estimate = group.mean(chart.metric)
        point = (x, estimate.mean, estimate.sd, chart.note(group) if chart.note else "")
        for line in _lines(chart, group):
            lines.setdefault(line, []).append(point)
    series = []
    for name, points in lines.items():
        x, y, spread, notes = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        series.append(Series(name, x, y, spread, notes if chart.note else ()))
    return Panel(
        chart.title,
        chart.x_label,
        chart.y_label,
        series,
        log_x=chart.log_x,
        front=chart.front,
        ticks=[chart.names.get(value, str(value)) for value in categories],
    )


def _lines(chart: Chart, group: Results) -> Iterable[str]:
    """Names of the lines that a group belongs to."""
    if isinstance(chart.lines, str):
        value = group.labels[chart.lines]
        return [chart.names.get(value, str(value))]
    names = chart.lines(group)
    return [names] if isinstance(names, str) else names


def describe_runs(results: Results) -> str:
    """Markdown: data, steps and seeds of the runs, and how few-shot accuracy is measured."""
    before = [result for result in results if result.point.start is None]
    after = [result for result in results if result.point.start is not None]
    text = f"Pre-trained on {_describe(before)}"
    if after:
        text += f"; fine-tuned on {_describe(after)}"
    seeds = len(results.seeds)
    text += f"; {seeds} seed{'s' if seeds > 1 else ''}."
    config = before[0].config
    if config.fewshot is not None:
        shots = " and ".join(map(str, config.fewshot.shots))
        if config.fewshot.dataset is not None:
            task = config.fewshot.dataset
        else:
            task = f"classes {_numbers(config.fewshot.classes)} of the same data set, which pre-training does not see"
        text += (
            f" {shots}-shot accuracy is that of least squares on the frozen representation (mean of "
            f"{config.fewshot.seeds} draws) on {task}."
        )
    return text


def _describe(results: list[Any]) -> str:
    """ "30,000 images of fashion_mnist (classes 0, 2), 300 to 900 steps of 64"."""
    configs = [result.config for result in results]
    data = " and ".join(dict.fromkeys(_data(config.data) for config in configs))
    steps = _span(config.total_steps(result.examples) for config, result in zip(configs, results, strict=True))
    batches = _span(config.batch_size for config in configs)
    return f"{_span(result.examples for result in results)} images of {data}, {steps} steps of {batches}"


def _data(data: DataConfig) -> str:
    return data.name if data.classes is None else f"{data.name} (classes {_numbers(data.classes)})"


def _numbers(classes: Iterable[int] | None) -> str:
    return "all" if classes is None else ", ".join(map(str, classes))


def _span(counts: Iterable[int]) -> str:
    values = sorted(set(counts))
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def as_markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    parts = [
        f"# {report['study']}, {report['scale']}",
        f"{report['source']}. {report['about']}",
        report["lead"],
        f"![{report['about']}](figure.png)",
        format_table(_rows(report), markdown=True),
    ]
    if report["claims"]:
        claims = [
            {"claim": row["claim"], "the paper": row["paper"], "here": row["points"], "verdict": row["verdict"]}
            for row in report["claims"]
        ]
        parts += ["## What the paper says", format_table(claims, markdown=True), _explanation(report["claims"])]
    parts += ["## What it cost", _cost(report)]
    return "\n\n".join(parts) + "\n"


def as_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    lines = [f"{report['study']}, {report['scale']}: {report['about']} ({report['source']})", ""]
    lines += [format_table(_rows(report)), ""]
    for row in report["claims"]:
        lines += textwrap.wrap(f"{row['verdict']}: {row['claim']}", 100, subsequent_indent="    ")
        lines.append(f"    {row['points']}; the paper: {row['paper']}")
    return "\n".join([*lines, *([""] if report["claims"] else []), _cost(report)])


def _rows(report: Mapping[str, Any]) -> list[dict[str, str]]:
    table = report["table"]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _explanation(claims: Iterable[Mapping[str, Any]]) -> str:
    """What the intervals and verdicts mean."""
    text = (
        "Differences are in percentage points, paired by seed. In brackets is the percentile bootstrap interval over "
        "seeds; the test images are the same for all. A claim `shows` where the whole interval is on its side, and is "
        "`contradicted` where the whole interval is on the other."
    )
    if any(claim["expected"] == "equal" for claim in claims):
        text += (
            " That two groups are equal `shows` where the interval holds 0, which finds no difference and proves none; "
            "else they `differ`."
        )
    for pairs in sorted({claim["measured"]["pairs"] for claim in claims}):
        if pairs == 1:
            text += " One seed has no interval, and shows nothing."
        elif pairs in COVERAGE:
            text += (
                f" With {pairs} seeds the interval spans their differences, and covers the true mean in "
                f"{COVERAGE[pairs]} of such studies, not in 95 %; where there is no difference at all, it excludes 0 "
                "in all the others."
            )
    return text


def _cost(report: Mapping[str, Any]) -> str:
    runs = len(report["points"])
    return (
        f"{runs} run{'' if runs == 1 else 's'}, {format_operations(report['exaflops'])} of training: 6 x "
        "multiply-accumulates of a forward pass x images seen, as in Table 6."
    )


def format_operations(exaflops: float) -> str:
    """Compute in a suitable unit: "223 exaFLOPs", "51.8 teraFLOPs"."""
    for power, unit in ((0, "exa"), (3, "peta"), (6, "tera"), (9, "giga")):
        if exaflops * 10**power >= 1 or unit == "giga":
            break
    return f"{float(f'{exaflops * 10**power:.3g}'):,.10g} {unit}FLOPs"
