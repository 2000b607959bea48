"""Arguments that are wrong, found before torch is imported."""

from pathlib import Path

from program import without_torch


def test_inputs_are_checked_before_torch_is_imported(run: Path) -> None:
    """Checkpoints, data sets, columns of tables and images: each error names what was given and what to give."""
    Path("table.csv").write_text("photo,label\na.png,cat\n")
    Path("empty").mkdir()
    found = {
        "finetune nothing-here": "there is no file or folder nothing-here; give a Google .npz",
        "finetune table.csv --dataset digits": "table.csv is not a checkpoint",
        f"finetune {run} --dataset csv:table.csv": "has the columns photo, label; none of them is named as a column of",
        f"finetune {run} --dataset folder:empty": "empty has no class folders",
        f"finetune {run} --dataset digits --budget soon": "'soon' is not a time",
        "predict missing x.jpg": "there is no file or folder missing",
        f"predict {run} x.jpg": "there is no file or folder x.jpg",
        f"evaluate {run} --dataset cifar11": "unknown data set 'cifar11'; the nearest: cifar10",
        "export missing --to onnx": "there is no file or folder missing",
        "pretrain tiny-digits --dataset digit": "unknown data set 'digit'",
        "paper fig6 missing": "there is no file or folder missing",
    }
    errors = [line for line in without_torch(list(found), ("2",)) if "error:" in line]
    assert len(errors) == len(found)
    for (words, message), error in zip(found.items(), errors, strict=True):
        assert message in error, words
