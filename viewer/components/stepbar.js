// The bar of recorded steps. Steps arrive as arithmetic runs (start, stride, count), so 100,000
// regular steps are three numbers. Positions in between are computed, not stored.

const LEFT = 10; // margin at both ends of the axis, for the handle
const RIGHT = 14;
const AXIS = 24; // height of the axis line
const TICK_GAP = 2.5; // px; closer ticks merge into a solid bar

// Formats numbers with thin spaces between thousands, as everywhere on the page.
const counted = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");

class Steps {
  constructor(runs) {
    this.runs = [];
    this.count = 0;
    for (let i = 0; i + 2 < runs.length; i += 3) {
      const [start, stride, count] = runs.slice(i, i + 3);
      this.runs.push({ start, stride, count, at: this.count, last: start + stride * (count - 1) });
      this.count += count;
    }
    this.first = this.runs[0]?.start ?? 0;
    this.last = this.runs.at(-1)?.last ?? 0;
  }

  // The step at a position.
  step(index) {
    const run = this.#search((r) => r.at + r.count > index);
    return run.start + run.stride * (index - run.at);
  }

  // The position of the recorded step nearest to `value`.
  nearest(value) {
    if (value >= this.last) return this.count - 1;
    const run = this.#search((r) => r.last >= value);
    const inside = run.stride ? Math.ceil((value - run.start) / run.stride) : 0;
    const above = run.at + Math.max(0, Math.min(run.count - 1, inside));
    const below = Math.max(0, above - 1);
    return value - this.step(below) < this.step(above) - value ? below : above;
  }

  // Returns the first run for which `holds` is true. It must then be true for all later runs.
  #search(holds) {
    let [low, high] = [0, this.runs.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (holds(this.runs[middle])) high = middle;
      else low = middle + 1;
    }
    return this.runs[low];
  }
}

class StepBar {
  constructor(model, view) {
    Object.assign(this, { model, view });
    this.outbox = new Outbox(model);
    this.steps = new Steps(model.runs);
    this.index = model.index;
    this.#build();
    this.#listen();
    new ResizeObserver(() => this.#draw()).observe(this.track);
    onPaper(this.root, () => this.#draw());
  }

  #build() {
    this.root = htmlElement(null, "div", "stepbar");
    const buttons = htmlElement(this.root, "div", "buttons");
    this.back = this.#button(buttons, "\u25c0\ufe0e", "Previous recorded step ( , ); with Shift, ten steps back");
    this.next = this.#button(buttons, "\u25b6\ufe0e", "Next recorded step ( . ); with Shift, ten steps forward");
    const text = htmlElement(this.root, "div", "text");
    htmlElement(text, "span", "word", "step ");
    this.number = htmlElement(text, "b", "number");
    this.position = htmlElement(text, "span", "position");
    this.track = htmlElement(this.root, "div", "track");
    this.track.tabIndex = 0;
    for (const [name, value] of Object.entries({ role: "slider", "aria-label": "Step",
      "aria-orientation": "horizontal" })) this.track.setAttribute(name, value);
    this.svg = svgElement(this.track, "svg", { "aria-hidden": "true" });
    this.axis = svgElement(this.svg, "path", { class: "axis" });
    this.dense = svgElement(this.svg, "path", { class: "dense" });
    this.ticks = svgElement(this.svg, "path", { class: "ticks" });
    this.labels = svgElement(this.svg, "g", { class: "labels" });
    this.marks = svgElement(this.svg, "g", { class: "marks" });
    this.handle = htmlElement(this.track, "div", "handle");
    this.bubble = htmlElement(this.track, "div", "bubble");
    this.bubble.hidden = true;
    this.follow = this.#button(htmlElement(this.root, "div", "buttons"), "Follow",
      "Always show the newest recorded step");
    htmlElement(this.follow, "span", "lamp");
  }

