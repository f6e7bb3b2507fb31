// Labels for a drawing seen from afar: frames around groups of boxes, each with a readable name.
// Near enough, there are none, because the boxes have labels themselves.

const CONSTANT = new Set(["parameter", "buffer", "target"]);
const NAME_LEAST = 34; // pixels that a name needs; narrower groups are labelled together
const NAME_USUAL = 46; // pixels for each name, on average, of groups that are shown apart

class Groups {
  constructor(element) {
    this.element = element;
    this.frames = [];
    this.rows = [];
  }

  draw(index) {
    this.rows = index.rows.map((_, row) => {
      const boxes = [...index.boxes.values()].filter((box) => (box.row || 0) === row);
      return { boxes, tree: tree(boxes) };
    });
  }

  // Shows the frames if the boxes are too small for labels.
  place(camera, far) {
    const units = far ? this.rows.flatMap(({ tree }) => together(cut(tree, camera.k), camera.k)) : [];
    while (this.frames.length > units.length) this.frames.pop().frame.remove();
    units.forEach((unit, i) => this.#show(i, unit, camera));
  }

  #show(i, { left, right, top, bottom, name }, { x, y, k }) {
    if (!this.frames[i]) {
      const frame = htmlElement(this.element, "div", "group");
      this.frames[i] = { frame, label: htmlElement(frame, "span", "name"), name: null };
    }
    const { frame, label } = this.frames[i];
    frame.style.transform = `translate(${x + left * k - 3}px, ${y + top * k - 3}px)`;
    frame.style.width = `${(right - left) * k + 6}px`;
    frame.style.height = `${(bottom - top) * k + 6}px`;
    if (this.frames[i].name === name) return;
    this.frames[i].name = name;
    label.textContent = visible(name);
  }
}

// Returns the boxes by the parts of their names: { name, boxes, children }.
function tree(boxes, depth = 0, name = "") {
  const byPart = new Map();
  for (const box of boxes) push(byPart, box.id.split(".").slice(0, depth + 1).join("."), box);
  const children = [...byPart].map(([id, inside]) => {
    const leaf = inside.length === 1;
    return leaf ? unit(inside, inside[0].label) : tree(inside, depth + 1, id);
  });
  const parts = name.split(".");
  const numbered = parts.slice(-2).some((part) => /^\d+$/.test(part)); // which block
  const short = parts.slice(numbered ? -2 : -1).join(".");
  const same = children.length === 1 && children[0].boxes.length === boxes.length && depth;
  return same ? { ...children[0], name: children[0].name || short }
    : { ...unit(boxes, short), children: children.sort((a, b) => a.left - b.left) };
}

// Parameters may stand below the boxes of a neighbour, so that they do not widen a group.
function unit(boxes, name) {
  const computed = boxes.filter(({ kind }) => !CONSTANT.has(kind));
  const shown = computed.length ? computed : boxes;
  return {
    boxes, name, children: [],
    left: Math.min(...shown.map((box) => box.x)),
    right: Math.max(...shown.map((box) => box.x + box.w)),
    top: Math.min(...shown.map((box) => box.y)),
    bottom: Math.max(...shown.map((box) => box.y + box.h)),
  };
}

// Returns the smallest groups whose names can be read at this zoom.
function cut(node, k) {
  const parts = node.children.flatMap((child) => child.children.length ? cut(child, k) : [child]);
  const room = ((node.right - node.left) * k) / Math.max(1, parts.length);
  return !node.name || (parts.length && room >= NAME_USUAL) ? parts : [node];
}

// Joins neighbours that are too narrow for a name of their own.
function together(units, k) {
  const joined = [];
  const narrow = ({ left, right }) => (right - left) * k < NAME_LEAST;
  for (const each of units.sort((a, b) => a.left - b.left)) {
    if (joined.length && narrow(joined.at(-1))) joined.push(union(joined.pop(), each));
    else joined.push({ ...each, first: each.name });
  }
  if (joined.length > 1 && narrow(joined.at(-1))) {
    const last = joined.pop();
    joined.push(union(joined.pop(), last));
  }
  return joined;
}

function union(one, other) {
  return {
    left: Math.min(one.left, other.left), right: Math.max(one.right, other.right),
    top: Math.min(one.top, other.top), bottom: Math.max(one.bottom, other.bottom),
    first: one.first, name: `${one.first} \u2013 ${other.name}`,
  };
}
