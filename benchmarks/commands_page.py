"""Writes docs/reference/commands.md, the help of every command.

`python benchmarks/commands_page.py > docs/reference/commands.md`
"""

import os

from vitlab.commands import PURPOSES, command_type
from vitlab.commands.help import command_help

WIDTH = "96"
WORDS = {"pretrain": ["tiny-masked-digits", "--help-all"], "vtab": [], "plan": ["tiny-digits"]}
"""Commands that are not shown with `--help-all` alone: with a recipe, or with `pretrain`'s settings."""


def page() -> str:
    """The text of the page."""
    os.environ["COLUMNS"] = WIDTH
    lines = [
        "# Commands",
        "",
        "What `--help-all` after a command prints: every flag with its whole text. `--help` prints the usual flags, as",
        "here for `vtab` and `plan`, which have the settings of `pretrain`. Those are shown with the values of",
        "`tiny-masked-digits`; a recipe of another name has others. `--json` prints results for programs.",
        "",
        "- Every setting of a run is a flag: `--optim.lr 0.003`, `--model.depth 6`. An unknown, invalid or ineffective",
        "  setting is an error that says what is allowed.",
        "- Exit codes: 0 done; 1 failed, in whole or in part; 2 invalid input; 143 stopped and saved, by Ctrl-C or",
        "  SIGTERM in training; 130 interrupted by Ctrl-C elsewhere.",
    ]
    for purpose, names in PURPOSES.items():
        lines += ["", f"## {purpose}"]
        for name in names:
            words = WORDS.get(name, ["--help-all"])
            lines += ["", f"### vitlab {name}", "", "```text", command_help(name, command_type(name), words), "```"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
