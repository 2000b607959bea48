"""Writes docs/reference/commands.md, the help of every command.

`python benchmarks/commands_page.py > docs/reference/commands.md`
"""

import os

from vitlab.commands import PURPOSES, command_type
from vitlab.commands.help import command_help

WIDTH = "96"
RECIPES = {"pretrain": "tiny-digits", "plan": "tiny-digits"}
"""Commands whose flags have the values of a recipe, and the one that is shown."""


def page() -> str:
    """The text of the page."""
    os.environ["COLUMNS"] = WIDTH
    lines = [
        "# Commands",
        "",
        "What `--help` after a command prints: its usual flags. `--help-all` prints every flag with its whole text.",
        "`--json` prints results for programs.",
        "",
        "- Every setting of a run is a flag: `--optim.lr 0.003`, `--model.depth 6`. An unknown, invalid or ineffective",
        "  setting is an error that says what is allowed.",
        "- Exit codes: 0 done; 1 failed, in whole or in part; 2 invalid input; 143 stopped and saved, by Ctrl-C or",
        "  SIGTERM in training; 130 interrupted by Ctrl-C elsewhere.",
    ]
    for purpose, names in PURPOSES.items():
        lines += ["", f"## {purpose}"]
        for name in names:
            words = [RECIPES[name]] if name in RECIPES else []
            lines += ["", f"### vitlab {name}", "", "```text", command_help(name, command_type(name), words), "```"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
