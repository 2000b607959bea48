"""The result of a fine-tuning job, as text and in a notebook."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.display import preformatted
from vitlab.errors import quoted
from vitlab.evaluation.readouts import ReadoutChoice
from vitlab.evaluation.result import format_evaluation, headline
from vitlab.finetuning.scores import format_score
from vitlab.train.run_files import PAGE
from vitlab.train.workdir import read_log


@dataclass(frozen=True)
class Finetuned:
    """The result of `sweep_and_finetune`."""

    config: FinetuneConfig
    """The complete settings."""
    result: dict[str, Any]
    """The content of `result.json`: the same however often the work was interrupted."""
    workdir: Path

    def summary(self) -> str:
        """Block, learning rates tried, test, runs, unreadable files, and the paths of model and curves."""
        result, lines = self.result, []
        if layers := result.get("layers"):
            lines.append(ReadoutChoice.from_record(layers).describe())
        for score in result.get("sweep", ()):
            chosen = score["learning_rate"] == result["learning_rate"] and result.get("chosen") != "linear"
            text = f"learning rate {score['learning_rate']:<6g} {format_score(score)}"
            lines.append(text + "  <- chosen" * chosen)
        if linear := result.get("linear"):
            held_out = f"{format_score(linear['held_out'])}; " if linear["held_out"] else ""
            chosen = "  <- chosen" if result["chosen"] == "linear" else ""
            test = f"{linear['accuracy']:.2%} of the test images"
            test = f"test {headline(linear)}" if "mean_average_precision" in linear else test
            lines.append(f"least-squares head   {held_out}{test}{chosen}")
        lines.append(format_evaluation(result["test"]))
        if len(runs := result.get("runs", ())) > 1:
            name = "mean_average_precision" if "mean_average_precision_mean" in result else "accuracy"
            values = ", ".join(f"{record[name]:.2%}" for record in runs)
            mean = f"{name.replace('_', ' ')} over {len(runs)} runs: "
            mean += f"{result[f'{name}_mean']:.2%} +- {result[f'{name}_sd']:.2%}"
            lines.append(f"{mean} ({values}; the classes above are run-0's)")
        if left_out := result.get("left_out"):
            lines.append(f"left out, since the machine was slower than planned: {', '.join(left_out)}")
        if unreadable := result.get("unreadable"):
            lines.append(f"{len(unreadable)} files could not be read and were skipped:")
            lines += [f"  {quoted(file['path'])}: {file['reason']}" for file in unreadable]
        report = f" · report: {self.workdir / PAGE}" if (self.workdir / PAGE).exists() else ""
        return "\n".join([*lines, f"model: {self.workdir / 'model'}{report}"])

    def _repr_html_(self) -> str:
        """In a notebook: the summary, and the curves of the first run."""
        from vitlab.inspection import figures, plots
        from vitlab.inspection.page import data_uri

        logs = [folder / "metrics.jsonl" for folder in (self.workdir / "run-0", self.workdir)]
        records = next((read_log(path) for path in logs if path.is_file()), [])
        shown = [data_uri(figures.png(plots.panels(panels)))] if (panels := plots.curves(records)) else []
        return preformatted(self.summary()) + "".join(f'<img src="{uri}">' for uri in shown)
