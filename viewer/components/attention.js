// Attention weights: a matrix per head, lines between tokens, and thumbnails of all layers and heads.

const COLOURS = ["#3f6fd8", "#d9692e", "#2a9d7f", "#a25bc7", "#b58a1c", "#4aa3c7", "#c2497f", "#6f7d95"];
const WAYS = [["matrix", "Matrices"], ["heads", "Heads"], ["model", "Model"], ["neurons", "Neurons"]];
const LINE_HEIGHT = 18;
const FAINTEST = 0.04; // share of the largest weight below which no line is drawn
const THUMB = 44; // pixels
const LABELLED = 9; // smallest size in pixels of a cell with a token's label

const DIGITS = 3; // of a number that is said
const SIGNED = ["#2463ad", "#d1561f"]; // the colours of negative and positive numbers
const WIDEST = 320; // pixels of the vectors of a head

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
    this.query = 0; // whose products with the keys are shown
    for (const name of ["shown", "layers", "chosen", "missing", "neural", "neurons"]) model.on(name, () => this.#soon());
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
    if (this.way === "neurons" && !this.model.neural) this.way = "matrix";
    for (const [way, label] of WAYS) {
      if (way === "neurons" && !this.model.neural) continue;
      this.#button(ways, label, this.way === way, () => this.#show(way));
    }
    this.weights = bytes(shown.weights);
    this.body = htmlElement(this.root, "div", this.way);
    if (this.way === "model") return this.#drawModel();
    if (this.way === "neurons") return this.#drawNeurons(shown);
    this.#drawChips(head, shown.heads);
    if (this.way === "matrix") this.#drawMatrices(shown);
    else this.#drawTokens(shown);
  }

  #show(way) {
    if ((way === "neurons") !== (this.way === "neurons")) {
      this.outbox.post({ neurons: way === "neurons" ? 0 : -1 });
    }
    this.way = way;
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
      // A weight is known to half of a 255th of the largest one.
      const known = Math.max(0, Math.floor(-Math.log10(shown.largest[head] / 510 || 1)));
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
          + `key ${column} \u201c${shown.keys[column]}\u201d \u00b7 ${weight.toFixed(known)}`);
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

  // ---- the query of a token, the keys, and their products, neuron by neuron

  #drawNeurons(shown) {
    const { neurons } = this.model;
    if (!neurons) return void htmlElement(this.body, "p", "said", "No queries and keys at this step.");
    const heads = htmlElement(this.body, "div", "chips heads-chips");
    for (let head = 0; head < shown.heads; head += 1) {
      const chip = this.#button(heads, `${head}`, head === neurons.head, () => this.outbox.post({ neurons: head }));
      chip.setAttribute("aria-label", `Head ${head}`);
      chip.style.setProperty("--head", COLOURS[head % COLOURS.length]);
    }
    const [queries, keys, weights] = ["query", "key", "weights"].map((name) => floats(neurons[name]));
    const { width } = neurons;
    const row = this.query = Math.min(this.query, shown.queries.length - 1);
    const query = queries.subarray(row * width, (row + 1) * width);
    const products = keys.map((value, i) => value * query[i % width]);
    const many = shown.keys.length;
    const said = htmlElement(this.body, "p", "said", "Choose a query; point at a number.");
    const grid = htmlElement(this.body, "div", "neurons-grid");
    for (const title of ["query", "q", "key", "k", "q \u00d7 k", "q \u00b7 k", "weight"]) {
      htmlElement(grid, "span", "facts", title);
    }
    const list = htmlElement(grid, "div", "column");
    shown.queries.forEach((word, i) => {
      this.#button(list, word, i === row, () => { this.query = i; }).setAttribute("aria-label", `Query ${i}`);
    });
    const most = Math.max(...[queries, keys].map(largest));
    const say = (what, values) => (key, neuron) => {
      const value = values[key * width + neuron].toPrecision(DIGITS);
      const of = what === "q" ? `query ${row}` : `key ${key} \u201c${shown.keys[key]}\u201d`;
      said.textContent = visible(`${of} \u00b7 neuron ${neuron} \u00b7 ${what} ${value}`);
    };
    vectors(grid, query, 1, most, say("q", query));
    htmlElement(grid, "div", "column").append(...shown.keys.map((word) => htmlElement(null, "span", "", word)));
    vectors(grid, keys, many, most, say("k", keys));
    vectors(grid, products, many, largest(products), say("q \u00d7 k", products));
    const [dots, shares] = [htmlElement(grid, "div", "column"), htmlElement(grid, "div", "column")];
    for (let key = 0; key < many; key += 1) {
      const dot = products.subarray(key * width, (key + 1) * width).reduce((sum, each) => sum + each, 0);
      htmlElement(dots, "span", "", dot.toPrecision(DIGITS));
      htmlElement(shares, "span", "", weights[row * many + key].toPrecision(DIGITS));
    }
  }

  #choose(layer, head, heads) {
    this.#show("heads");
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

const floats = (text) => new Float32Array(bytes(text).buffer);
const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

// Draws vectors below one another, on a scale from -most to most, and says what is pointed at.
function vectors(parent, values, rows, most, say) {
  const width = values.length / rows;
  const canvas = htmlElement(parent, "canvas", "vectors");
  Object.assign(canvas, { width, height: rows });
  const across = Math.max(2, Math.min(14, Math.floor(WIDEST / width)));
  Object.assign(canvas.style, { width: `${width * across}px`, height: `${rows * LINE_HEIGHT}px` });
  const image = new ImageData(width, rows);
  values.forEach((value, i) => {
    const share = Number.isFinite(value) && most ? Math.abs(value) / most : 0;
    image.data.set([...rgb(SIGNED[value < 0 ? 0 : 1]), 255 * share], 4 * i);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    const [row, column] = [Math.floor(offsetY / LINE_HEIGHT), Math.floor(offsetX / across)];
    if (row >= 0 && column >= 0 && row < rows && column < width) say(row, column);
  });
}

export function render({ model }) {
  return new AttentionPage(model).root;
}
