"""`--help` shows the usual flags of a command with their texts and defaults; `--help-all` shows every flag."""

import re
import shlex

import pytest
from program import call

from vitlab.cli import parse
from vitlab.commands import COMMANDS, command_type
from vitlab.commands.settings import parse_command


def help_text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = call(capsys, *argv)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_text(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns nothing is wider, and the usual flags fit on a screen of 60 lines. The example is understood."""
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "--help-all"):
        out = help_text(capsys, name, flag)
        assert out.startswith(f"usage: vitlab {name} ")
        assert "--json" in out
        assert max(map(len, out.splitlines())) <= 80
        assert re.findall(r"^  --[^ ]+(?: [^ ]+)*\n(?!  {20})", out, re.MULTILINE) == []
        assert flag == "--help-all" or len(out.splitlines()) <= 60
    (example,) = re.findall(r"^example: vitlab (.+)$", out, re.MULTILINE)
    words = shlex.split(example)
    assert words[0] == name
    parse(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_the_flags_that_are_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny-masked-digits"] if name in ("pretrain", "plan") else []
    ours = set(re.findall(r"^  (--[^\s]+)", help_text(capsys, name, *words, "--help-all"), re.MULTILINE))
    with pytest.raises(SystemExit):
        parse_command(name, command_type(name), [*words, "--help"])
    read = set(re.findall(r"--[a-z][a-z0-9.-]*", capsys.readouterr().out))
    assert ours <= read
    hidden = {flag for flag in read - ours if not re.search(r"^--(?:.*\.)?no-", flag)} - {"--help"}
    assert name in ("pretrain", "plan", "finetune", "vtab") or not hidden


def test_help_all_shows_what_help_hides(capsys: pytest.CaptureFixture[str]) -> None:
    """The overview names every command; a recipe gives the defaults; a ResNet has settings of its own."""
    overview = help_text(capsys, "--help")
    assert all(re.search(rf"^  {name} +[A-Z]", overview, re.MULTILINE) for name in COMMANDS)
    assert "..." not in overview
    usual, every = (help_text(capsys, "finetune", flag) for flag in ("--help", "--help-all"))
    for flag in ("--model.dropout", "--optim.beta1", "--data.pad", "--fewshot.shots", "--fsdp"):
        assert f"{flag} " not in usual
        assert f"  {flag}" in every
    assert "--optim.lr FLOAT" in usual
    assert "--model.depth" not in every  # the checkpoint brings it
    assert "--model.depth" in help_text(capsys, "pretrain", "--help-all")
    assert re.search(r"--optim.lr FLOAT .*\(default:\s+0\.0008\)", help_text(capsys, "pretrain", "jft", "--help"))
    assert "--model.head-bias" in help_text(capsys, "pretrain", "jft", "--model", "R50x1", "--help-all")


def test_usage_and_texts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be left out is in brackets; defaults are the command's; a text ends at a sentence, a positional one's is
    whole; --help-all is named where texts are cut."""
    monkeypatch.setenv("COLUMNS", "120")
    helps = {name: help_text(capsys, name, "--help") for name in ("finetune", "inspect", "list", "evaluate", "bench")}
    usage = {name: text.splitlines()[0].removeprefix(f"usage: vitlab {name} ") for name, text in helps.items()}
    assert usage["finetune"] == "[CHECKPOINT] [OPTIONS]"
    assert usage["inspect"] == "CHECKPOINT [IMAGE ...] [OPTIONS]"
    assert re.search(r"  PATTERN +Shell .+ \(default: \*\)\.", helps["list"])
    assert re.search(r"--batch-size INT .+\(default: 256\)", helps["evaluate"])
    assert "models of Fig. 12." in " ".join(helps["bench"].split())
    assert "Default: the test images of the run." in " ".join(helps["inspect"].split())
    assert "--help-all" in helps["inspect"]
    assert "--help-all" not in helps["list"]


def test_settings_left_to_the_data_have_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    staged, paper = (help_text(capsys, "finetune", *flags, "--help-all") for flags in ((), ("--recipe", "cifar10")))
    for flag in ("--steps", "--batch-size", "--mixup", "--optim.warmup-steps", "--data.eval-resize"):
        assert re.search(rf"  {flag} (?:(?!\n  --).)*?\(chosen\s+by\s+the\s+data\)", staged, re.DOTALL)
    assert re.search(r"--optim.lr FLOAT (?:(?!\n  --).)*?\(default:\s+0\.0001\)", staged, re.DOTALL)
    assert "chosen" not in re.sub("the.*chosen", "", paper.partition("settings")[2])
