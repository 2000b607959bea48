"use strict";
(() => {
  const part = (id) => document.getElementById(id);
  const [checkpoint, upload, result] = ["checkpoint", "upload", "result"].map(part);
  let image = null, latest = 0;

  const send = async () => {
    const query = new URLSearchParams({ checkpoint: checkpoint.value, name: image?.name ?? "" });
    const body = image?.slice(0, Number(upload.dataset.limit) + 1);  // the server refuses what is longer than its limit
    const response = await fetch(`inspect?${query}`, { method: "POST", body: body ?? "" });
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  };

  const show = async () => {
    const request = ++latest;
    result.setAttribute("aria-busy", "true");
    part("message").textContent = "Computing …";
    let parts;
    try {
      parts = await send();
    } catch (error) {
      parts = { message: "The server does not respond: start it again.", result: "" };
      console.warn(error);
    }
    if (request !== latest) return;  // a later request shows its own response
    for (const [id, text] of Object.entries(parts)) part(id).innerHTML = text;
    result.hidden = !parts.result;
    result.setAttribute("aria-busy", "false");
  };

  const choose = (files) => {
    if (!files.length) return;
    image = files[0];
    show();
  };

  upload.addEventListener("change", () => choose(upload.files));
  checkpoint.addEventListener("change", show);
  for (const example of document.querySelectorAll(".examples button")) {
    const bytes = Uint8Array.from(atob(example.querySelector("img").src.split(",")[1]), (c) => c.charCodeAt(0));
    example.addEventListener("click", () => choose([new File([bytes], example.dataset.name)]));
  }
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    choose(event.dataTransfer.files);
  });
  show();
})();
