// Facts about a scene that the browser derives: neighbours, boxes per column, and the routes of
// edges. A wrapped scene has several rows of columns, which are read like lines of text.

const LANE_NEAR = 150; // maximum detour of an edge around boxes
const BESIDE = 10; // distance of an edge between rows from its column and its row

class SceneIndex {
  constructor(scene) {
    this.boxes = new Map(scene.boxes.map((box) => [box.id, box]));
    this.bands = scene.bands || [];
    this.rows = scene.rows || [];
    this.edges = scene.edges.filter(([u, v]) => this.boxes.has(u) && this.boxes.has(v));
    this.before = new Map();
    this.after = new Map();
    for (const edge of this.edges) {
      push(this.after, edge[0], edge);
      push(this.before, edge[1], edge);
    }
    this.columns = this.#columns();
  }

  #columns() {
    const byMiddle = new Map();
    const far = 1e7; // columns of the next row come after all columns of a row
    for (const box of this.boxes.values()) {
      push(byMiddle, far * (box.row || 0) + Math.round(box.x + box.w / 2), box);
    }
    const columns = [...byMiddle.entries()].sort((a, b) => a[0] - b[0]).map(([, boxes]) => ({
      boxes: boxes.sort((a, b) => a.y - b.y),
      left: Math.min(...boxes.map((box) => box.x)),
      right: Math.max(...boxes.map((box) => box.x + box.w)),
      top: Math.min(...boxes.map((box) => box.y)),
      bottom: Math.max(...boxes.map((box) => box.y + box.h)),
    }));
    this.columnOf = new Map();
    columns.forEach((column, i) => column.boxes.forEach((box) => this.columnOf.set(box.id, i)));
    return columns;
  }

  dependencies(id) { return (this.before.get(id) || []).map((edge) => edge[0]); }

  dependents(id) { return (this.after.get(id) || []).map((edge) => edge[1]); }

  // Returns the neighbour in an arrow key's direction, or undefined.
  step(id, key) {
    const box = this.boxes.get(id);
    if (key === "ArrowUp" || key === "ArrowDown") {
      const column = this.columns[this.columnOf.get(id)].boxes;
      const down = key === "ArrowDown" ? 1 : -1;
      return (column[column.indexOf(box) + down] ?? this.#nearest(box, box.row + down))?.id;
    }
    const ids = key === "ArrowLeft" ? this.dependencies(id) : this.dependents(id);
    const away = (other) => {
      const to = this.boxes.get(other);
      const columns = Math.abs(this.columnOf.get(other) - this.columnOf.get(id));
      return columns * 1000 + Math.abs(to.y + to.h / 2 - box.y - box.h / 2);
    };
    return ids.sort((a, b) => away(a) - away(b))[0];
  }

  // Returns the innermost expanded scope around a box, or undefined.
  scopeOf(id) {
    const inside = (band) => id === band.id || id.startsWith(`${band.id}.`);
    return this.bands.filter(inside).sort((a, b) => b.id.length - a.id.length)[0]?.id;
  }

  // Returns the path of an edge as the `d` attribute of an SVG path.
  route(source, sink) {
    const a = this.boxes.get(source);
    const b = this.boxes.get(sink);
    const from = this.columnOf.get(source);
    const to = this.columnOf.get(sink);
    const [x1, y1, x2, y2] = [a.x + a.w, a.y + a.h / 2, b.x, b.y + b.h / 2];
    if (a.row !== b.row) return this.#wrapped(a, b, from, to);
    if (to <= from) return this.#loop(x1, y1, x2, y2, to, from);
    const between = this.columns.slice(from + 1, to);
    const lane = between.length ? this.#lane(between, y1, y2) : null;
    if (lane === null) return `M${x1} ${y1}${curve(x1, y1, x2, y2)}`;
    const xa = between[0].left;
    const xb = between.at(-1).right;
    return `M${x1} ${y1}${curve(x1, y1, xa, lane)}L${xb} ${lane}${curve(xb, lane, x2, y2)}`;
  }

  // Returns a height at which a horizontal line crosses no box in the columns; null: no detour.
  #lane(columns, y1, y2) {
    const free = (y) => columns.every(({ boxes }) =>
      boxes.every((box) => y < box.y - 5 || y > box.y + box.h + 5));
    const middle = (y1 + y2) / 2;
    const away = 9 + 4 * Math.min(6, columns.length); // longer edges go around shorter ones
    const top = Math.min(...columns.map((column) => column.top)) - away;
    const bottom = Math.max(...columns.map((column) => column.bottom)) + away;
    const ways = [y1, y2].filter(free);
    if (ways.length) return ways[0];
    const near = middle - top <= bottom - middle ? top : bottom;
    return Math.abs(near - middle) <= LANE_NEAR ? near : null;
  }

  // An edge to another row runs between the rows, and along the left margin past other rows.
  #wrapped(a, b, from, to) {
    const spread = 2 * (from % 5); // edges from different sources stay apart
    const below = (row) => this.rows[row][1] + BESIDE + spread;
    const [x1, y1, x2, y2] = [a.x + a.w, a.y + a.h / 2, b.x, b.y + b.h / 2];
    const right = this.columns[from].right + BESIDE;
    const left = this.columns[to].left - BESIDE;
    const first = below(a.row);
    const last = below(b.row > a.row ? b.row - 1 : b.row);
    const lane = 4 + spread / 2;
    const past = first === last ? [] : [[lane, first], [lane, last]];
    return polyline([[x1, y1], [right, y1], [right, first], ...past, [left, last], [left, y2],
      [x2, y2]]);
  }

  #nearest({ x, w }, row) {
    const away = (box) => Math.abs(box.x + box.w / 2 - x - w / 2);
    const there = [...this.boxes.values()].filter((box) => box.row === row);
    return there.sort((a, b) => away(a) - away(b))[0];
  }

  // A backward edge (a recurrence) runs below everything in between.
  #loop(x1, y1, x2, y2, first, last) {
    const columns = this.columns.slice(first, last + 1);
    const y = Math.max(...columns.map((column) => column.bottom)) + 14;
    return `M${x1} ${y1}C${x1 + 26} ${y1} ${x1 + 26} ${y} ${x1} ${y}` +
      `L${x2} ${y}C${x2 - 26} ${y} ${x2 - 26} ${y2} ${x2} ${y2}`;
  }
}

function push(map, key, value) {
  if (map.has(key)) map.get(key).push(value);
  else map.set(key, [value]);
}

// Returns the path through points, with rounded corners.
function polyline(points) {
  const [[x, y]] = points;
  let path = `M${x} ${y}`;
  for (let i = 1; i < points.length - 1; i += 1) {
    const [[x0, y0], [x1, y1], [x2, y2]] = points.slice(i - 1, i + 2);
    const [before, after] = [Math.hypot(x1 - x0, y1 - y0), Math.hypot(x2 - x1, y2 - y1)];
    const round = Math.min(8, before / 2, after / 2);
    if (!round) continue;
    const towards = (px, py, length) =>
      `${x1 + ((px - x1) * round) / length} ${y1 + ((py - y1) * round) / length}`;
    path += `L${towards(x0, y0, before)}Q${x1} ${y1} ${towards(x2, y2, after)}`;
  }
  const [xn, yn] = points.at(-1);
  return `${path}L${xn} ${yn}`;
}

function curve(x1, y1, x2, y2) {
  const d = Math.max(8, (x2 - x1) / 2);
  return `C${x1 + d} ${y1} ${x2 - d} ${y2} ${x2} ${y2}`;
}
