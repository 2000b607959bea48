"""One image on the page: its answers, and every map of it under two sliders (Fig. 6, Fig. 14).

The maps lie in one small image of colored tiles, which a script of a few lines lays over the photograph. Without the
script the rollout stands there.
"""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitlab.inspect import overlays
from vitlab.inspect.figures import ramp
from vitlab.inspect.page import Markup, data_uri, escape

SIDE = 288
"""Pixels of the longer side of a image under its maps."""
LEVELS = 32
"""Colors of a map on the page."""
CELLS = 4_000_000
"""Most patches of all maps on a page together, which then take 3 MB at worst; more are pooled."""


Peak = tuple[int, int, float, float]
"""Where a map is highest: row and column of the patch, from 1; its share in percent; the map's distance in pixels."""


@dataclass(frozen=True, eq=False)
class Shown:
    """One image and what was seen of it; h, w are the patches down and across, L layers of k heads."""

    name: str
    image: UInt8[np.ndarray, "H W 3"]
    """As the model saw it."""
    answers: Sequence[tuple[str, float]]
    """Classes and their probabilities, the most probable first; empty for a model without a head."""
    layers: Sequence[str]
    heads: Float[np.ndarray, "L k h w"]
    distances: Float[np.ndarray, "L k"]
    """Mean attention distances in pixels."""
    rollout: Float[np.ndarray, "h w"]
    rollout_plain: Float[np.ndarray, "h w"]
    components: Float[np.ndarray, "h w 3"]


def pooling(images: int, layers: int, heads: int, grid: tuple[int, int]) -> int:
    """The smallest p for which the maps of so many images, averaged over p x p patches, are at most CELLS."""
    maps = images * (layers + 1) * (heads + 1)
    return next(p for p in range(1, max(grid) + 1) if p == max(grid) or maps * _pooled(grid, p) <= CELLS)


