"use strict";
(() => {
  const surface = (width, height) => {
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    return canvas.getContext("2d");
  };

  // The gray image under a map: `amount` of it over the gray `base`.
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
    const [image, canvas, caption, choice, layer, head] =
      [".input", "canvas", ".stage figcaption", "fieldset", ".layer", ".head"].map((name) => viewer.querySelector(name));
    const [rows, columns, names, peaks] =
      ["rows", "columns", "names", "peaks"].map((name) => JSON.parse(viewer.dataset[name]));
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
      const title = alone ? `Layer ${names[row - 1]}, ${which}` : map === "plain" ? "Rollout without residual" : "Rollout";
      const distance = alone ? ` Patches gather from ${pixels.toFixed(1)} pixels away on average.` : "";
      caption.textContent =
        `${title}: highest at patch row ${y} of ${rows}, column ${x} of ${columns}, with ${share.toFixed(1)}% of it.${distance}`;
      canvas.setAttribute("aria-label", `${image.alt.split(", as the model")[0]} under a map of attention. ${title}.`);
    };
    choice.oninput = (event) => {
      if (event.target.type === "range") choice.querySelector("[value=layer]").checked = true;
      show();
    };
    show();
    choice.hidden = false;
  };

  // Also viewers that are added later, or get another image.
  const started = new WeakMap();
  const startAll = () => {
    for (const viewer of document.querySelectorAll(".viewer[data-sprite]")) {
      if (started.get(viewer) === viewer.dataset.sprite) continue;
      started.set(viewer, viewer.dataset.sprite);
      const sprite = new Image();
      sprite.src = viewer.dataset.sprite;
      Promise.all([sprite.decode(), viewer.querySelector(".input").decode()]).then(() => start(viewer, sprite));
    }
  };
  startAll();
  new MutationObserver(startAll).observe(document, {
    childList: true, subtree: true, attributes: true, attributeFilter: ["data-sprite"],
  });
})();
