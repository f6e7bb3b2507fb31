// Shared by all components of the viewer. base.py joins the files into one module, so there are
// no imports. The last file of each component exports `render`.

const SVG = "http://www.w3.org/2000/svg";

// Adds an SVG element with the given attributes to `parent`.
function svgElement(parent, tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}

// Escapes invisible characters, like visible.py. A right-to-left mark would reverse a name.
const UNSEEN = new RegExp("[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e"
  + "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff\\u{e0000}-\\u{e007f}]", "gu");
const hex = (code, digits) => code.toString(16).padStart(digits, "0");

function visible(text) {
  return `${text}`.replace(UNSEEN, (letter) => {
    const code = letter.codePointAt(0);
    if (code < 0x100) return `\\x${hex(code, 2)}`;
    return code < 0x10000 ? `\\u${hex(code, 4)}` : `\\U${hex(code, 8)}`;
  });
}

// Adds an HTML element to `parent`. Inserts `text` as plain text: names in a run are untrusted.
function htmlElement(parent, tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = visible(text);
  if (parent) parent.append(element);
  return element;
}

// Allows only plain colours in styles; `url(...)` would request another host.
function safeColour(value, fallback = "none") {
  return /^#([0-9a-f]{3}|[0-9a-f]{6})$/i.test(value || "") ? value : fallback;
}

const KEYLESS = /^(button|checkbox|radio|range)$/; // inputs that take no text

// Returns whether the user is typing; looks through shadow roots.
function isTyping(event) {
  const target = event.composedPath()[0];
  return target instanceof HTMLElement && (target.isContentEditable
    || (/^(input|textarea|select)$/i.test(target.tagName) && !KEYLESS.test(target.type)));
}

// Keys that work wherever the focus is, while the component is visible.
function onPageKey(element, handle) {
  const listener = (event) => {
    if (!element.isConnected) {
      if (listener.connected) document.removeEventListener("keydown", listener);
      return;
    }
    listener.connected = true;
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey && !event.defaultPrevented;
    if (plain && element.getClientRects().length && !isTyping(event)) handle(event);
  };
  document.addEventListener("keydown", listener);
}

// Calls `draw(true)` once shell.js has laid out the page for paper, and `draw(false)` afterwards.
function onPaper(element, draw) {
  const listener = (event) => {
    if (element.isConnected) draw(event.detail);
    else window.removeEventListener("paper", listener);
  };
  window.addEventListener("paper", listener);
}

// Bokeh paints figures in the next frame. This paints updates while the browser is still waiting for that frame, so that only the browser's own work remains.
const painting = new MessageChannel(); // after Bokeh's own promises, unlike a microtask
painting.port1.onmessage = () => {
  for (const view of figures()) {
    unplaced(view);
    if (view._invalidate_all || view._invalidated_painters?.size) view.repaint();
  }
};

// The figures on the page. Searched only after the models have changed, because there are hundreds
// of views.
const known = { models: 0, views: [] };
function figures() {
  if (!window.Bokeh) return [];
  const models = Bokeh.documents.reduce((sum, document) => sum + document._all_models.size, 0);
  if (models !== known.models) {
    const ours = (view) => view.model.tags.includes("frame");
    Object.assign(known, { models, views: [...Bokeh.index.query(ours)] });
  }
  return known.views.filter((view) => view.el.isConnected);
}

// For every painted glyph, Bokeh rewrites the style sheet of an empty element, which makes the
// browser restyle the whole figure.
function unplaced(figure) {
  for (const view of figure.computed_renderer_views ?? []) {
    if (view.model.type === "GlyphRenderer") view.update_position = () => {};
  }
}

// What connects the cells of a notebook to Python.
function connections() {
  if (!window.PyViz) return []; // not in a notebook
  const models = (window.Bokeh?.documents ?? []).flatMap((document) =>
    [...document._all_models.values()]);
  return models.filter((model) => model.type === "panel.models.comm_manager.CommManager");
}

// In a notebook, Panel sends every change from Python back to Python, which works longer on this
// echo than on the change itself. Clicks would wait for it, and replies would be lost.
function silenceEcho() {
  for (const model of connections()) {
    const changed = model._document_changed;
    if (!changed || model.silent) continue;
    model.silent = true;
    model._document_changed = (event) => {
      if (event.sync !== false) changed.call(model, event);
    };
  }
}

// Says once that nothing answers clicks, if that is certain.
function tellUnconnected() {
  const found = connections();
  if (!found.length || found.some((model) => model._client_comm)) return;
  if (document.querySelector(".comgra-unconnected")) return;
  const note = htmlElement(document.body, "div", "comgra-unconnected", UNCONNECTED);
  note.setAttribute("role", "status");
  note.addEventListener("click", () => { note.hidden = true; });
  note.style.cssText = "position:fixed;z-index:99999;right:16px;bottom:16px;max-width:420px;"
    + "padding:10px 14px;border-radius:8px;background:#20242c;color:#fff;cursor:pointer;"
    + "font:400 13px/1.4 sans-serif;box-shadow:0 8px 24px rgb(0 0 0 / 30%)";
}

const UNCONNECTED = "Nothing answers clicks here. If this is a running notebook in JupyterLab, "
  + "install pyviz_comms in the environment of JupyterLab and restart JupyterLab.";

// Sends messages one at a time, and only once the page is ready. A message waits for the reply to
// the previous message. A new message replaces a waiting message of the same kind.
const BY_ITSELF = new Set(["room", "look"]); // sent without a click
class Outbox {
  constructor(model) {
    this.model = model;
    this.waiting = [];
    this.sent = null;
    this.tries = 0;
    this.number = 0;
    this.name = Math.random().toString(36).slice(2); // of this browser, among those on the model
    this.timer = null;
    setTimeout(silenceEcho); // when the document is complete
    model.on("ready", () => this.flush());
    model.on("ack", () => {
      painting.port2.postMessage(0);
      this.answered();
    });
  }

  // Returns whether all messages have been answered.
  get idle() { return this.timer === null && !this.waiting.length; }

  // If `first` is set, the browser paints its own update first, because the reply would delay it.
  post(message, { first = false } = {}) {
    const kind = Object.keys(message)[0];
    const last = this.waiting.at(-1);
    if (last && kind in last) this.waiting.pop();
    this.waiting.push(message);
    if (!BY_ITSELF.has(kind)) tellUnconnected();
    if (first) requestAnimationFrame(() => setTimeout(() => this.flush(), 0));
    else this.flush();
  }

  flush() {
    if (!this.model.ready || this.timer !== null || !this.waiting.length) return;
    this.sent = { ...this.waiting.shift(), serial: `${this.name}:${++this.number}` };
    this.tries = 0;
    this.#send();
  }

  // Sends again without a reply: in a notebook, the first messages may be lost. Python ignores a
  // serial that it has handled.
  #send() {
    this.model.send_msg(this.sent);
    const over = ++this.tries === 4;
    this.timer = setTimeout(() => (over ? this.answered() : this.#send()), 1500);
  }

  answered() {
    clearTimeout(this.timer);
    this.timer = null;
    this.flush();
  }
}
