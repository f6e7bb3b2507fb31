// The parts of a page; see parts.py. A step whose page the browser has is drawn at once, while the
// message about it is on its way. Of the other cards, those out of view are drawn when idle.

const OUTSIDE = 200; // px around the window in which a card counts as visible
const ANSWER = 5000; // ms after which a page shown by the browser itself gives way to Python's
const SLICE = 8; // ms of drawing before the browser may do something else
const WAIT = 150; // ms after which a busy browser counts as idle

// Safari cannot tell when it is idle.
const whenIdle = (act) => (window.requestIdleCallback
  ? requestIdleCallback(act, { timeout: WAIT }) : setTimeout(act, 20));

class Parts {
  constructor({ model, view, content, outbox, change }) {
    Object.assign(this, { model, view, content, outbox, change });
    this.kept = new Map(); // HTML or, once it was drawn, the element, by name
    this.pages = new Map(); // the parts of pages of this frame, by step
    this.frame = null;
    this.drawn = []; // of each part its key, its name and its element
    this.later = new Map(); // names of parts to draw when idle, by position
    this.wanted = null; // the step that is shown before Python's answer
    model.on("page", () => this.arrive());
    model.on("ahead", () => this.#prepare());
    this.#listen();
  }

  // Shows the page that Python has sent, unless the user is ahead of it.
  arrive() {
    if (!this.model.page) return;
    const page = JSON.parse(this.model.page);
    const stale = this.wanted !== null && page.frame === this.frame && page.step !== this.wanted;
    this.#take(page, true);
    if (stale) return; // the answer for the wanted step follows
    this.wanted = null;
    this.#show(page.parts);
  }

  // Keeps a page for later, and lets the browser decode its images.
  #prepare() {
    if (!this.model.ahead) return;
    const page = JSON.parse(this.model.ahead);
    this.#take(page, false);
    const names = Object.keys(page.fresh);
    const build = () => {
      const start = performance.now();
      while (names.length && performance.now() - start < SLICE) this.#element(names.pop());
      if (names.length) whenIdle(build);
    };
    whenIdle(build);
  }

  #take({ frame, step, parts, fresh, gone }, current) {
    for (const name of gone) this.kept.delete(name);
    for (const [name, html] of Object.entries(fresh)) {
      if (!this.kept.has(name)) this.kept.set(name, html);
    }
    if (current && frame !== this.frame) {
      this.frame = frame;
      this.pages.clear();
    }
    if (frame === this.frame) this.pages.set(step, parts);
  }

  #listen() {
    const stepped = ({ detail }) => {
      if (!this.content.isConnected) {
        if (this.seen) window.removeEventListener("comgra-step", stepped);
        return;
      }
      this.seen = true;
      if (detail.document === this.view.model.document && this.content.getClientRects().length) {
        this.#anticipate(detail.step);
      }
    };
    window.addEventListener("comgra-step", stepped);
    onPaper(this.content, () => this.#drawLater(Infinity));
  }

  #anticipate(step) {
    const parts = this.pages.get(step);
    this.wanted = parts && this.#complete(parts) ? step : null; // otherwise shows what arrives
    clearTimeout(this.timer);
    if (this.wanted === null) return;
    this.#show(parts);
    this.timer = setTimeout(() => {
      if (this.wanted === null) return;
      this.wanted = null;
      this.arrive();
    }, ANSWER);
  }

  #complete(parts) { return parts.every(([, name]) => this.kept.has(name)); }

  #show(parts) {
    if (!this.#complete(parts)) {
      this.outbox.post({ send: "missing" });
      return;
    }
    this.later.clear();
    const places = ([key, , boxed]) => `${boxed} ${key}`;
    const same = parts.length === this.drawn.length
      && parts.every((part, i) => places(part) === this.drawn[i].place);
    this.change(() => {
      if (same) this.#exchange(parts);
      else this.#build(parts, places);
    });
    if (this.later.size) whenIdle(() => this.#drawLater(SLICE));
  }

  #element(name) {
    let found = this.kept.get(name);
    if (typeof found === "string") {
      const several = htmlElement(null, "div", "several");
      setHtml(several, found);
      found = several.children.length === 1 ? several.firstElementChild : several;
      this.kept.set(name, found);
    }
    return found;
  }

  #build(parts, places) {
    const children = [];
    let box = null;
    this.drawn = parts.map((part) => {
      const [, name, boxed] = part;
      const element = this.#element(name);
      if (!boxed) box = null;
      else if (!box) children.push(box = htmlElement(null, "div", "cards"));
      if (boxed) box.append(element);
      else children.push(element);
      return { place: places(part), name, element };
    });
    this.content.replaceChildren(...children);
  }

  #exchange(parts) {
    const changed = parts.map(([, name], i) => [i, name])
      .filter(([i, name]) => name !== this.drawn[i].name);
    const visible = changed.map(([i]) => { // all are measured before any is changed
      const box = this.drawn[i].element.getBoundingClientRect();
      return box.width && box.bottom > -OUTSIDE && box.top < window.innerHeight + OUTSIDE;
    });
    changed.forEach(([i, name], k) => {
      if (visible[k]) this.#put(i, name);
      else this.later.set(i, name);
    });
  }

  #put(i, name) {
    const element = this.#element(name);
    this.drawn[i].element.replaceWith(element);
    Object.assign(this.drawn[i], { name, element });
  }

  #drawLater(most) {
    const start = performance.now();
    this.change(() => {
      for (const [i, name] of this.later) {
        if (performance.now() - start > most) break;
        this.later.delete(i);
        this.#put(i, name);
      }
    });
    if (this.later.size) whenIdle(() => this.#drawLater(most));
  }
}
