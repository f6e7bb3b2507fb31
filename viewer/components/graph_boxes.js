// Draws and colours the boxes. A box is kept while its appearance stays the same, so that expanding
// a scope moves existing boxes instead of redrawing everything. In a large graph, boxes are drawn
// when they first come into view.

const MOVE_AT_MOST = 250; // above this number, boxes jump without animation
const DRAWN_AT_ONCE = 200; // above this number, boxes outside the stage are hidden
const BESIDE_STAGE = 40; // how far outside the stage boxes are drawn, in units of the scene
const SQUEEZE = 0.8; // a label is shortened if it would need a smaller width factor
const LABEL_SIZE = 12; // pixels, of the font that measures all text
const VALUE_SIZE = 10; // pixels

class Boxes {
  constructor(layer) {
    this.layer = layer;
    this.items = new Map(); // id -> { group or null, box, key, ins, outs, value, paint, hidden }
    this.heat = null;
    this.late = new Set(); // ids of boxes that do not have the colours of `heat` yet
    this.measure = document.createElement("canvas").getContext("2d");
    this.widths = new Map();
  }

  // Returns the element of a box, which this draws if necessary.
  get(id) {
    const item = this.items.get(id);
    return item && this.#build(item).group;
  }

  draw(index) {
    this.measure.font = `500 ${LABEL_SIZE}px ${getComputedStyle(this.layer).fontFamily || "sans-serif"}`;
    const moving = this.items.size > 0 && index.boxes.size <= MOVE_AT_MOST;
    this.layer.classList.toggle("moving", moving);
    for (const [id, { group }] of this.items) {
      if (!index.boxes.has(id)) {
        group?.remove();
        this.items.delete(id);
      }
    }
    for (const box of index.boxes.values()) this.#put(box, index);
  }

