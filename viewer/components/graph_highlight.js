// Marks the selected node, the nodes that it depends on (blue) and the nodes that depend on it
// (orange). Previews the same for the node under the pointer (dashed).

const HOPS_MOST = 4;

class Highlight {
  constructor(root, layers, boxes) {
    Object.assign(this, { root, layers, boxes });
    this.index = null;
    this.selected = "";
    this.hovered = null;
    this.hops = 1;
    this.marked = [];
    this.traced = [];
    this.loose = {};
  }

  // Resets to another scene.
  reset(index, selected) {
    this.index = index;
    this.hovered = null;
    this.layers.hover.replaceChildren();
    this.selected = index.boxes.has(selected) ? selected : "";
    this.#draw();
  }

  // `further` adds one hop for the selected node.
  select(id, further = false) {
    const again = id === this.selected;
    const hops = again && further ? 1 + (this.hops % HOPS_MOST) : 1;
    if (again && hops === this.hops) return;
    this.selected = this.index.boxes.has(id) ? id : "";
    this.hops = hops;
    this.layers.hover.replaceChildren();
    this.#draw();
  }

  // Returns whether the node has changed.
  hover(id) {
    if (id === this.hovered) return false;
    this.hovered = id;
    this.layers.hover.replaceChildren();
    if (id && id !== this.selected) {
      this.#edges(this.layers.hover, this.index.before.get(id) || [], "in");
      this.#edges(this.layers.hover, this.index.after.get(id) || [], "out");
    }
    return true;
  }

  // Sets the boxes connected only to other roles of the selected node.
  loosen(loose) {
    this.loose = loose;
    const ids = loose.of === this.selected ? loose.boxes : [];
    for (const group of this.marked) {
      group.classList.toggle("loose", ids.includes(group.dataset.id));
    }
  }

  // Marks a path: the boxes on it and the edges between them.
  trace(path) {
    for (const group of this.traced) group.classList.remove("traced");
    this.layers.path.replaceChildren();
    const boxes = path.filter((id) => this.index?.boxes.has(id));
    this.traced = boxes.map((id) => this.boxes.get(id));
    for (const group of this.traced) group.classList.add("traced");
    boxes.slice(1).forEach((id, i) => svgElement(this.layers.path, "path", {
      d: this.index.route(boxes[i], id), class: "edge traced", "data-from": boxes[i], "data-to": id }));
  }

  #draw() {
    for (const group of this.marked) {
      group.classList.remove("selected", "before", "after", "loose");
    }
    this.marked = [];
    this.layers.near.replaceChildren();
    this.root.classList.toggle("has-selection", this.selected !== "");
    this.#takeFocus(this.selected || this.index.boxes.keys().next().value);
    if (!this.selected) return;
    this.#spread(this.index.before, 0, "before", "in");
    this.#spread(this.index.after, 1, "after", "out");
    this.#mark(this.selected, "selected");
    this.loosen(this.loose);
  }

  // Makes the node the only node in the Tab order.
  #takeFocus(id) {
    this.layers.nodes.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
    this.boxes.get(id)?.setAttribute("tabindex", 0);
  }

  #spread(edgesOf, end, className, direction) {
    let front = [this.selected];
    const seen = new Set(front);
    for (let hop = 0; hop < this.hops && front.length; hop += 1) {
      const edges = front.flatMap((id) => edgesOf.get(id) || []);
      this.#edges(this.layers.near, edges, direction);
      front = [...new Set(edges.map((edge) => edge[end]))].filter((id) => !seen.has(id));
      for (const id of front) {
        seen.add(id);
        this.#mark(id, className);
      }
    }
  }

  #mark(id, className) {
    const group = this.boxes.get(id);
    group.classList.add(className);
    this.marked.push(group);
  }

  #edges(layer, edges, direction) {
    for (const [u, v, gradient] of edges) {
      svgElement(layer, "path", { d: this.index.route(u, v), "marker-end": `url(#arrow-${direction})`,
        class: `edge ${direction}${gradient ? "" : " cut"}`, "data-from": u, "data-to": v });
    }
  }
}
