// Attention weights: a matrix per head, lines between tokens, and thumbnails of all layers and heads.

const COLOURS = ["#3f6fd8", "#d9692e", "#2a9d7f", "#a25bc7", "#b58a1c", "#4aa3c7", "#c2497f", "#6f7d95"];
const WAYS = [["matrix", "Matrices"], ["heads", "Heads"], ["model", "Model"]];
const LINE_HEIGHT = 18;
const FAINTEST = 0.04; // share of the largest weight below which no line is drawn
const THUMB = 44; // pixels
const LABELLED = 9; // smallest size in pixels of a cell with a token's label

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

class AttentionPage {
  constructor(model) {
    this.model = model;
    this.outbox = new Outbox(model);
    this.way = "matrix";
    this.off = new Set(); // heads that the user has switched off
    this.near = null; // token under the pointer: [side, index]
    this.root = htmlElement(null, "div", "attention");
    for (const name of ["shown", "layers", "chosen", "missing"]) model.on(name, () => this.#soon());
    this.#draw();
  }

  #soon() {
    if (this.due) return;
    this.due = true;
    queueMicrotask(() => {
      this.due = false;
      this.#draw();
    });
  }

  /** Says why there are no weights. Parts between backticks are code. */
  #note(text) {
    const note = htmlElement(this.root, "div", "missing");
    text.split("`").forEach((part, i) => htmlElement(note, i % 2 ? "code" : "span", "", part));
  }

  #draw() {
    const { shown, missing } = this.model;
    this.root.replaceChildren();
    if (missing || !shown) return void this.#note(missing || "");
    const head = htmlElement(this.root, "header");
    htmlElement(head, "b", "", shown.name);
    htmlElement(head, "span", "facts", shown.facts);
    const ways = htmlElement(head, "div", "chips");
    for (const [way, label] of WAYS) {
      this.#button(ways, label, this.way === way, () => { this.way = way; });
    }
    this.weights = bytes(shown.weights);
    this.body = htmlElement(this.root, "div", this.way);
    if (this.way === "model") return this.#drawModel();
    this.#drawChips(head, shown.heads);
    if (this.way === "matrix") this.#drawMatrices(shown);
    else this.#drawTokens(shown);
  }

  #button(parent, text, pressed, act) {
    const button = htmlElement(parent, "button", "", text);
    button.type = "button";
    button.setAttribute("aria-pressed", String(pressed));
    button.addEventListener("click", () => {
      act();
      this.#draw();
    });
    return button;
  }

  #drawChips(parent, heads) {
    const chips = htmlElement(parent, "div", "chips heads-chips");
    for (let head = 0; head < heads; head += 1) {
      const chip = this.#button(chips, `${head}`, !this.off.has(head), () => {
        if (!this.off.delete(head)) this.off.add(head);
      });
      chip.setAttribute("aria-label", `Head ${head}`);
      chip.style.setProperty("--head", COLOURS[head % COLOURS.length]);
    }
  }

  #weight({ queries, keys }, head, row, column) {
    return this.weights[(head * queries.length + row) * keys.length + column] / 255;
  }

  // ---- a matrix per head

  #drawMatrices(shown) {
    const maps = htmlElement(this.body, "div", "maps");
    const said = htmlElement(this.body, "p", "said", "Rows are queries; columns are keys.");
    const [rows, columns] = [shown.queries.length, shown.keys.length];
    const cell = Math.max(2, Math.min(22, Math.floor(260 / Math.max(rows, columns))));
    for (let head = 0; head < shown.heads; head += 1) {
      if (this.off.has(head)) continue;
      const figure = htmlElement(maps, "figure", "map");
      const most = Number(shown.largest[head]).toPrecision(2);
      htmlElement(figure, "figcaption", "", `head ${head} \u00b7 up to ${most}`);
      const values = this.weights.subarray(head * rows * columns, (head + 1) * rows * columns);
      const frame = htmlElement(figure, "div", "labelled");
      if (cell >= LABELLED) labels(frame, shown, cell);
      const canvas = painted(frame, values, rows, columns, head, cell);
      canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
        const [row, column] = [Math.floor(offsetY / cell), Math.floor(offsetX / cell)];
        if (row < 0 || column < 0 || row >= rows || column >= columns) return;
        const weight = this.#weight(shown, head, row, column) * shown.largest[head];
        said.textContent = visible(`head ${head} \u00b7 query ${row} \u201c${shown.queries[row]}\u201d \u2192 `
          + `key ${column} \u201c${shown.keys[column]}\u201d \u00b7 ${weight.toPrecision(3)}`);
      });
    }
  }

  // ---- lines between tokens

  #drawTokens(shown) {
    const grid = htmlElement(this.body, "div", "tokens");
    const list = (labels, side) => {
      const items = htmlElement(grid, "ol");
      labels.forEach((label, i) => {
        const item = htmlElement(items, "li", "", label);
        item.dataset.side = side;
        item.addEventListener("pointerenter", () => this.#point(shown, [side, i]));
        item.addEventListener("pointerleave", () => this.#point(shown, null));
      });
      return items;
    };
    const left = list(shown.queries, 0);
    const height = LINE_HEIGHT * Math.max(shown.queries.length, shown.keys.length);
    this.lines = svgElement(grid, "svg", { width: 240, height, role: "img",
      "aria-label": "Lines from each query to the keys that it attends to" });
    const right = list(shown.keys, 1);
    this.items = [left, right].map((items) => [...items.children]);
    this.#drawLines(shown);
  }

  #point(shown, near) {
    this.near = near;
    this.#drawLines(shown);
  }

  #drawLines(shown) {
    this.lines.replaceChildren();
    const middle = (i) => (i + 0.5) * LINE_HEIGHT;
    const heads = [...Array(shown.heads).keys()].filter((head) => !this.off.has(head));
    shown.queries.forEach((_, row) => shown.keys.forEach((_, column) => {
      if (this.near && this.near[1] !== (this.near[0] ? column : row)) return;
      for (const head of heads) {
        const weight = this.#weight(shown, head, row, column);
        if (weight < FAINTEST) continue;
        const line = svgElement(this.lines, "line", { x1: 0, y1: middle(row), x2: 240, y2: middle(column),
          "data-head": head, "stroke-opacity": this.near ? weight : weight / Math.sqrt(heads.length) });
        line.style.stroke = COLOURS[head % COLOURS.length];
      }
    }));
    this.items.forEach((items, side) => items.forEach((item, i) =>
      item.classList.toggle("near", this.near?.[0] === side && this.near[1] === i)));
  }

  // ---- all layers and heads

  #drawModel() {
    const table = htmlElement(this.body, "table", "grid");
    this.model.layers.forEach(({ name, heads, rows, columns, weights }, layer) => {
      const line = htmlElement(table, "tr", layer === this.model.chosen ? "chosen" : "");
      htmlElement(line, "th", "", name);
      const all = bytes(weights);
      for (let head = 0; head < heads; head += 1) {
        const thumb = htmlElement(line, "td", "thumb");
        const button = this.#button(thumb, "", false, () => this.#choose(layer, head, heads));
        button.setAttribute("aria-label", `${visible(name)}, head ${head}`);
        button.removeAttribute("aria-pressed");
        const values = all.subarray(head * rows * columns, (head + 1) * rows * columns);
        painted(button, values, rows, columns, head, THUMB / Math.max(rows, columns));
      }
    });
  }

  #choose(layer, head, heads) {
    this.way = "heads";
    this.off = new Set([...Array(heads).keys()].filter((other) => other !== head));
    if (layer !== this.model.chosen) this.outbox.post({ layer });
  }
}

// Writes the tokens next to and above a matrix.
function labels(parent, { queries, keys }, cell) {
  for (const [side, words] of [["across", keys], ["down", queries]]) {
    const list = htmlElement(parent, "div", `labels ${side}`);
    list.style.setProperty("--cell", `${cell}px`);
    for (const word of words) htmlElement(list, "span", "", word);
  }
}

// Draws a map with square cells in the colour of its head, from transparent to opaque.
function painted(parent, values, rows, columns, head, cell) {
  const canvas = htmlElement(parent, "canvas");
  Object.assign(canvas, { width: columns, height: rows });
  Object.assign(canvas.style, { width: `${columns * cell}px`, height: `${rows * cell}px` });
  const [red, green, blue] = rgb(COLOURS[head % COLOURS.length]);
  const image = new ImageData(columns, rows);
  values.forEach((value, i) => image.data.set([red, green, blue, value], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

export function render({ model }) {
  return new AttentionPage(model).root;
}