  #put(box, index) {
    const ins = index.dependencies(box.id).length;
    const outs = index.dependents(box.id).length;
    const key = JSON.stringify([box.label, box.kind, box.w, box.h, box.folded, box.count,
      box.repeat, box.no_in, box.no_out, box.title, box.plain, box.marks, ins, outs]);
    let item = this.items.get(box.id);
    if (item?.key !== key) {
      item?.group?.remove();
      item = { group: null, key, ins, outs, paint: null, hidden: false };
      this.items.set(box.id, item);
    }
    item.box = box;
    if (item.group) this.#move(item);
  }

  #move({ group, box }) { group.style.transform = `translate(${box.x}px, ${box.y}px)`; }

  #build(item) {
    if (item.group) return item;
    const group = this.#group(item.box, item.ins, item.outs);
    Object.assign(item, { group, ...parts(group) });
    this.#move(item);
    this.layer.append(group);
    return item;
  }

  #group(box, ins, outs) {
    const group = svgElement(null, "g", {
      class: `node kind-${/^[a-z]+$/.test(box.kind) ? box.kind : "other"}`,
      role: "button", tabindex: -1, "data-id": box.id, "aria-label": spoken(box, ins, outs),
    });
    const { w, h } = box;
    const round = Math.min(8, h / 4);
    if (box.folded && !box.plain) {
      for (const off of box.repeat > 1 ? [6, 3] : [3]) {
        svgElement(group, "rect", { class: "stack", x: off, y: -off, width: w - off * 0.6,
          height: h, rx: round });
      }
    }
    svgElement(group, "rect", { class: "shape", width: w, height: h, rx: round });
    if (box.no_in) this.#open(group, 0, h, round);
    if (box.no_out) this.#open(group, w, h, round);
    const badge = box.repeat > 1 ? `\u00d7${box.repeat}`
      : box.folded && !box.plain ? `${box.count}` : "";
    const room = w - 18 - (badge ? 7 + badge.length * 7 : 0);
    const middle = badge ? 9 + room / 2 : w / 2;
    const label = svgElement(group, "text", { class: "label", x: middle, y: h / 2 });
    this.#fit(label, visible(box.label), room);
    if (badge) {
      svgElement(group, "text", { class: box.repeat > 1 ? "badge times" : "badge", x: w - 9,
        y: h / 2 }).textContent = badge;
    }
    this.#marks(group, box);
    return group;
  }

  // Draws a dot for each parameter of a module; a click on it shows the parameter.
  #marks(group, { w, h, marks }) {
    (marks || []).slice(0, Math.floor((w - 8) / 9)).forEach((name, i) => {
      const mark = svgElement(group, "circle", { class: "mark", cx: 10 + 9 * i, cy: h, r: 3.2,
        "data-mark": name });
      svgElement(mark, "title", {}).textContent = visible(name);
    });
  }

  // Draws the dotted edge of a box without inputs or consumers.
  #open(group, x, h, round) {
    svgElement(group, "line", { class: "cover", x1: x, x2: x, y1: round, y2: h - round });
    svgElement(group, "line", { class: "open", x1: x, x2: x, y1: round, y2: h - round });
  }

  #width(text) {
    let width = this.widths.get(text);
    if (width === undefined) this.widths.set(text, width = this.measure.measureText(text).width);
    return width;
  }

  // Slightly squeezed letters are easier to read than a name with its middle cut out.
  #fit(label, text, room) {
    const width = this.#width(text);
    const squeezed = width > room && width * SQUEEZE <= room;
    label.textContent = squeezed ? text : this.#shortened(text, room);
    if (!squeezed) return;
    label.setAttribute("textLength", room);
    label.setAttribute("lengthAdjust", "spacingAndGlyphs");
  }

  #shortened(text, room) {
    if (this.#width(text) <= room) return text;
    let [head, tail] = [Math.ceil(text.length / 2), Math.floor(text.length / 2)];
    const cut = () => `${text.slice(0, head)}\u2026${text.slice(text.length - tail)}`;
    while (head + tail > 2 && this.#width(cut()) > room) {
      if (head > tail) head -= 1;
      else tail -= 1;
    }
    return cut();
  }

  // Colours boxes by a statistic, or by kind if `heat` is null.
  paint(heat, view) {
    this.heat = heat;
    this.late = new Set(this.items.keys());
    this.show(view);
  }

  // In a large graph, draws only the boxes inside `view` { left, top, right, bottom } and hides the
  // others: the browser would paint all of them again whenever one changes. They are coloured when
  // they are shown.
  show({ left, top, right, bottom }) {
    const all = this.items.size <= DRAWN_AT_ONCE;
    for (const [id, item] of this.items) {
      const { x, y, w, h } = item.box;
      const seen = all || (x <= right + BESIDE_STAGE && x + w >= left - BESIDE_STAGE
        && y <= bottom + BESIDE_STAGE && y + h >= top - BESIDE_STAGE);
      if (seen) this.#build(item);
      if (seen && this.late.has(id)) this.#paintBox(id);
      if (item.group) this.#hide(item, !seen && item.group.tabIndex < 0); // the Tab key must reach one
    }
  }

  #hide(item, hidden) {
    if (item.hidden === hidden) return;
    item.hidden = hidden;
    item.group.style.display = hidden ? "none" : "";
  }

  focus(id) {
    const item = this.#build(this.items.get(id));
    this.#hide(item, false);
    item.group.focus({ preventScroll: true });
  }

  // Shows and colours all boxes.
  finish() {
    for (const [id, item] of this.items) {
      this.#build(item);
      if (this.late.has(id)) this.#paintBox(id);
      this.#hide(item, false);
    }
  }

  // Sets colours on the elements themselves, because inherited colours make the browser restyle
  // everything below the group.
  #paintBox(id) {
    this.late.delete(id);
    const item = this.items.get(id);
    if (!item) return;
    const paint = this.heat ? this.heat[id] || { missing: true } : null;
    const key = JSON.stringify(paint);
    if (item.paint === key) return;
    item.paint = key;
    const fill = paint ? safeColour(paint.fill, "") : "";
    const { classList } = item.group;
    classList.toggle("heated", fill !== "");
    classList.toggle("missing", paint !== null && fill === "");
    item.shape.style.fill = fill;
    this.#hatch(item, paint?.hatched && fill !== "");
    this.#value(item, fill === "" ? "" : `${paint.text ?? ""}`);
    const ink = fill === "" ? "" : inkOn(fill);
    for (const text of [item.label, item.badge, item.value]) if (text) text.style.fill = ink;
  }

  #hatch(item, wanted) {
    item.group.classList.toggle("hatched", !!wanted);
    if (!wanted) item.hatch?.remove();
    else if (!item.hatch?.isConnected) {
      item.hatch = item.shape.cloneNode();
      item.hatch.setAttribute("class", "hatch");
      item.hatch.removeAttribute("style");
      item.shape.after(item.hatch);
    }
  }

  #value(item, text) {
    item.group.classList.toggle("valued", text !== "");
    const { w, h } = item.box;
    if (!item.value) {
      if (!text) return;
      item.value = svgElement(null, "text", { class: "value", x: w / 2, y: h / 2 });
      item.label.after(item.value);
    }
    const shown = visible(text);
    item.value.textContent = shown;
    const squeezed = this.#width(shown) * VALUE_SIZE > (w - 8) * LABEL_SIZE;
    if (squeezed) {
      item.value.setAttribute("textLength", w - 8);
      item.value.setAttribute("lengthAdjust", "spacingAndGlyphs");
    } else item.value.removeAttribute("textLength");
  }
}

function parts(group) {
  return { shape: group.querySelector(".shape"), label: group.querySelector(".label"),
    badge: group.querySelector(".badge"), value: null, hatch: null };
}

// Returns what is drawn as part of a module, without the module's own name.
function partsOf({ id, members }) {
  return members.slice(1).map((name) =>
    name.startsWith(`${id}.`) ? name.slice(id.length + 1) : name.slice(name.lastIndexOf(".") + 1));
}

function spoken(box, ins, outs) {
  const fold = box.repeat > 1
    ? `${box.repeat} identical blocks folded, ${box.count} nodes`
    : box.plain ? `with ${partsOf(box).join(" and ")}`
    : box.folded ? `${box.count} nodes folded` : "";
  return [box.id, box.kind, fold, `${ins} in`, `${outs} out`].filter(Boolean).map(visible).join(", ");
}

// Returns black or white, whichever contrasts more with the colour (relative luminance, WCAG 2).
function inkOn(colour) {
  const hex = colour.length === 4 ? colour.replace(/[0-9a-f]/gi, "$&$&") : colour;
  const channel = (i) => {
    const c = parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16) / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  };
  const light = 0.2126 * channel(0) + 0.7152 * channel(1) + 0.0722 * channel(2);
  return light > 0.179 ? "#101014" : "#ffffff";
}