def _pooled(grid: tuple[int, int], p: int) -> int:
    return math.prod(-(-side // p) for side in grid)


def viewer(shown: Shown, number: int, pool: int = 1) -> Markup:
    """The image's part of the page. `number` tells the images of a page apart; `pool` is `pooling`'s."""
    maps, peaks = _maps(shown)
    maps = _average(maps, pool)
    rows, columns = shown.rollout.shape
    name, (high, wide) = escape(shown.name), shown.image.shape[:2]
    small = overlays.fit(shown.image, SIDE)
    static = overlays.overlay(overlays.fit(shown.image, SIDE, enlarge=True), shown.rollout)
    height, width = static.shape[:2]
    top, left, share, _ = peaks[0]
    patches = (255 * shown.components.clip(0, 1)).round().astype(np.uint8)
    return Markup(
        _MARKUP.substitute(
            name=name, number=number, width=width, height=height, wide=wide, high=high, layers=len(shown.layers),
            heads=shown.heads.shape[1], rows=maps.shape[2], columns=maps.shape[3], down=rows, across=columns,
            crisp="crisp" if max(wide, high) <= overlays.TINY else "", names=escape(json.dumps(list(shown.layers))),
            peaks=json.dumps(peaks, separators=(",", ":")), sprite=data_uri(_sprite(maps)),
            input=data_uri(overlays.encoded(small)), static=data_uri(overlays.encoded(static)),
            tokens=data_uri(_png(Image.fromarray(patches))), answers=_answers(shown.answers),
            said=f"Rollout: highest at patch row {top} of {rows}, column {left} of {columns}, with {share} % of it.",
        )
    )  # fmt: skip


def _maps(shown: Shown) -> tuple[Float[np.ndarray, "R C h w"], list[Peak]]:
    """All maps in the places that they have in the sprite, and of each where it is highest.

    The first row of the sprite holds both rollouts, each further row a layer: the mean over its heads, then the heads.
    """
    layers, heads = shown.heads.shape[:2]
    maps = np.zeros((layers + 1, heads + 1, *shown.rollout.shape), np.float32)
    maps[0, 0], maps[0, 1] = shown.rollout, shown.rollout_plain
    maps[1:, 0], maps[1:, 1:] = shown.heads.mean(axis=1), shown.heads
    far = np.zeros((layers + 1, heads + 1))
    far[1:, 0], far[1:, 1:] = shown.distances.mean(axis=1), shown.distances
    peaks: list[Peak] = []
    for each, distance in zip(maps.reshape(-1, *shown.rollout.shape), far.ravel(), strict=True):
        row, column = divmod(int(each.argmax()), each.shape[1])
        peaks.append((row + 1, column + 1, round(100 * float(each.max()), 1), round(float(distance), 1)))
    return maps, peaks


def _average(maps: Float[np.ndarray, "R C h w"], p: int) -> Float[np.ndarray, "R C h2 w2"]:
    """Means over p x p patches; over fewer at the right and at the bottom where p does not divide the grid."""
    for axis in (2, 3):
        starts = np.arange(0, maps.shape[axis], p)
        counts = np.diff([*starts, maps.shape[axis]])
        shape = [-1 if i == axis else 1 for i in range(4)]
        maps = np.add.reduceat(maps, starts, axis=axis) / counts.reshape(shape).astype(np.float32)
    return maps


def _sprite(maps: Float[np.ndarray, "R C h w"]) -> bytes:
    """The `overlays.levels` of all maps, side by side, as a PNG of LEVELS colors."""
    levels = np.round((LEVELS - 1) * overlays.levels(maps)).astype(np.uint8)
    rows, columns, height, width = levels.shape
    image = Image.fromarray(levels.transpose(0, 2, 1, 3).reshape(rows * height, columns * width))
    image.putpalette(ramp(LEVELS).tobytes())
    return _png(image)


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, format="PNG", optimize=True)
    return out.getvalue()


def _answers(answers: Sequence[tuple[str, float]]) -> str:
    if not answers:
        return "<p>The model has no head, so it gives no answer.</p>"
    rows = (
        f'<li><span class="name">{escape(name)}</span> <span class="share">{share:.1%}</span>'
        f'<span class="bar" style="width:{100 * share:.2f}%"></span></li>'
        for name, share in answers
    )
    return f'<ol aria-label="Answers, most probable first">{"".join(rows)}</ol>'


_MARKUP = Template("""<div class="viewer" data-sprite="$sprite" data-rows="$rows" data-columns="$columns"
 data-down="$down" data-across="$across" data-names="$names" data-peaks="$peaks">
<div class="seen">
<figure><img class="input $crisp" src="$input" width="$width" height="$height"
 alt="$name, as the model sees it: $wide by $high pixels."><figcaption>Input</figcaption></figure>
<figure><img class="crisp" src="$tokens" width="$width" height="$height"
 alt="The patches of $name in false colors: alike where the model's last tokens are alike."
><figcaption>Tokens, as colors</figcaption></figure>
</div>
<figure class="stage"><img class="static" src="$static" width="$width" height="$height"
 alt="$name under its attention rollout. $said"><canvas width="$width" height="$height" role="img" hidden></canvas>
<figcaption aria-live="polite">$said</figcaption></figure>
<div class="answers">$answers</div>
<fieldset hidden><legend>Which attention</legend>
<label><input type="radio" name="map$number" value="rollout" checked> rollout through all layers</label>
<label><input type="radio" name="map$number" value="plain"> the same, without the residual</label>
<label><input type="radio" name="map$number" value="layer"> one layer alone:</label>
<label class="slider"><span>Layer <output></output></span>
<input type="range" class="layer" min="1" max="$layers" value="$layers"></label>
<label class="slider"><span>Head <output></output></span>
<input type="range" class="head" min="0" max="$heads" value="0"></label>
</fieldset>
<noscript><p>The sliders over layers and heads need JavaScript.</p></noscript>
</div>""")

STYLE = """.viewer { display: grid; gap: 1rem 1.5rem; margin-top: 1rem; align-items: start;
  grid-template: "seen" "stage" "controls" "answers" / minmax(0, 1fr); }
.seen { grid-area: seen; display: grid; grid-template-columns: 1fr 1fr; gap: 0.9rem; }
.stage { grid-area: stage; }
.viewer figure { height: auto; padding: 0.6rem; }
.viewer figcaption { font-size: 0.9rem; text-wrap: pretty; }
.viewer img, canvas { width: 100%; height: auto; display: block; border-radius: 0.25rem; }
.viewer [hidden] { display: none; }
.stage figcaption { min-height: 4.2em; text-align: left; }
.answers { grid-area: answers; }
.answers ol { list-style: none; margin: 0; padding: 0; }
.answers li { display: grid; grid-template-columns: 1fr auto; gap: 0.1rem 1rem; margin-bottom: 0.6rem; }
.answers .name { overflow-wrap: anywhere; }
.share { font-variant-numeric: tabular-nums; }
.bar { grid-column: 1 / -1; height: 0.4rem; min-width: 2px; border-radius: 0.2rem; background: var(--accent); }
fieldset { grid-area: controls; min-width: 0; border: 1px solid var(--line); border-radius: 0.75rem; margin: 0;
  padding: 0.6rem 1rem 1rem; }
legend { color: var(--muted); font-size: 0.9rem; padding: 0 0.3rem; }
fieldset label { display: block; padding: 0.25rem 0; }
.slider { margin-left: 1.6rem; }
.slider span { display: flex; justify-content: space-between; }
.slider input { width: 100%; margin: 0.2rem 0 0; }
input { accent-color: var(--accent); }
input:focus-visible { outline: 3px solid var(--accent); outline-offset: 3px; border-radius: 0.25rem; }
@media (min-width: 52rem) { .viewer { grid-template: "seen stage answers" auto "seen stage controls" 1fr
  / minmax(0, 5fr) minmax(0, 10fr) minmax(0, 8fr); } .seen { grid-template-columns: 1fr; } }
"""

SCRIPT = """"use strict";
const surface = (width, height) => {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas.getContext("2d");
};

// The lightness of the image, which shows through a map: `amount` of it over the gray `base`.
const lightness = (image, width, height, base, amount) => {
  const gray = surface(width, height), mixed = surface(width, height);
  gray.imageSmoothingEnabled = !image.classList.contains("crisp");
  gray.drawImage(image, 0, 0, width, height);
  gray.globalCompositeOperation = "saturation";
  gray.fillStyle = "black";
  gray.fillRect(0, 0, width, height);
  mixed.fillStyle = base;
  mixed.fillRect(0, 0, width, height);
  mixed.globalAlpha = amount;
  mixed.drawImage(gray.canvas, 0, 0);
  return mixed.canvas;
};

const start = (viewer, sprite) => {
  const [image, canvas, told, choice, layer, head] =
    [".input", "canvas", ".stage figcaption", "fieldset", ".layer", ".head"].map((name) => viewer.querySelector(name));
  const [rows, columns, down, across, names, peaks] =
    ["rows", "columns", "down", "across", "names", "peaks"].map((name) => JSON.parse(viewer.dataset[name]));
  const { width, height } = canvas, view = canvas.getContext("2d"), tile = surface(columns, rows);
  const shade = lightness(image, width, height, "white", 0.55);
  const light = lightness(image, width, height, "black", 0.25);
  view.imageSmoothingQuality = "high";

  const show = () => {
    const map = choice.querySelector(":checked").value, alone = map === "layer";
    const [row, column] = alone ? [Number(layer.value), Number(head.value)] : [0, Number(map === "plain")];
    tile.drawImage(sprite, column * columns, row * rows, columns, rows, 0, 0, columns, rows);
    view.globalCompositeOperation = "source-over";
    view.drawImage(tile.canvas, 0, 0, width, height);
    view.globalCompositeOperation = "multiply";
    view.drawImage(shade, 0, 0);
    view.globalCompositeOperation = "lighter";
    view.drawImage(light, 0, 0);

    const which = Number(head.value) ? `head ${head.value}` : `mean of ${head.max} heads`;
    for (const [slider, name] of [[layer, names[layer.value - 1]], [head, which]]) {
      slider.setAttribute("aria-valuetext", name);
      slider.parentNode.querySelector("output").value = name;
    }
    const [y, x, share, pixels] = peaks[row * (Number(head.max) + 1) + column];
    const said = alone ? `Layer ${names[row - 1]}, ${which}` : map === "plain" ? "Rollout without residual" : "Rollout";
    const far = alone ? ` Patches gather from ${pixels.toFixed(1)} pixels away on average.` : "";
    told.textContent = `${said}: highest at patch row ${y} of ${down}, column ${x} of ${across}, ` +
      `with ${share} % of it.${far}`;
    canvas.setAttribute("aria-label", `${image.alt.split(", as the model")[0]} under a map of attention. ${said}.`);
  };
  choice.addEventListener("input", (event) => {
    if (event.target.type === "range") choice.querySelector("[value=layer]").checked = true;
    show();
  });
  show();
  viewer.querySelector(".static").hidden = true;
  canvas.hidden = choice.hidden = false;
};

for (const viewer of document.querySelectorAll(".viewer")) {
  const sprite = new Image();
  sprite.src = viewer.dataset.sprite;
  Promise.all([sprite.decode(), viewer.querySelector(".input").decode()]).then(() => start(viewer, sprite));
}
"""
