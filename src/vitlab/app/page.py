"""The page itself: what stands on it, and what happens when somebody touches it."""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.app import state as shown
from vitlab.app.checkpoints import Shelf
from vitlab.app.state import LAYER, ROLLOUT, VIEWS, Limits, Seen
from vitlab.app.uploads import read_upload
from vitlab.data.decode import IMAGE_FORMATS
from vitlab.errors import UserError
from vitlab.inspect.figures import DARK, LIGHT

WAITING = 64
"""Requests in the queue; more are asked to come back."""
LEAD = (
    "A Vision Transformer cuts a image into patches and lets each look at all others; here is what it answers, and "
    "where it looked. Nothing leaves this computer."
)
MEAN = "mean of all heads"
STYLE = """
.gradio-container { max-width: 76rem !important; margin: 0 auto !important; }
footer { display: none !important; }
.block h1 { font-size: 1.7rem; letter-spacing: -0.015em; margin: 0; }
.vitlab p, .vitlab li, .vitlab dd { line-height: 1.5; }
.vitlab .note, .vitlab figcaption, .vitlab dt { color: var(--body-text-color-subdued); font-size: 0.875rem; }
.vitlab .note { margin: 0.75rem 0 0; max-width: 44rem; }
.vitlab figure { margin: 0; min-width: 0; }
.vitlab figcaption { margin-top: 0.4rem; line-height: 1.4; }
.vitlab img { width: 100%; height: auto; border-radius: 0.4rem; display: block; }
.vitlab .pair { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); }
.vitlab .answers { list-style: none; margin: 0; padding: 0; }
.vitlab .answers li { display: grid; grid-template-columns: 1fr auto; gap: 0 0.75rem; margin: 0 0 0.6rem;
  overflow-wrap: anywhere; }
.vitlab .share { font-variant-numeric: tabular-nums; font-weight: 600; }
.vitlab .bar { grid-column: 1 / -1; height: 0.4rem; min-width: 2px; border-radius: 0.2rem;
  background: var(--slider-color); }
.vitlab .card { margin: 0; display: grid; gap: 0.5rem; }
.vitlab .card dd { margin: 0; overflow-wrap: anywhere; }
.vitlab .refusal { margin: 0; padding: 0.7rem 0.9rem; border-radius: 0.4rem; overflow-wrap: anywhere;
  border: 1px solid #c0392b; border-left-width: 0.4rem; }
.distance figure { max-width: 26rem; }
"""


