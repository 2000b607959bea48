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
    ]
    for purpose, names in PURPOSES.items():
        lines += ["", f"## {purpose}"]
        for name in names:
            words = [RECIPES[name]] if name in RECIPES else []
            lines += ["", f"### vitlab {name}", "", "```text", command_help(name, command_type(name), words), "```"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
