// The elements around the drawing: legend, scope bands and minimap.

const KINDS = ["input", "parameter", "buffer", "computed", "target", "loss"];
const BAND_ROWS = 3; // deeper scopes can be collapsed by keyboard only
const BAND_HEIGHT = 20;

// Fills the legend: visible kinds, or the colour scale of the statistic.
function drawLegend(element, index, heat, legend) {
  element.replaceChildren();
  element.title = legend?.help || "";
  element.dataset.painted = heat || legend ? legend?.title || "" : "kind";
  if (heat) return drawScale(element, index, heat, legend);
  if (legend) return drawRamp(element, legend);
  const present = new Set([...index.boxes.values()].map((box) => box.kind));
  for (const kind of KINDS.filter((name) => present.has(name))) {
    const item = htmlElement(element, "span", `key kind-${kind}`);
    htmlElement(item, "span", "swatch");
    htmlElement(item, "span", "", kind);
  }
}

function drawRamp(element, legend) {
  htmlElement(element, "span", "title", legend.title);
  if (!legend.colors?.length) return;
  if (legend.log) htmlElement(element, "span", "end", "log scale");
  htmlElement(element, "span", "end", legend.low);
  const colours = (legend.colors || []).map((colour) => safeColour(colour, "#888888"));
  const ramp = htmlElement(element, "span", "ramp");
  ramp.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
  htmlElement(element, "span", "end", legend.high);
}

function drawScale(element, index, heat, legend) {
  const paints = [...index.boxes.keys()].map((id) => heat[id]);
  if (legend) drawRamp(element, legend);
  const extra = (name, text) => {
    const item = htmlElement(element, "span", "key");
    htmlElement(item, "span", `swatch ${name}`);
    htmlElement(item, "span", "", text);
  };
  if (paints.some((paint) => paint?.hatched)) extra("hatched", "non-finite");
  if (paints.some((paint) => !paint)) extra("missing", "not recorded");
}

// Draws expanded scopes as brackets above their columns. A click on a bracket collapses its scope.
// Each row of a drawing has its own. Those of a single row stay in sight if it is scrolled away.
class Bands {
  constructor(element, close) {
    this.element = element;
    this.close = close;
    this.items = [];
  }

  // Returns the height that the drawing must leave free at the top.
  draw(index) {
    this.element.replaceChildren();
    const shown = index.bands.filter((band) => band.level < BAND_ROWS);
    this.rows = index.rows;
    this.upper = Math.min(...[...index.boxes.values()].map((box) => box.y));
    this.lines = this.rows.map((_, row) =>
      1 + Math.max(-1, ...shown.filter((band) => band.row === row).map((band) => band.level)));
    this.items = shown.map((band) => {
      const button = htmlElement(this.element, "button", "band");
      button.type = "button";
      button.dataset.scope = band.id;
      button.title = `Fold ${visible(band.id)}`;
      button.setAttribute("aria-label", `Fold ${visible(band.id)}`);
      const label = htmlElement(button, "span", "text", band.label);
      button.addEventListener("click", () => this.close(band.id));
      return { band, button, label };
    });
    return this.rows.length > 1 ? 0 : (this.lines[0] ?? 0) * BAND_HEIGHT;
  }

  // Returns the upper end of a band in pixels; null: there is no room for it.
  #top(band, camera) {
    if (this.rows.length < 2) {
      const above = camera.y + (this.upper - 6) * camera.k - 4;
      const lines = this.lines[0] ?? 1;
      return Math.max(6 + band.level * BAND_HEIGHT, above - (lines - band.level) * BAND_HEIGHT);
    }
    const [top] = this.rows[band.row];
    const above = band.row ? this.rows[band.row - 1][1] : 0;
    const lines = Math.min(this.lines[band.row], Math.floor(((top - above) * camera.k) / BAND_HEIGHT));
    if (band.level >= lines) return null;
    return camera.y + (top - 6) * camera.k - 4 - (lines - band.level) * BAND_HEIGHT;
  }

  place(camera) {
    for (const { band, button, label } of this.items) {
      const top = this.#top(band, camera);
      const left = camera.x + band.x * camera.k;
      const right = left + band.w * camera.k;
      const hidden = right < 4 || left > camera.size.width - 4 || right - left < 7 || top === null;
      button.style.display = hidden ? "none" : "";
      if (hidden) continue;
      const start = Math.max(left, 2); // keep the name visible while its scope is
      button.style.top = `${top}px`;
      button.style.left = `${start}px`;
      button.style.width = `${Math.min(right, camera.size.width - 2) - start}px`;
      button.classList.toggle("cut-left", start > left);
      button.classList.toggle("cut-right", right > camera.size.width - 2);
      label.style.display = right - left < 22 ? "none" : "";
    }
  }
}

const MAP = { width: 150, height: 26 }; // of the minimap, in pixels

// The minimap shows the whole drawing and marks the visible part. Hidden if all is visible. It is
// below the drawing, so that it covers nothing.
class Minimap {
  constructor(element, camera) {
    this.element = element;
    this.camera = camera;
    this.canvas = htmlElement(element, "canvas");
    this.view = htmlElement(element, "div", "view");
    const go = (event) => {
      const at = this.canvas.getBoundingClientRect();
      const x = (event.clientX - at.left - this.left) / this.scale;
      const y = (event.clientY - at.top - this.top) / this.scale;
      const { k, inner } = camera;
      camera.pan(inner.x + inner.width / 2 - x * k - camera.x,
        inner.y + inner.height / 2 - y * k - camera.y);
    };
    element.addEventListener("pointerdown", (event) => {
      element.setPointerCapture(event.pointerId);
      go(event);
    });
    element.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
  }

  draw(index, heat) {
    const { width, height } = MAP;
    const pixels = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * pixels, height: height * pixels });
    const { scene } = this.camera;
    this.scale = Math.min((width - 4) / scene.width, (height - 4) / scene.height);
    this.left = (width - scene.width * this.scale) / 2;
    this.top = (height - scene.height * this.scale) / 2;
    const style = heat ? null : getComputedStyle(this.element); // makes the browser restyle the page
    const colours = heat ? {} : Object.fromEntries(
      KINDS.map((kind) => [kind, style.getPropertyValue(`--kind-${kind}`)]));
    const paper = this.canvas.getContext("2d");
    paper.setTransform(pixels * this.scale, 0, 0, pixels * this.scale,
      pixels * this.left, pixels * this.top);
    const least = 1.5 / this.scale; // minimum size, so that deep networks stay visible
    for (const box of index.boxes.values()) {
      paper.fillStyle = heat ? safeColour(heat[box.id]?.fill, "#8888") : colours[box.kind] || "#888";
      paper.fillRect(box.x, box.y, Math.max(least, box.w), Math.max(least, box.h));
    }
  }

  place() {
    const { camera } = this;
    this.element.classList.toggle("hidden", camera.fits);
    const clamp = (value, most) => Math.min(most, Math.max(0, value));
    const x1 = clamp(this.left - (camera.x / camera.k) * this.scale, MAP.width);
    const y1 = clamp(this.top - (camera.y / camera.k) * this.scale, MAP.height);
    const x2 = clamp(this.left + ((camera.size.width - camera.x) / camera.k) * this.scale, MAP.width);
    const y2 = clamp(this.top + ((camera.size.height - camera.y) / camera.k) * this.scale, MAP.height);
    Object.assign(this.view.style, { left: `${x1}px`, top: `${y1}px`,
      width: `${Math.max(3, x2 - x1)}px`, height: `${Math.max(3, y2 - y1)}px` });
  }
}
