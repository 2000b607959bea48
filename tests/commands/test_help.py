"""`--help` fits a screen, names no flag that does not parse, and breaks no number; `--help-all` names every flag."""

import re
from typing import Any

import pytest
import tyro
from program import call

from vitlab import cli
from vitlab.commands import COMMANDS
from vitlab.commands.help import PURPOSES, USUAL, USUAL_TEXTS, flags
from vitlab.recipes import FINETUNE, PRETRAIN

RUNS = {
    "pretrain": PRETRAIN["tiny-digits"](),
    "finetune": FINETUNE["own"](),
    "vtab": FINETUNE["vtab"]().single(),
    "plan": PRETRAIN["tiny-digits"](),
}


def whole(name: str) -> Any:
    """The dataclass that the command line parses a command as."""
    return cli._with_default(COMMANDS[name], RUNS[name], []) if name in RUNS else COMMANDS[name]


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, *argv: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = call(capsys, *argv)
    assert (code, err) == (0, "")
    return out.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_line_a_flag(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(capsys, monkeypatch, 100, name, "--help")
    assert len(lines) <= 60
    headings = [place for place, line in enumerate(lines) if re.fullmatch(r"[a-z -]+:", line)]
    body = [line for line in lines[headings[0] : -2] if line and not line.endswith(":")]
    assert all(re.match(r"  (--|[A-Z{])", line) for line in body)
    known = {flag.negated or flag.name for flag in flags(whole(name))}
    assert {line.split()[0] for line in body if line.startswith("  --")} <= known


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_nothing_is_wider_than_the_terminal_and_no_number_breaks(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argv in (["--help"], *([name, asked] for name in COMMANDS for asked in ("--help", "--help-all"))):
        lines = shown(capsys, monkeypatch, columns, *argv)
        assert max(map(len, lines)) <= columns, argv
        assert not re.search(r"\d,\s*\n\s*\d{3}\b", "\n".join(lines)), argv


@pytest.mark.parametrize("name", COMMANDS)
def test_help_knows_the_flags_that_are_parsed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their names, none is missing and none is made up."""
    monkeypatch.setenv("COLUMNS", "80")  # tyro's own help has one column then
    with pytest.raises(SystemExit):
        tyro.cli(whole(name), args=["--help"])
    parsed = set(re.findall(r"^(?:│ |  )(--[a-z][a-z0-9.-]*)", capsys.readouterr().out, re.MULTILINE))
    ours = {flag.name for flag in flags(whole(name)) if flag.name and not flag.name.startswith("--fewshot.")}
    assert ours == {flag for flag in parsed if flag not in ("--fewshot", "--masking", "--model.kind", "--model.stem")}


def test_help_all_shows_what_help_hides(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usual, every = ("\n".join(shown(capsys, monkeypatch, 100, "finetune", asked)) for asked in ("--help", "--help-all"))
    for flag in ("--model.dropout", "--optim.beta1", "--data.pad", "--fewshot.shots", "--float8"):
        assert f"  {flag} " not in usual
        assert re.search(rf"^  {flag}\b", every, re.MULTILINE)
    assert "--model.depth" not in every  # the checkpoint brings it
    assert "--model.depth" in "\n".join(shown(capsys, monkeypatch, 100, "pretrain", "--help-all"))
    assert "--optim.lr FLOAT" in usual
    assert "\n  --data.[no-]flip " in every


def test_a_recipe_gives_the_defaults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = (line for line in shown(capsys, monkeypatch, 100, "pretrain", "jft", "--help") if "--optim.lr" in line)
    assert line.endswith("[0.0008]")


def test_every_command_has_its_purpose_and_every_flag_its_text() -> None:
    assert sorted(name for names in PURPOSES.values() for name in names) == sorted(COMMANDS)
    kinds = [*map(whole, COMMANDS), cli._with_default(COMMANDS["pretrain"], PRETRAIN["masked"](), [])]
    found = {flag.name: flag for kind in kinds for flag in flags(kind)}
    assert set(USUAL) <= set(found)
    assert [name for name, flag in found.items() if not flag.text] == []
    assert all(text.endswith(".") for text in USUAL_TEXTS.values())
