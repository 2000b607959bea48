"""`--help` shows the usual flags of a command with their texts and defaults; `--help-all` shows every flag."""

import re

import pytest
from program import call

from vitlab.commands import COMMANDS


def help_text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = call(capsys, *argv)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = help_text(capsys, name, "--help-all")
    assert out.startswith(f"usage: vitlab {name} ")
    assert "--json" in out
    assert re.findall(r"^│ (--[^ ]+) [^│]*?(?:\n│)? +\(default: [^)]*\) *│", out, re.MULTILINE) == []


def test_help_all_shows_what_help_hides(capsys: pytest.CaptureFixture[str]) -> None:
    usual, every = (help_text(capsys, "finetune", flag) for flag in ("--help", "--help-all"))
    for flag in ("--model.dropout", "--optim.beta1", "--data.pad", "--fewshot.shots", "--fsdp"):
        assert f"{flag} " not in usual.replace(",", " ")
        assert f"{flag} " in every.replace(",", " ")
    assert "--optim.lr FLOAT" in usual
    assert "--model.depth" not in every  # the checkpoint brings it
    assert "--model.depth" in help_text(capsys, "pretrain", "--help-all")


def test_a_recipe_gives_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"--optim.lr FLOAT .*\(default:\s+0\.0008\)", help_text(capsys, "pretrain", "jft", "--help"))


def test_help_of_a_resnet(capsys: pytest.CaptureFixture[str]) -> None:
    """Its channels are a class variable and no setting."""
    assert "--model.head-bias" in help_text(capsys, "pretrain", "jft", "--model", "R50x1", "--help-all")


def test_settings_left_to_data_and_device_have_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    staged, paper = (help_text(capsys, "finetune", *flags, "--help") for flags in ((), ("--recipe", "cifar10")))
    for flag in ("--steps", "--batch-size", "--mixup", "--optim.warmup-steps", "--data.eval-resize"):
        assert re.search(rf"{flag} (?:(?!│ --).)*?\(default:[│\s]+automatic\)", staged, re.DOTALL)
    assert re.search(r"--optim.lr FLOAT (?:(?!│ --).)*?\(default:[│\s]+0\.0001\)", staged, re.DOTALL)
    assert "automatic" not in paper


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_text(capsys, "--help")
    assert all(re.search(rf"^  {name} +[A-Z]", out, re.MULTILINE) for name in COMMANDS)