def gradio() -> Any:
    """The library, told to keep its usage statistics to itself. Raises ValueError where it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        return importlib.import_module("gradio")
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UserError("the web page needs Gradio, which is not installed: pip install 'vitlab[app]'.") from error


def theme() -> Any:
    """The colors of the other pages, and letters that are on the computer: nothing is fetched."""
    gr = gradio()
    colors = {}
    for ending, tone in (("", LIGHT), ("_dark", DARK)):
        named = {
            "body_background_fill": tone.page, "background_fill_primary": tone.card, "block_background_fill": tone.card,
            "background_fill_secondary": tone.page, "input_background_fill": tone.page, "body_text_color": tone.ink,
            "body_text_color_subdued": tone.muted, "block_label_text_color": tone.muted,
            "block_title_text_color": tone.ink, "block_info_text_color": tone.muted,
            "border_color_primary": tone.line, "block_border_color": tone.line, "input_border_color": tone.line,
            "color_accent": tone.accent, "slider_color": tone.accent, "border_color_accent": tone.accent,
        }  # fmt: skip
        colors |= {name + ending: color for name, color in named.items() if name + ending != "color_accent_dark"}
    letters = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Arial", "sans-serif"]
    return gr.themes.Base(font=letters, font_mono=["ui-monospace", "monospace"]).set(**colors)


def build_page(path: str | Path, *, limits: Limits | None = None, device: str = "auto") -> Any:
    """The page (a `gradio.Blocks`) over a checkpoint, or over all in a folder; `vitlab.app.launch` serves it.

    Raises ValueError where there is no checkpoint, where the only one cannot be loaded, and without Gradio.
    """
    gr = gradio()
    desk = Desk(Shelf(path, device), limits or Limits())
    names = desk.shelf.names
    with gr.Blocks(title="vitlab", analytics_enabled=False, delete_cache=(60, 300)) as page:
        dropped, seen = gr.State(time_to_live=3600), gr.State(time_to_live=3600)
        gr.HTML(f"<h1>Looking inside</h1><p>{LEAD}</p>", elem_classes="vitlab")
        with gr.Row():
            with gr.Column(scale=2, min_width=260):
                checkpoint = gr.Dropdown(
                    names, value=names[0], label="Checkpoint", visible=len(names) > 1, elem_id="checkpoint"
                )
                upload = gr.File(label="Drop a image here", type="filepath", height=150, elem_id="upload")
                message = gr.HTML(_hint(desk.limits), elem_id="message", elem_classes="vitlab")
                answers = gr.HTML(elem_id="answers", elem_classes="vitlab")
            with gr.Column(scale=5, min_width=300):
                view = gr.Radio(list(VIEWS), value=ROLLOUT, label="What to show", elem_id="view")
                with gr.Row():
                    layer = gr.Slider(
                        1, 12, value=12, step=1, label="Layer", visible=False, elem_id="layer", buttons=[]
                    )
                    head = gr.Dropdown([(MEAN, 0)], value=0, label="Head", visible=False, elem_id="head")
                inside = gr.HTML(shown.nothing_yet(ROLLOUT), elem_id="inside", elem_classes="vitlab")
        with gr.Row():
            with gr.Column(scale=2, min_width=260):
                card = gr.HTML(desk.first_card(), elem_id="card", elem_classes="vitlab")
            with gr.Column(scale=5, min_width=300):
                distance = gr.HTML(elem_id="distance", elem_classes=["vitlab", "distance"])
        controls, shows = [view, layer, head], [seen, message, answers, inside, layer, head, distance, card]
        # One queue for all, in order: else an answer overtakes one that was asked for before it, and is overwritten.
        rules = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
        upload.upload(desk.drop, [upload, checkpoint, *controls], [upload, dropped, *shows], **rules)
        # Not `input`, which tells of one choice twice: the second time with a layer that the new model need not have.
        checkpoint.change(desk.choose, [dropped, checkpoint, *controls], shows, **rules)
        quick = rules | {"show_progress": "hidden", "trigger_mode": "always_last"}
        for control in controls:
            control.input(desk.turn, [seen, *controls], [inside, layer, head], **quick)
    page.queue(max_size=WAITING, api_open=False)
    return page


def _hint(limits: Limits) -> str:
    return f'<p class="note">Allowed are {limits}: {", ".join(IMAGE_FORMATS)}.</p>'


@dataclass(frozen=True)
class Dropped:
    """A file as it was dropped, to be shown to the next checkpoint too."""

    name: str
    data: bytes


class Desk:
    """What the controls do. Each answer is the new contents of the parts of the page that `build_page` names."""

    def __init__(self, shelf: Shelf, limits: Limits) -> None:
        self.shelf, self.limits, self._gradio = shelf, limits, gradio()

    def first_card(self) -> str:
        """Of a single checkpoint its card; of several none is loaded yet."""
        names = self.shelf.names
        return shown.card(self.shelf.take(names[0])) if len(names) == 1 else ""

    def drop(self, upload: str | None, checkpoint: str, view: str, layer: int | float, head: int | None) -> tuple:
        """A file was dropped. The place where it was dropped is cleared for the next."""
        if upload is None:
            return (self._gradio.skip(),) * 10
        folder = Path(importlib.import_module("gradio.utils").get_upload_folder())
        try:
            dropped = Dropped(Path(upload).name, read_upload(upload, folder, self.limits.most_bytes))
        except UserError as error:
            said, skipped = shown.refusal(str(error)), self._gradio.skip()
            return None, None, None, said, "", *self.turn(None, view, layer, head), "", skipped
        return None, dropped, *self.choose(dropped, checkpoint, view, layer, head)

    def choose(
        self, dropped: Dropped | None, checkpoint: str, view: str, layer: int | float, head: int | None
    ) -> tuple:
        """Another checkpoint was chosen, or another image."""
        card = ""
        try:
            loaded = self.shelf.take(checkpoint)
            card = shown.card(loaded)
            if dropped is None:
                return None, _hint(self.limits), "", *self.turn(None, view, layer, head), "", card
            seen = shown.see(loaded, self.limits.read(dropped.data, dropped.name))
        except ValueError as error:
            return None, shown.refusal(str(error)), "", *self.turn(None, view, layer, head), "", card
        inside, *knobs = self.turn(seen, view, layer, head)
        said = f'<p role="status">{shown.escape(dropped.name)}</p>'
        return seen, said, shown.answers(loaded, seen), inside, *knobs, shown.distances(seen), card

    def turn(self, seen: Seen | None, view: str, layer: int | float, head: int | None) -> tuple:
        """Something else is to be shown of the same image: nothing is computed anew."""
        inside = shown.nothing_yet(view) if seen is None else shown.inside(seen, view, int(layer), head or 0)
        return inside, *self._knobs(seen, view, layer, head)

    def _knobs(self, seen: Seen | None, view: str, layer: int | float, head: int | None) -> tuple:
        """The layer's slider and the head's list: there where they have an effect, as long as the model has them."""
        layers, heads = shown.layers_and_heads(seen)
        hidden = self._gradio.update(visible=False)
        if view != LAYER or not layers:
            return hidden, hidden
        choices = [(MEAN, 0), *((f"head {number}", number) for number in range(1, heads + 1))]
        return (
            # Gradio knows no slider of one place.
            self._gradio.update(visible=True, maximum=len(layers), value=min(int(layer), len(layers)))
            if len(layers) > 1
            else hidden,
            self._gradio.update(visible=True, choices=choices, value=min(head or 0, heads)),
        )
