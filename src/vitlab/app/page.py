"""The web page's layout and theme (Gradio)."""

import importlib
import os
from pathlib import Path
from typing import Any

from vitlab.app.checkpoints import ModelCache
from vitlab.app.state import Limits, Session
from vitlab.errors import UserError
from vitlab.inspect.figures import DARK, LIGHT
from vitlab.inspect.page import render

QUEUE = 64
"""Requests that may wait; more are refused."""


def gradio() -> Any:
    """The library without its usage statistics. Raises UserError where it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        return importlib.import_module("gradio")
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UserError("the web page needs Gradio, which is not installed: pip install 'vitlab[app]'.") from error


def theme() -> Any:
    """The colors of the other pages, and fonts of the system: nothing is fetched."""
    gr = gradio()
    roles = {
        "page": "body_background_fill background_fill_secondary input_background_fill",
        "card": "background_fill_primary block_background_fill",
        "ink": "body_text_color block_title_text_color",
        "muted": "body_text_color_subdued block_label_text_color block_info_text_color",
        "line": "border_color_primary block_border_color input_border_color",
        "accent": "color_accent slider_color border_color_accent",
    }
    colors = {
        name + ending: getattr(tone, role)
        for ending, tone in (("", LIGHT), ("_dark", DARK))
        for role, names in roles.items()
        for name in names.split()
    }
    del colors["color_accent_dark"]  # Gradio has none
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Arial", "sans-serif"]
    return gr.themes.Base(font=fonts, font_mono=["ui-monospace", "monospace"]).set(**colors)


def build_page(path: str | Path, *, limits: Limits | None = None, device: str = "auto") -> Any:
    """The page (a `gradio.Blocks`) of a checkpoint, or of all in a folder; `vitlab.app.launch` serves it.

    Raises UserError where there is no checkpoint, where the only one cannot be loaded, and without Gradio.
    """
    gr = gradio()
    session = Session(ModelCache(path, device), limits or Limits())
    names = session.models.names

    def drop(upload: str | None, checkpoint: str) -> tuple[Any, ...]:
        if upload is None:
            return (gr.skip(),) * 5
        folder = Path(importlib.import_module("gradio.utils").get_upload_folder())
        *parts, card = session.drop(upload, folder, checkpoint)
        return None, *parts, gr.skip() if card is None else card  # the upload is cleared for the next one

    with gr.Blocks(title="vitlab", analytics_enabled=False, delete_cache=(60, 300)) as page:
        dropped = gr.State(time_to_live=3600)
        gr.HTML(str(render("lead.html.j2")), elem_classes="vitlab")
        with gr.Row():
            with gr.Column(scale=2, min_width=260):
                several = len(names) > 1
                checkpoint = gr.Dropdown(
                    names, value=names[0], label="Checkpoint", visible=several, elem_id="checkpoint"
                )
                upload = gr.File(label="Drop an image here", type="filepath", height=150, elem_id="upload")
                message = gr.HTML(session.message(), elem_id="message", elem_classes="vitlab")
                card = gr.HTML(session.first_card(), elem_id="card", elem_classes="vitlab")
            with gr.Column(scale=5, min_width=300):
                result = gr.HTML(elem_id="result", elem_classes="vitlab")
        shown = [message, result, card]
        # One queue for all, in order: otherwise an earlier request may overwrite the result of a later one.
        rules = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
        upload.upload(drop, [upload, checkpoint], [upload, dropped, *shown], **rules)
        checkpoint.change(session.choose, [dropped, checkpoint], shown, **rules)
    page.queue(max_size=QUEUE, api_open=False)
    return page
