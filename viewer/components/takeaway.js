// A download button in the corner of every figure: PNG, SVG, CSV.

const LOOK_AGAIN = 500; // ms; Bokeh empties a figure before redrawing it

export function render({ model, el }) {
  el.style.display = "none";
  const outbox = new Outbox(model);
  const drawn = new Map(); // figure id -> its button

  function put({ id, label: name }) {
    const label = visible(name);
    const view = Bokeh.index.find_one_by_id(id);
    if (!view?.shadow_el) return;
    const menu = saveMenu(label, [
      ["PNG picture", async () => offer(await picture(view), named(view, ".png"))],
      ["SVG drawing", async () => offer(await drawing(view), named(view, ".svg"))],
      ["CSV numbers", () => outbox.post({ csv: id }), true],
    ], () => model.ready);
    menu.style.cssText = "position: absolute; right: 2px; top: 0; z-index: 20";
    view.shadow_el.append(menu);
    view.el.setAttribute("role", "group"); // a canvas is invisible to screen readers
    view.el.setAttribute("aria-label", label);
    drawn.set(id, menu);
  }

  function look() {
    for (const figure of model.figures) {
      if (!drawn.get(figure.id)?.isConnected) put(figure);
    }
  }

  const timer = setInterval(() => {
    if (el.isConnected) look();
    else clearInterval(timer);
  }, LOOK_AGAIN);
  model.on("msg:custom", handOver);
  return document.createElement("div");
}

const named = (view, ending) => fileName(view.model.title?.text?.text ?? view.model.title?.text ?? "", ending);

// Figures have a transparent background, on which text could be unreadable on other pages.
async function picture(view) {
  const { canvas } = view.export("png");
  const sheet = document.createElement("canvas");
  Object.assign(sheet, { width: canvas.width, height: canvas.height });
  const ink = sheet.getContext("2d");
  ink.fillStyle = paperOf(view.el);
  ink.fillRect(0, 0, sheet.width, sheet.height);
  ink.drawImage(canvas, 0, 0);
  return new Promise((resolve) => sheet.toBlob(resolve, "image/png"));
}

async function drawing(view) {
  const text = await (await view.export("svg").to_blob()).text();
  const inside = text.indexOf(">", text.indexOf("<svg")) + 1;
  const ground = `<rect width="100%" height="100%" fill="${paperOf(view.el)}"/>`;
  return new Blob([text.slice(0, inside), ground, text.slice(inside)], { type: "image/svg+xml" });
}
