// The graph component: shows user actions immediately and then reports them to Python.

const EDGES_DRAWN = 300; // draw all edges by default up to this number
const EDGES_MOST = 2000; // never draw all edges above this number
const REST = 60; // ms until a pointer counts as resting
const LABELS_QUICK = 200; // above this number of boxes, hide labels while zooming

class Graph {
  constructor(model) {
    this.model = model;
    this.outbox = new Outbox(model);
    this.allEdges = null; // the user's choice; null: depends on the number of edges
    this.heat = null; // paint per box id
    this.anchor = null; // box that stays in place when the scene changes
    this.#build();
    this.camera = new Camera(() => this.#place());
    this.boxes = new Boxes(this.layers.nodes);
    this.highlight = new Highlight(this.root, this.layers, this.boxes);
    this.bands = new Bands(this.bandLayer, (id) => this.#fold(id));
    this.groups = new Groups(this.groupLayer);
    this.minimap = new Minimap(this.minimapFrame, this.camera);
    this.#listen();
    new ResizeObserver(() => this.#resize()).observe(this.stage);
    onPaper(this.root, (printed) => this.#print(printed));
    this.theme = new MutationObserver(() => {
      if (this.root.isConnected) this.#recolour();
      else this.theme.disconnect();
    });
    this.theme.observe(document.documentElement,
      { attributes: true, attributeFilter: ["class", "style", "data-theme"] });
  }

  // ---- the page elements

  #build() {
    this.root = htmlElement(null, "div", "graph");
    const tools = htmlElement(this.root, "div", "tools");
    this.find = new FindBox(tools, {
      names: () => this.#names(),
      choose: (item) => this.#choose(item),
      search: (text) => this.#seek(text),
    });
    const buttons = htmlElement(tools, "div", "buttons looks");
    this.#button(buttons, "Fit", "Show the whole graph (f)", () => this.camera.fit(true));
    this.#button(buttons, "Centre", "Centre the selected node (c)", () => this.#centre());
    this.edgesButton = this.#button(buttons, "Edges", "", () => this.#toggleEdges());
    tools.append(saveMenu("the graph", [
      ["PNG picture", () => this.#save(".png")],
      ["SVG drawing", () => this.#save(".svg")],
      ["CSV of nodes and values", () => this.outbox.post({ save: "csv" }), true],
    ], () => this.model.ready));
    this.legend = htmlElement(tools, "div", "legend");
    this.hide = this.#button(htmlElement(tools, "div", "buttons"), "Hide", "", () =>
      this.outbox.post({ shown: !this.model.shown }));
    this.stage = htmlElement(this.root, "div", "stage");
    this.svg = svgElement(this.stage, "svg", { class: "canvas", role: "group",
      "aria-label": "Dependency graph. Arrow keys follow edges, Enter expands a group." });
    this.#defs();
    this.world = svgElement(this.svg, "g", { class: "world" });
    this.layers = {};
    for (const name of ["all", "hover", "near", "flow", "path", "nodes"]) {
      this.layers[name] = svgElement(this.world, "g", { class: `layer ${name}` });
    }
    this.shield = htmlElement(this.stage, "div", "shield");
    this.groupLayer = htmlElement(this.stage, "div", "groups");
    this.bandLayer = htmlElement(this.stage, "div", "bands");
    this.empty = htmlElement(this.stage, "div", "empty", "No graph recorded yet.");
    const foot = htmlElement(this.root, "div", "foot");
    this.info = htmlElement(foot, "div", "info");
    this.minimapFrame = htmlElement(foot, "div", "minimap");
    const zoom = htmlElement(foot, "div", "buttons zoom");
    this.#button(zoom, "\u2212", "Zoom out", () => this.camera.zoom(1 / 1.3));
    this.percent = this.#button(zoom, "100%", "Zoom to 100%", () =>
      this.camera.zoom(1 / this.camera.k));
    this.#button(zoom, "+", "Zoom in", () => this.camera.zoom(1.3));
    this.grip = htmlElement(this.root, "div", "grip");
    for (const [name, value] of Object.entries({ role: "separator", tabindex: 0,
      "aria-orientation": "horizontal", "aria-label": "Height of the graph",
      title: "Drag to change the height of the graph" })) this.grip.setAttribute(name, value);
    this.#showHidden();
  }

  // Hides the drawing below the tools, or shows it.
  #showHidden() {
    const { shown } = this.model;
    this.root.classList.toggle("closed", !shown);
    this.hide.textContent = shown ? "Hide" : "Show graph";
    this.hide.title = shown ? "Hide the graph" : "Show the graph";
    this.hide.setAttribute("aria-label", this.hide.title);
    this.hide.setAttribute("aria-expanded", String(shown));
  }

  #button(parent, text, title, act) {
    const button = htmlElement(parent, "button", "", text);
    Object.assign(button, { type: "button", title });
    if (title) button.setAttribute("aria-label", title);
    button.addEventListener("click", act);
    return button;
  }

  #defs() {
    const defs = svgElement(this.svg, "defs");
    const hatch = svgElement(defs, "pattern", { id: "hatch", width: 7, height: 7,
      patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    svgElement(hatch, "rect", { class: "stripe", width: 3, height: 7 });
    for (const name of ["all", "in", "out"]) {
      const marker = svgElement(defs, "marker", { id: `arrow-${name}`, viewBox: "0 0 8 8", refX: 7,
        refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto", markerUnits: "userSpaceOnUse" });
      svgElement(marker, "path", { class: `arrow ${name}`, d: "M0 0.8L8 4L0 7.2z" });
    }
  }

  // ---- from the model

  #setScene() {
    if (!this.camera.size.width) return; // fonts, colours and size are unknown until it is visible
    const old = this.index;
    const scene = this.model.scene;
    this.index = new SceneIndex(scene);
    this.root.dataset.drawn = scene.boxes.length;
    this.camera.scene = { width: Math.max(1, scene.width), height: Math.max(1, scene.height) };
    this.empty.hidden = this.index.boxes.size > 0;
    this.boxes.draw(this.index);
    this.camera.inset.top = this.bands.draw(this.index);
    this.camera.inset.top += this.index.rows.length > 1 ? 2 : 8;
    this.groups.draw(this.index);
    this.#recolour();
    this.#drawAllEdges();
    this.highlight.reset(this.index, this.model.selected);
    this.highlight.trace(this.model.path);
    this.#showInfo();
    this.#settle(old);
    this.#refocus();
  }

  // Keeps the anchored box in place after the scene has changed.
  #settle(old) {
    const anchor = this.anchor ?? this.selected;
    this.anchor = null;
    const before = old && this.#at(old, anchor);
    const after = this.#at(this.index, anchor);
    if (!before || !after || this.camera.auto && this.camera.fitZoom >= READABLE) {
      if (this.camera.auto || !before || !after) return this.#start();
    }
    const { k, auto } = this.camera;
    this.camera.pan((before.x - after.x) * k, (before.y + before.h / 2 - after.y - after.h / 2) * k);
    this.camera.auto = auto;
  }

  // Returns the box with an id, the leftmost box inside it, or the fold that contains it.
  #at(index, id) {
    const inside = [...index.boxes.values()].filter((box) => box.id.startsWith(`${id}.`));
    const leftmost = inside.sort((a, b) => a.x - b.x)[0];
    const own = index.boxes.get(id);
    if (own?.folded || !leftmost) return own;
    return leftmost;
  }

  #start() {
    const first = this.index.boxes.values().next().value;
    this.camera.start(this.index.boxes.get(this.selected) ?? first);
  }