  #button(parent, text, title) {
    const button = htmlElement(parent, "button", "", text);
    Object.assign(button, { type: "button", title });
    button.setAttribute("aria-label", title);
    return button;
  }

  // ---- drawing

  get scale() {
    return Math.max(1, this.width - LEFT - RIGHT) / Math.max(1, this.steps.last - this.steps.first);
  }

  #x(step) { return LEFT + (step - this.steps.first) * this.scale; }

  #draw() {
    this.width = this.track.clientWidth;
    if (!this.width) return; // not visible
    this.root.dataset.drawn = this.steps.count;
    this.axis.setAttribute("d", `M${LEFT} ${AXIS}H${this.width - RIGHT}`);
    this.#drawTicks();
    this.#drawLabels();
    this.#drawMarks();
    this.#drawHandle();
  }

  // Draws single ticks where they are distinguishable, and a solid bar elsewhere.
  #drawTicks() {
    let [ticks, dense, end, stretch] = ["", "", -Infinity, null];
    const close = () => {
      if (stretch) dense += `M${stretch[0]} ${AXIS}H${stretch[1]}`;
      stretch = null;
    };
    for (const { start, last, stride, count } of this.steps.runs) {
      const [x1, x2] = [this.#x(start), this.#x(last)];
      if (stride * this.scale < TICK_GAP && count > 1 || x1 - end < TICK_GAP) {
        if (stretch && x1 - stretch[1] < TICK_GAP) stretch[1] = x2;
        else { close(); stretch = [x1, x2]; }
      }
      const step = Math.max(1, Math.ceil(TICK_GAP / Math.max(1e-9, stride * this.scale)));
      for (let i = 0; i < count; i += step) {
        const x = this.#x(start + stride * i);
        if (x - end < TICK_GAP) continue;
        ticks += `M${x.toFixed(1)} ${AXIS - 4}v8`;
        end = x;
      }
    }
    close();
    this.ticks.setAttribute("d", ticks);
    this.dense.setAttribute("d", dense);
  }

  #drawLabels() {
    this.labels.replaceChildren();
    if (!this.steps.count) return;
    const { first, last } = this.steps;
    const raw = (last - first) / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(Math.max(1, raw)));
    const unit = [1, 2, 5, 10].map((m) => m * power).find((value) => value >= raw) ?? 1;
    for (let value = Math.ceil(first / unit) * unit; value <= last; value += unit) {
      const x = this.#x(value);
      const anchor = x > this.width - 30 ? "end" : x < 26 ? "start" : "middle";
      const from = anchor === "end" ? x + RIGHT : anchor === "start" ? x - LEFT + 2 : x;
      svgElement(this.labels, "text", { x: from, y: AXIS + 19, "text-anchor": anchor })
        .textContent = counted(value);
    }
  }

  #drawMarks() {
    this.marks.replaceChildren();
    const taken = new Set();
    for (const { index, color, title } of this.model.marks) {
      if (!Number.isInteger(index) || index < 0 || index >= this.steps.count) continue;
      const x = Math.round(this.#x(this.steps.step(index)));
      if (taken.has(`${x}${color}`)) continue; // one flag per pixel
      taken.add(`${x}${color}`);
      const mark = svgElement(this.marks, "path", { class: "mark", "data-index": index,
        d: `M${x} ${AXIS - 6}v-6l-4 -6h8l-4 6` });
      mark.style.fill = mark.style.stroke = safeColour(color, "#e53935");
      svgElement(mark, "title").textContent = visible(title);
    }
  }

  #drawHandle() {
    const { count } = this.steps;
    const at = Math.min(count - 1, Math.max(0, this.index));
    const step = count && this.index >= 0 ? this.steps.step(at) : null;
    this.number.textContent = step === null ? "\u2013" : counted(step);
    const place = `${counted(at + 1)} / ${counted(count)}`;
    this.position.textContent = step === null ? "no steps recorded yet" : place;
    this.position.style.minWidth = `${2 * counted(count).length + 3}ch`;
    this.handle.hidden = step === null;
    if (step !== null) this.handle.style.transform = `translateX(${this.#x(step)}px)`;
    this.back.disabled = at <= 0;
    this.next.disabled = at >= count - 1;
    this.follow.setAttribute("aria-pressed", String(this.model.follow));
    const aria = { "aria-valuemin": this.steps.first, "aria-valuemax": this.steps.last,
      "aria-valuenow": step ?? 0, "aria-valuetext": step === null ? "no step" :
        `step ${step}, ${at + 1} of ${count}` };
    for (const [name, value] of Object.entries(aria)) this.track.setAttribute(name, value);
  }

  // ---- user actions

  #go(index) {
    if (!this.steps.count) return;
    const to = Math.min(this.steps.count - 1, Math.max(0, index));
    if (to === this.index) return;
    this.index = to;
    if (this.model.follow && to < this.steps.count - 1) this.#setFollow(false);
    this.#drawHandle();
    this.outbox.post({ index: to });
    const detail = { document: this.view.model.document, step: this.steps.step(to) };
    window.dispatchEvent(new CustomEvent("comgra-step", { detail })); // see parts.js
  }

  #setFollow(follow) {
    this.model.follow = follow;
    this.outbox.post({ follow });
    this.#drawHandle();
  }

  #adopt() {
    if (!this.outbox.idle || this.index === this.model.index) return;
    this.index = this.model.index;
    this.#drawHandle();
  }

  #nearest(event) {
    const at = this.track.getBoundingClientRect();
    return this.steps.nearest(this.steps.first + (event.clientX - at.left - LEFT) / this.scale);
  }

  #listen() {
    const { model, track } = this;
    model.on("runs", () => {
      this.steps = new Steps(model.runs);
      this.#adopt();
      this.#draw();
    });
    model.on("marks", () => this.#drawMarks());
    model.on("follow", () => this.#drawHandle());
    model.on("index", () => this.#adopt());
    model.on("ack", () => this.#adopt());
    this.back.addEventListener("click", (event) => this.#go(this.index - (event.shiftKey ? 10 : 1)));
    this.next.addEventListener("click", (event) => this.#go(this.index + (event.shiftKey ? 10 : 1)));
    this.follow.addEventListener("click", () => this.#setFollow(!model.follow));
    track.addEventListener("pointerdown", (event) => this.#press(event));
    track.addEventListener("pointermove", (event) => this.#hover(event));
    track.addEventListener("pointerleave", () => { this.bubble.hidden = true; });
    track.addEventListener("keydown", (event) => this.#key(event));
    onPageKey(this.root, (event) => {
      // with Shift, keyboards send "<" and ">", or ";" and ":", or unchanged keys
      const by = { ",": -1, ".": 1, "<": -1, ">": 1, ";": -1, ":": 1 }[event.key];
      if (by) this.#go(this.index + by * (event.shiftKey || !",.".includes(event.key) ? 10 : 1));
    });
  }

  #press(event) {
    if (event.button !== 0 || !this.steps.count) return;
    this.track.setPointerCapture(event.pointerId);
    const mark = event.target.closest?.(".mark");
    this.#go(mark ? Number(mark.dataset.index) : this.#nearest(event));
  }

  #hover(event) {
    if (!this.steps.count || !this.width) return;
    const index = this.#nearest(event);
    const step = this.steps.step(index);
    this.bubble.hidden = false;
    this.bubble.textContent = counted(step);
    this.bubble.style.left = `${Math.min(this.width - 24, Math.max(24, this.#x(step)))}px`;
    if (event.buttons & 1 && this.track.hasPointerCapture(event.pointerId)) this.#go(index);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: this.index - far, ArrowRight: this.index + far,
      ArrowDown: this.index - far, ArrowUp: this.index + far, PageDown: this.index - 10,
      PageUp: this.index + 10, Home: 0, End: this.steps.count - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.#go(to);
  }
}

export function render({ model, view }) {
  return new StepBar(model, view).root;
}
