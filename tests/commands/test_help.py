"""`--help` fits a screen, names no flag that does not parse, and breaks no number; `--help-all` names every flag."""

import re
from typing import Any

import pytest
import tyro
from program import call

from vitlab.commands import COMMANDS
from vitlab.commands.help import PURPOSES, USUAL, USUAL_TEXTS, flags
from vitlab.commands.settings import Arguments, default_config

RECIPES = {"pretrain": ["tiny-digits"], "plan": ["tiny-digits"]}


def parsed_type(name: str, *words: str) -> Any:
    """The dataclass that the command line parses a command as."""
    return default_config(COMMANDS[name], Arguments([*RECIPES.get(name, []), *words]))


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
    known = {flag.negated or flag.name for flag in flags(parsed_type(name))}
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
        tyro.cli(parsed_type(name), args=["--help"])
    parsed = set(re.findall(r"^(?:│ |  )(--[a-z][a-z0-9.-]*)", capsys.readouterr().out, re.MULTILINE))
    ours = {flag.name for flag in flags(parsed_type(name)) if flag.name and not flag.name.startswith("--fewshot.")}
    assert ours == {flag for flag in parsed if flag not in ("--fewshot", "--masking", "--model.kind", "--model.stem")}


def test_help_all_shows_what_help_hides(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usual, every = ("\n".join(shown(capsys, monkeypatch, 100, "finetune", asked)) for asked in ("--help", "--help-all"))
    for flag in ("--model.dropout", "--optim.beta1", "--data.pad", "--fewshot.shots", "--fsdp"):
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
    kinds = [*map(parsed_type, COMMANDS), default_config(COMMANDS["pretrain"], Arguments(["masked"]))]
    found = {flag.name: flag for kind in kinds for flag in flags(kind)}
    assert set(USUAL) <= set(found)
    assert [name for name, flag in found.items() if not flag.text] == []
    assert all(text.endswith(".") for text in USUAL_TEXTS.values())