  #resize() {
    const { clientWidth: width, clientHeight: height } = this.stage;
    if (!width || !height || this.screen) return; // not visible, or on paper
    this.camera.size = { width, height };
    this.#tellRoom();
    if (!this.index) this.#setScene();
    else if (this.camera.auto) this.#start();
    else this.#place();
  }

  // Draws for paper what the screen shows, as wide as the page.
  #print(printed) {
    const { camera, stage, screen } = this;
    if (!this.index || printed === !!screen) return;
    if (!printed) {
      this.screen = null;
      stage.style.height = "";
      Object.assign(camera, screen);
      return this.#place();
    }
    const { k, x, y, size, auto, inset } = camera;
    this.screen = { k, x, y, size, auto };
    const width = stage.clientWidth;
    if (camera.auto && camera.fits) {
      camera.size = { width, height: size.height };
      camera.size.height = Math.min(size.height,
        inset.top + camera.scene.height * camera.fitZoom + inset.bottom);
      camera.fit();
    } else {
      const scale = Math.min(1, width / size.width);
      camera.size = { width, height: scale * size.height };
      Object.assign(camera, { k: scale * k, x: scale * x, y: scale * y });
    }
    stage.style.height = `${camera.size.height}px`;
    this.#place();
  }

  // Tells Python how large the drawing may be, ignoring small changes.
  #tellRoom() {
    const { width, height } = this.camera.inner;
    const room = [Math.floor(width / 20) * 20, Math.floor(height / 8) * 8];
    if (`${room}` === `${this.room}`) return;
    this.room = room;
    this.outbox.post({ room });
  }

  // Paint and legend change together but arrive in separate events.
  #recolourSoon() {
    if (this.recolouring) return;
    this.recolouring = true;
    queueMicrotask(() => {
      this.recolouring = false;
      this.#recolour();
    });
  }

  #recolour() {
    if (!this.index) return;
    this.heat = JSON.parse(this.model.painted);
    const { heat } = this;
    this.boxes.paint(heat, this.camera.view);
    this.root.classList.toggle("painted", !!heat);
    this.#drawFlow();
    drawLegend(this.legend, this.index, heat, this.model.legend);
    this.minimap.draw(this.index, heat);
  }

  #adopt() {
    if (!this.index || !this.outbox.idle || this.model.selected === this.selected) return;
    this.#select(this.model.selected, { report: false });
    const box = this.index.boxes.get(this.selected);
    if (box) this.sought ? this.#visit(box) : this.camera.reveal(box);
    this.sought = false;
  }

  // ---- drawing

  #place() {
    const { k, x, y } = this.camera;
    const zoomed = k !== this.zoomed;
    this.zoomed = k;
    if (zoomed && this.index.boxes.size > LABELS_QUICK) this.#hideLabels();
    this.world.setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
    this.boxes.show(this.camera.view);
    const far = (this.screen?.k ?? k) < FAR;
    this.svg.classList.toggle("far", far);
    this.groups.place(this.camera, far);
    this.percent.textContent = `${Math.round(100 * k)}%`;
    this.bands.place(this.camera);
    this.minimap.place();
  }

  // Laying out all labels takes up three quarters of a zoom step, so large graphs hide them.
  #hideLabels() {
    this.svg.classList.add("zooming");
    clearTimeout(this.labels);
    this.labels = setTimeout(() => this.svg.classList.remove("zooming"), 160);
  }

  get edgesShown() {
    const count = this.index.edges.length;
    return count <= EDGES_MOST && (this.allEdges ?? count <= EDGES_DRAWN);
  }

  #drawAllEdges() {
    const many = this.index.edges.length > EDGES_MOST;
    this.edgesButton.disabled = many;
    this.edgesButton.title = many ? "Too many edges to draw" : "Draw all edges";
    this.edgesButton.setAttribute("aria-pressed", String(this.edgesShown));
    this.layers.all.replaceChildren();
    if (!this.edgesShown) return;
    for (const gradient of [true, false]) {
      const edges = this.index.edges.filter((edge) => edge[2] === gradient);
      if (!edges.length) continue;
      const d = edges.map(([u, v]) => this.index.route(u, v)).join("");
      svgElement(this.layers.all, "path", { class: gradient ? "edge" : "edge cut", d });
    }
  }

  // Draws the edges that have a paint of their own, whether or not all edges are drawn.
  #drawFlow() {
    this.layers.flow.replaceChildren();
    this.root.classList.toggle("flows", this.model.flow.length > 0);
    this.#tell("");
    for (const { edge: [u, v], width, color, text } of this.model.flow) {
      if (!this.index.boxes.has(u) || !this.index.boxes.has(v)) continue;
      const line = svgElement(this.layers.flow, "path", { class: "edge carries",
        d: this.index.route(u, v) });
      line.style.stroke = safeColour(color, "#888888");
      line.style.strokeWidth = `${+width}px`;
      line.dataset.text = visible(text);
      svgElement(line, "title").textContent = visible(text);
    }
  }

  // Shows what the edge under the pointer says in place of the selected node.
  #tell(text) {
    if (text === (this.told ?? "")) return;
    this.told = text;
    this.#showInfo();
  }

  #showInfo() {
    if (this.told) return this.info.replaceChildren(this.told);
    const box = this.index?.boxes.get(this.highlight.hovered || this.selected);
    this.info.replaceChildren();
    if (!box) return;
    const given = box.id === this.selected && this.model.info;
    const text = given || this.#facts(box);
    htmlElement(this.info, "b", "", box.id);
    const rest = text.startsWith(box.id) ? text.slice(box.id.length) : ` \u00b7 ${text}`;
    htmlElement(this.info, "span", "", rest);
  }

  #facts(box) {
    const ins = this.index.dependencies(box.id).length;
    const outs = this.index.dependents(box.id).length;
    const fold = box.repeat > 1 ? `${box.repeat} identical blocks, ${box.count} nodes`
      : box.plain ? `with ${partsOf(box).join(", ")}`
      : box.folded ? `${box.count} nodes` : "";
    const value = this.heat?.[box.id]?.text;
    return [box.kind, box.title, fold, value, `${ins} in, ${outs} out`].filter(Boolean)
      .join(" \u00b7 ");
  }

  // ---- user actions

  get selected() { return this.highlight.selected; }

  #select(id, { report = true, further = false } = {}) {
    clearTimeout(this.looking);
    const reported = report && id !== this.selected && this.index.boxes.has(id);
    if (reported) this.outbox.post({ select: id }); // first: Python then works while this is drawn
    this.highlight.select(id, further);
    this.#showInfo();
  }

  #compare(id) {
    this.outbox.post({ between: id });
  }

  #hover(id) {
    if (!this.index || !this.highlight.hover(id)) return;
    this.#showInfo();
    clearTimeout(this.looking);
    if (!id || id === this.selected) return;
    this.looking = setTimeout(() => this.outbox.post({ look: id }), REST);
  }

  #open(id) {
    if (!this.index.boxes.get(id)?.folded) return;
    this.anchor = id;
    this.outbox.post({ expand: id });
  }

  // Puts the focus on what has replaced the box that had it: a part of the expanded group, or the
  // group around it.
  #refocus() {
    const id = this.replaced;
    if (!id) return;
    const within = [...this.index.boxes.keys()].find((box) => box.startsWith(`${id}.`));
    const found = this.index.boxes.has(id) ? id : within;
    if (!found) return;
    this.replaced = null;
    this.boxes.focus(found);
  }

  #fold(id) {
    if (!id) return;
    this.anchor = id;
    this.outbox.post({ collapse: id });
  }

  #names() {
    return this.model.scene.boxes.flatMap((box) => box.members.map((name, i) => {
      const hidden = i > 0;
      return { name, box: box.id, kind: hidden ? "hidden" : box.kind, inside: hidden ? box.id : "" };
    }));
  }

  #choose({ name, box, inside }) {
    if (inside || !this.index) return this.#seek(name); // not drawn while the graph is hidden
    this.#select(box);
    this.#visit(this.index.boxes.get(box));
  }

  #seek(text) {
    this.sought = true; // until the server has expanded its scopes
    this.outbox.post({ search: text });
  }

  // After a search, zooms to a readable size and moves the focus to the node.
  #visit(box) {
    this.camera[this.camera.k < FAR ? "centre" : "reveal"](box);
    this.boxes.focus(box.id);
  }

  #centre() {
    const box = this.index?.boxes.get(this.selected);
    if (box) this.camera.centre(box);
  }

  #toggleEdges() {
    if (!this.index) return;
    this.allEdges = !this.edgesShown;
    this.#drawAllEdges();
  }

  async #save(ending) {
    this.boxes.finish();
    const svg = svgFile(this.world, this.camera.scene);
    this.boxes.show(this.camera.view);
    const blob = ending === ".svg" ? new Blob([svg], { type: "image/svg+xml" })
      : await picture(svg, this.camera.scene);
    offer(blob, fileName("graph", ending));
  }

  #listen() {
    const { model, svg } = this;
    model.on("msg:custom", handOver);
    model.on("scene", () => this.#setScene());
    for (const name of ["selected", "ack"]) model.on(name, () => this.#adopt());
    model.on("path", () => this.highlight.trace(model.path));
    model.on("loose", () => this.highlight.loosen(model.loose));
    model.on("info", () => this.#showInfo());
    for (const name of ["painted", "flow", "legend"]) model.on(name, () => this.#recolourSoon());
    model.on("shown", () => this.#showHidden());
    const idAt = (event) => event.target.closest?.(".node")?.dataset.id;
    svg.addEventListener("click", (event) => {
      const id = idAt(event);
      const mark = event.target.closest?.(".mark")?.dataset.mark;
      if (mark) return this.#seek(mark);
      if (id && event.shiftKey && this.selected && id !== this.selected) this.#compare(id);
      else if (id) this.#select(id, { further: event.shiftKey });
    });
    svg.addEventListener("dblclick", (event) => this.#open(idAt(event)));
    svg.addEventListener("pointerover", (event) => {
      this.#tell(event.target.closest?.(".carries")?.dataset.text ?? "");
      this.#hover(idAt(event) ?? null);
    });
    svg.addEventListener("pointerleave", () => {
      this.#tell("");
      this.#hover(null);
    });
    svg.addEventListener("keydown", (event) => this.#key(event));
    svg.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    this.#listenDrag();
    this.#listenGrip();
    onPageKey(this.root, (event) => {
      const act = { "/": () => this.find.focus(), f: () => this.camera.fit(true),
        c: () => this.#centre() }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
  }

  #listenDrag() {
    let from = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      from = { x: event.clientX, y: event.clientY };
      this.dragged = false;
    });
    this.stage.addEventListener("pointermove", (event) => {
      if (!from || !event.buttons) return;
      const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
      if (!this.dragged && Math.hypot(dx, dy) < 4) return;
      if (!this.dragged) {
        this.dragged = true;
        this.shield.style.display = "block";
        this.shield.setPointerCapture(event.pointerId);
      }
      from = { x: event.clientX, y: event.clientY };
      this.camera.pan(dx, dy);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      this.stage.addEventListener(name, () => {
        from = null;
        this.shield.style.display = "none";
      });
    }
  }

  #listenGrip() {
    const set = (height) => this.outbox.post({ height: Math.round(height) });
    this.grip.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      this.grip.setPointerCapture(event.pointerId);
    });
    this.grip.addEventListener("pointermove", (event) => {
      if (event.buttons) set(event.clientY - this.root.getBoundingClientRect().top + 3);
    });
    this.grip.addEventListener("keydown", (event) => {
      const step = { ArrowUp: -20, ArrowDown: 20 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      set(this.root.offsetHeight + step);
    });
  }

  #wheel(event) {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return this.camera.pan(-event.deltaX, 0);
    const at = this.stage.getBoundingClientRect();
    const lines = event.deltaMode === 1 ? 18 : 1;
    const factor = Math.exp(-event.deltaY * lines * 0.0016);
    this.camera.zoom(factor, { x: event.clientX - at.left, y: event.clientY - at.top });
  }

  #key(event) {
    const id = event.target.closest?.(".node")?.dataset.id;
    if (!id || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) this.#walk(this.index.step(id, event.key), !event.shiftKey);
    else if (event.key === "Enter" && event.shiftKey && id !== this.selected) this.#compare(id);
    else if (event.key === "Enter") {
      if (this.index.boxes.get(id)?.folded) this.replaced = id;
      this.#open(id);
    } else if (event.key === "Backspace") {
      this.replaced = this.index.scopeOf(id);
      this.#fold(this.replaced);
    }
    else if (event.key === " ") this.#select(id);
    else if (event.key === "+") this.camera.zoom(1.3);
    else if (event.key === "-") this.camera.zoom(1 / 1.3);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Moves to a box. Without selecting it, it can be compared with the selected one.
  #walk(id, select) {
    if (!id) return;
    if (select) this.#select(id);
    this.boxes.focus(id);
    this.camera.reveal(this.index.boxes.get(id));
  }
}

export function render({ model }) {
  return new Graph(model).root;
}
