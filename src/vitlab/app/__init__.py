"""The web page of a checkpoint: drop an image, see predictions and attention; on loopback, without a network.

Needs the extra `app` (Gradio). Importing this imports neither Gradio nor torch.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from vitlab.app.page import build_page as build_page
    from vitlab.app.server import launch as launch

HOMES = {"build_page": "vitlab.app.page", "launch": "vitlab.app.server"}


def __getattr__(name: str) -> typing.Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"vitlab.app has no {name!r}; its public names are {', '.join(HOMES)}.")


def __dir__() -> list[str]:
    return [*HOMES]
