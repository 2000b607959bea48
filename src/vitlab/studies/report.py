"""A study's results in its folder: report.md, figure.png, figure.svg, and study.json for programs.

Nothing in them depends on the clock: a study that was killed and started again ends with the same bytes.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from vitlab.display import format_table
from vitlab.inspection import figures, plots
from vitlab.io import write_bytes
from vitlab.panels import Panel, Series
from vitlab.studies.spec import Cell, Chart, Claim, Results, Scale, Study
from vitlab.studies.statistics import Verdict, std
from vitlab.train.workdir import write_json

EXPLANATION = """\
Differences are in percentage points, paired by seed and test images, which are the same for all. In brackets is the \
95% interval over seeds (Student's t). "Detectable" is the true difference that as many seeds of this spread show \
with a probability of 80%. A claim is `supported` if the interval is on its side, `contradicted` if it is below the \
smallest relevant difference, otherwise `inconclusive`. That two groups are equal is `supported` if the interval is \
within plus or minus the smallest relevant difference, `contradicted` if it is outside. `not tested` is what this \
scale cannot show."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
SMOKE_TEST = "a smoke test, which decides nothing: `--scale small` does"
SHORT_RUNS = "a study with 1/{} of the steps, for its time budget, which decides nothing: a larger `--budget` does"


def write_report(study: Study, scale: Scale, results: Results, out: Path, divisor: int = 1) -> dict[str, Any]:
    """Writes the report of the finished runs to the folder `out`, study.json last; returns what that holds.

    divisor: of the steps of all runs; above 1 decides nothing. Numbers that are not finite are null in study.json.
    """
    report = build_report(study, scale, results, divisor)
    figure = plots.panels(study_panels(study, results))
    write_bytes(out / "figure.png", figures.png(figure))
    write_bytes(out / "figure.svg", figures.svg(figure))
    write_bytes(out / "report.md", as_markdown(report).encode())
    write_json(out / "study.json", report)
    return json.loads((out / "study.json").read_bytes())


def build_report(study: Study, scale: Scale, results: Results, divisor: int = 1) -> dict[str, Any]:
    """What study.json holds."""
    compared = study.compared(results)
    columns: Mapping[str, Cell] = _resolve(study.columns, compared)
    untested = SMOKE_TEST if scale == "tiny" else SHORT_RUNS.format(divisor) if divisor > 1 else ""
    claims = [_claim(claim, compared, scale, untested) for claim in _resolve(study.claims, compared)]
    return {
        "study": study.name,
        "source": study.source,
        "about": study.question,
        "scale": scale,
        "lead": f"{finding(claims, untested)} {_resolve(study.summary, results)} {describe_runs(results)}",
        "table": {
            "columns": list(columns),
            "rows": [[_cell(cell, row) for cell in columns.values()] for row in compared.groups(*study.rows)],
        },
        "claims": claims,
        "panels": [asdict(panel) for panel in study_panels(study, results)],
        "points": [
            {
                "name": result.run.name,
                "seed": result.run.config.seed,
                "labels": dict(result.run.labels),
                "start": result.run.init_from,
                "examples": result.examples,
                "figures": dict(result.metrics),
                "exaflops": result.exaflops,
            }
            for result in results
        ],
        "exaflops": sum(result.exaflops for result in results),
    }


def _resolve(value: Any, results: Results) -> Any:
    return value(results) if callable(value) else value


def _cell(cell: Cell, row: Results) -> str:
    if callable(cell):
        return cell(row)
    value = row.labels[cell]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _claim(claim: Claim, results: Results, scale: Scale, untested: str) -> dict[str, Any]:
    difference = results.over_seeds(claim.difference)
    reason = untested or (claim.out_of_reach if scale != "paper" else "")
    return {
        "claim": claim.text,
        "paper": claim.paper,
        "expected": claim.expected,
        "measured": asdict(difference),
        "points": str(difference),
        "relevant": claim.relevant,
        "verdict": "not tested" if reason else difference.verdict(claim.expected, claim.relevant),
        "reason": reason,
    }


def finding(claims: Sequence[Mapping[str, Any]], untested: str) -> str:
    """The first sentence of the report: how many claims are supported, contradicted, or neither; or why none is."""
    if untested:
        return f"This is {untested}."
    counts = Counter(claim["verdict"] for claim in claims)
    return f"Of {len(claims)} claims: {', '.join(f'{counts[name]} {name}' for name in VERDICTS if counts[name])}."


def study_panels(study: Study, results: Results) -> list[Panel]:
    """The panels of the study's figure."""
    compared = study.compared(results)
    charts = _resolve(study.charts, compared)
    return [chart if isinstance(chart, Panel) else chart_panel(chart, compared) for chart in charts]


def chart_panel(chart: Chart, results: Results) -> Panel:
    """The chart as a panel: a point with an error bar for each group, in lines that are sorted by x."""
    groups = [group for group in results.groups() if chart.where(group)]
    values = [group.labels[chart.x] if isinstance(chart.x, str) else chart.x(group) for group in groups]
    ticks = [value for value in dict.fromkeys([*chart.names, *values]) if value in values and isinstance(value, str)]
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for group, value in zip(groups, values, strict=True):
        x = ticks.index(value) if isinstance(value, str) else float(value)
        metric = group.measure(chart.metric)
        for line in _lines(chart, group):
            lines.setdefault(line, []).append((x, float(metric.mean()), std(metric)))
    series = []
    for name, points in lines.items():
        x, y, bars = zip(*sorted(points), strict=True)
        series.append(Series(name, x, y, bars))
    labels = [chart.names.get(value, value) for value in ticks]
    return Panel(chart.title, chart.x_label, chart.y_label, series, log_x=chart.log_x, front=chart.front, ticks=labels)


def _lines(chart: Chart, group: Results) -> Iterable[str]:
    """Names of the lines that a group belongs to."""
    if isinstance(chart.lines, str):
        value = group.labels[chart.lines]
        return [chart.names.get(value, str(value))]
    names = chart.lines(group)
    return [names] if isinstance(names, str) else names


def describe_runs(results: Results) -> str:
    """Markdown: data, steps and seeds of the runs, and how few-shot accuracy is measured."""
    text = ""
    for verb, finetuned in (("Pre-trained", False), ("Fine-tuned", True)):
        if runs := [result for result in results if (result.run.init_from is not None) == finetuned]:
            configs = [result.run.config for result in runs]
            images = _span(result.examples for result in runs)
            data = " and ".join(dict.fromkeys(config.data.name for config in configs))
            steps = _span(result.run.config.total_steps(result.examples) for result in runs)
            batches = _span(config.batch_size for config in configs)
            text += f"{verb} on {images} images of {data}, {steps} steps of {batches}. "
    text += f"Seeds: {len(results.seeds)}."
    if (fewshot := results.runs[0].run.config.fewshot) is not None:
        task = fewshot.dataset or "classes of the same data set that pre-training does not see"
        text += (
            f" Transfer is the {max(fewshot.shots)}-shot accuracy. Few-shot accuracy is the mean of {fewshot.seeds} "
            f"draws, by least squares on the frozen representation. Its data: {task}."
        )
    return text


def _span(counts: Iterable[int]) -> str:
    values = sorted(set(counts))
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def as_markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    claims = [
        {
            "claim": row["claim"],
            "the paper": row["paper"],
            "here": row["points"],
            "detectable": _points(row["measured"]["detectable"]),
            "smallest relevant": _points(row["relevant"]),
            "verdict": f"{row['verdict']}: {row['reason']}" if row["reason"] else row["verdict"],
        }
        for row in report["claims"]
    ]
    parts = [
        f"# {report['study']}, {report['scale']}",
        f"{report['source']}. {report['about']}",
        f"    vitlab study {report['study']} --scale {report['scale']}",
        report["lead"],
        f"![{report['about']}](figure.png)",
        format_table(_rows(report), markdown=True),
        "## What the paper says",
        format_table(claims, markdown=True),
        EXPLANATION,
        "## What it cost",
        _cost(report),
    ]
    return "\n\n".join(parts) + "\n"


def as_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    lines = [f"{report['study']}, {report['scale']}: {report['about']} ({report['source']})", ""]
    lines += [format_table(_rows(report)), ""]
    for row in report["claims"]:
        lines += [f"{row['verdict']}: {row['claim']}", f"    {row['points']}; the paper: {row['paper']}"]
    return "\n".join([*lines, "", _cost(report)])


def _points(value: float | None) -> str:
    """Percentage points; empty for a single seed, whose detectable difference is infinite."""
    return f"{100 * value:.1f}" if value is not None and math.isfinite(value) else ""


def _rows(report: Mapping[str, Any]) -> list[dict[str, str]]:
    return [dict(zip(report["table"]["columns"], row, strict=True)) for row in report["table"]["rows"]]


def _cost(report: Mapping[str, Any]) -> str:
    return (
        f"{len(report['points'])} runs, {report['exaflops']:.3g} exaFLOPs of training: 6 x multiply-accumulates of a "
        "forward pass x images seen, as in Table 6."
    )
