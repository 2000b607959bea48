"""The `vitlab` program: from arguments to a command's `run()`, and from exceptions to exit codes."""

import codecs
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from vitlab import __version__
from vitlab.commands import COMMANDS, command_type, discard
from vitlab.commands.settings import parse_command
from vitlab.display import fit
from vitlab.errors import DISK_FULL, RunError, UserError, printable
from vitlab.io import check_output
from vitlab.ranks import is_rank_0, world_size
from vitlab.settings import nearest

DISTRIBUTED = ("pretrain", "finetune", "vtab", "evaluate", "fewshot", "probe", "features")
"""Commands that several processes of torchrun run together."""
STOPPED = 143
"""Exit code of a run that was stopped and has saved."""
HELP = {"-h", "--help", "--help-all"}
OTHER_WORDS = {
    "train": "`vitlab pretrain` trains a new model, `vitlab finetune` a checkpoint",
    "test": "`vitlab evaluate` tests a checkpoint",
    "eval": "`vitlab evaluate` tests a checkpoint",
    "classify": "`vitlab predict` classifies images",
    "infer": "`vitlab predict` classifies images",
    "models": "`vitlab list models`",
    "datasets": "`vitlab list datasets`",
    "attention": "`vitlab inspect` shows where a model looks",
    "version": "`vitlab --version`",
    "help": "`vitlab --help`",
}
"""What people may call a command, and what to type."""
NO_COMPILER = re.compile(r"No working C\+\+ compiler|Failed to find C(\+\+)? compiler")
"""What torch.compile and Triton raise without one."""
OUTPUTS = ("workdir", "out", "csv", "destination", "cache")
"""Arguments of commands that name a file or a folder to write."""


def parse(argv: Sequence[str]) -> Any:
    """The command in `argv`, with all its settings.

    Only the requested command is built, so that an error message is about nothing else.
    Raises UserError for an invalid setting, SystemExit(2) for an unknown flag or a value of the wrong type.
    """
    if not argv or argv[0] in HELP:
        from vitlab.commands.help import overview

        print(overview(), file=sys.stdout if argv else sys.stderr, flush=True)
        raise SystemExit(0 if argv else 2)
    name, *words = argv
    if name in ("-V", "--version"):
        print(f"vitlab {__version__}", flush=True)
        raise SystemExit(0)
    if name in OTHER_WORDS:
        raise UserError(f"there is no command {name!r}: {OTHER_WORDS[name]}.")
    if name.startswith("-"):
        raise UserError(
            f"unknown option {name!r}; {nearest(name, ('--help', '--version'))}. A command comes first: "
            f"{', '.join(COMMANDS)}."
        )
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; {nearest(name, COMMANDS)}. `vitlab --help` lists all.")
    if (processes := world_size()) > 1 and name not in DISTRIBUTED:
        raise UserError(
            f"`vitlab {name}` runs in one process, and torchrun has started {processes}; start it "
            f"without torchrun. Several processes run {', '.join(DISTRIBUTED)}."
        )
    if HELP & set(words):
        from vitlab.commands.help import command_help

        print(command_help(name, command_type(name), words), flush=True)
        raise SystemExit(0)
    return parse_command(name, command_type(name), words)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program and exits.

    Exit codes: 0 done; 1 failed, in whole or in part; 2 invalid input; 130 interrupted; 143 stopped and saved.
    """
    # GNU OpenMP reads this when torch is loaded. Threads that spin for long slow down training beside other work;
    # threads that do not spin at all halve the speed of small models.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or warnings of torch's sockets hide our last line
    for name in ("torch.utils.cpp_extension", "onnxscript"):  # CUDA's compiler without a GPU; what is not folded
        logging.getLogger(name).setLevel(logging.ERROR)
    if logging.lastResort:
        logging.lastResort.setFormatter(_PrintableFormatter())
    command = None
    try:
        _prepare_output()
        command = parse(sys.argv[1:] if argv is None else argv)
        for name in OUTPUTS:
            if path := getattr(command, name, None):
                check_output(path)
        code = command.run()
    except BrokenPipeError:  # the reader has ended (`| head`)
        discard(sys.stdout, sys.stderr)
        code = 0
    except (UserError, OSError) as error:
        if os.environ.get("VITLAB_DEBUG"):
            traceback.print_exc()
        _print_error(str(error))
        code = 1 if getattr(error, "errno", None) in DISK_FULL else 2
    except RuntimeError as error:
        code = _exit_code(error, command)
    except KeyboardInterrupt:
        _print_message("interrupted.")
        code = 130
    raise SystemExit(code)


def _prepare_output() -> None:
    """Lets any text be printed in the terminal's encoding. Raises UserError where the standard output is closed."""
    if sys.stderr is None:  # with `print`, its lines would join the results
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stdout is None:
        raise UserError("the standard output is closed, and results would be lost; redirect it, if only to /dev/null.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("vitlab", _escape)
        sys.stdout.reconfigure(errors="vitlab")


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """For one character: the byte of a file name that is not text, or an escape where the encoding lacks it."""
    assert isinstance(error, UnicodeEncodeError)
    error.end = error.start + 1
    escaped = "\udc80" <= error.object[error.start] <= "\udcff"
    return codecs.lookup_error("surrogateescape" if escaped else "backslashreplace")(error)


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters in warnings, which may hold file names."""

    def format(self, record: logging.LogRecord) -> str:
        return fit(printable(super().format(record)), sys.stderr)


def _print_message(text: str) -> None:
    print(fit(f"vitlab: {printable(text)}", sys.stderr), file=sys.stderr)


def _print_error(text: str) -> None:
    """In red on a terminal, unless NO_COLOR is set."""
    colored = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    message = fit(f"vitlab: error: {printable(text)}", sys.stderr)
    print(message.replace("error:", "\x1b[31merror:\x1b[0m", 1) if colored else message, file=sys.stderr)


def _exit_code(error: RuntimeError, command: Any) -> int:
    """Prints a known error and returns its exit code; raises an unknown one again, with its traceback."""
    import torch

    if isinstance(error, RunError):
        if error.on_every_rank or is_rank_0():
            show = _print_message if error.exit_code == STOPPED else _print_error
            show(str(error))
        return error.exit_code
    if isinstance(error, torch.OutOfMemoryError):
        _print_error(f"out of device memory.{_smaller_flags(command)} ({error})")
        return 1
    if NO_COMPILER.search(str(error)):
        _print_error("torch.compile needs a C++ compiler (g++); install one, or give --compile False.")
        return 2
    raise error


def _smaller_flags(command: Any) -> str:
    """Advice on the flags of this command that need less memory."""
    settings = getattr(command, "options", command)
    names = [name for name in ("batch", "batch_size", "image_size") if hasattr(settings, name)]
    if hasattr(command, "config"):
        names = ["microbatch", "image_size" if hasattr(command, "image_size") else "model.image_size"]
    return f" Give a smaller {' or '.join('--' + name.replace('_', '-') for name in names)}." if names else ""
