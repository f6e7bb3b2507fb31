// Shows HTML from Python; elements with `data-send` act as buttons.

// The only way from HTML of Python to elements.
function setHtml(element, html) {
  element.innerHTML = html;
}

export function render({ model, view }) {
  const outbox = new Outbox(model);
  const root = document.createElement("div");
  root.className = "html";
  const style = document.createElement("style");
  style.textContent = model.css;
  const content = htmlElement(null, "div", "content");
  root.append(style, content);

  const marked = (event) => event.composedPath().find((e) => e.dataset && e.dataset.send);

  let opened = null;
  let lasso = null; // the line that is being drawn

  // Keeps the focus on the same element when content is replaced, and shows what was opened.
  function change(replace) {
    const focused = root.getRootNode().activeElement;
    const { send: token = null, cells = null, at = "" } = focused?.dataset ?? {};
    lasso = null;
    replace();
    const replaced = focused !== root.getRootNode().activeElement;
    if (token && replaced) content.querySelector(`[data-send="${CSS.escape(token)}"]`)?.focus();
    if (cells && replaced) refocus(content.querySelector(`[data-cells="${CSS.escape(cells)}"]`), at);
    const card = content.querySelector("[data-opened]");
    if (card && card.dataset.opened !== opened) card.scrollIntoView({ block: "nearest" });
    opened = card ? card.dataset.opened : null;
  }
  const draw = () => change(() => setHtml(content, model.html));

  const grid = (event) => event.composedPath().find((e) => e.dataset?.cells !== undefined);

  // Says which cell of a picture is pointed at, and frames it; returns what a click on it sends.
  function point(picture, row, column) {
    const rows = JSON.parse(picture.dataset.rows), columns = JSON.parse(picture.dataset.columns);
    row = Math.min(Math.max(row, 0), rows.length - 1);
    column = Math.min(Math.max(column, 0), columns.length - 1);
    picture.values ??= new Float32Array(
      Uint8Array.from(atob(picture.dataset.values), (c) => c.charCodeAt(0)).buffer);
    const value = picture.values[row * columns.length + column];
    const svg = picture.ownerSVGElement, frame = svg.querySelector(".here");
    const [x, y, width, height] = ["x", "y", "width", "height"].map((name) =>
      Number(picture.getAttribute(name)));
    const [across, down] = [width / columns.length, height / rows.length];
    const places = { x: x + column * across, y: y + row * down, width: across, height: down };
    for (const [name, place] of Object.entries(places)) frame.setAttribute(name, place);
    const shown = Number.isNaN(value) ? "no value" : value.toPrecision(3);
    svg.parentElement.nextElementSibling.textContent =
      visible(`${rows[row]}, ${columns[column]}: ${shown}`);
    picture.dataset.at = `${row}:${column}`;
    return `${picture.dataset.cells}:${row}:${column}`;
  }
  const at = (picture) => (picture.dataset.at ?? "0:0").split(":").map(Number);
  function under(picture, event) {
    const box = picture.getBoundingClientRect();
    const share = (place, start, size) => (place - start) / size;
    const [rows, columns] = [picture.dataset.rows, picture.dataset.columns].map((names) =>
      JSON.parse(names).length);
    return point(picture, Math.floor(share(event.clientY, box.top, box.height) * rows),
      Math.floor(share(event.clientX, box.left, box.width) * columns));
  }
  function refocus(picture, place) {
    if (!picture) return;
    picture.focus({ preventScroll: true });
    if (place) point(picture, ...place.split(":").map(Number));
  }
  content.addEventListener("pointermove", (event) => {
    const picture = grid(event);
    if (picture) under(picture, event);
  });
  content.addEventListener("focusin", (event) => {
    const picture = grid(event);
    if (picture?.matches(":focus-visible")) point(picture, ...at(picture));
  });

  // A line drawn around marks (`data-mark`) in a drawing (`data-lasso`) selects them.
  const marks = (drawing) => [...drawing.querySelectorAll("[data-mark]")];
  const number = (mark) => mark.dataset.mark;
  const pick = (drawing, chosen) =>
    outbox.post({ send: `${drawing.dataset.lasso}:${chosen.map(number).join(",")}` });
  function toggled(mark) {
    const drawing = mark.closest("[data-lasso]");
    pick(drawing, marks(drawing).filter((each) => each.matches(".brushed") !== (each === mark)));
  }
  const surrounded = ([x, y], line) => line.reduce((odd, [ax, ay], i) => {
    const [bx, by] = line[(i + 1) % line.length];
    return (ay > y) !== (by > y) && x < ax + (y - ay) / (by - ay) * (bx - ax) ? !odd : odd;
  }, false);
  content.addEventListener("pointerdown", (event) => {
    const drawing = event.composedPath().find((e) => e.dataset?.lasso !== undefined);
    const draws = drawing && event.button === 0 && event.pointerType !== "touch";
    lasso = draws ? { drawing, line: [[event.clientX, event.clientY]] } : null;
  });
  content.addEventListener("pointermove", (event) => {
    if (!lasso) return;
    const { drawing, line } = lasso;
    line.push([event.clientX, event.clientY]);
    if (!lasso.shown) {
      if (Math.hypot(line.at(-1)[0] - line[0][0], line.at(-1)[1] - line[0][1]) < 5) return;
      lasso.shown = svgElement(drawing, "path", { class: "lasso" });
      drawing.setPointerCapture(event.pointerId); // the click that follows is not one on a mark
    }
    const { left, top } = drawing.getBoundingClientRect();
    lasso.shown.setAttribute("d", `M${line.map(([x, y]) => `${x - left} ${y - top}`).join("L")}`);
  });
  content.addEventListener("pointerup", () => {
    const { drawing, line, shown } = lasso ?? {};
    lasso = null;
    if (!shown) return;
    shown.remove();
    pick(drawing, marks(drawing).filter((mark) => {
      const { x, y, width, height } = mark.getBoundingClientRect();
      return surrounded([x + width / 2, y + height / 2], line);
    }));
  });
  content.addEventListener("pointercancel", () => { lasso?.shown?.remove(); lasso = null; });

  function act(target, event) {
    if (event.shiftKey && target.dataset.mark !== undefined) toggled(target);
    else outbox.post({ send: target.dataset.send });
  }

  content.addEventListener("click", (event) => {
    const picture = grid(event);
    if (picture) outbox.post({ send: under(picture, event) });
    const target = marked(event);
    if (target) act(target, event);
  });

  const ARROWS = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  // Moves the focus between the cells of a table, of which Tab reaches only the first.
  function walk(event, cell) {
    const [down, right] = ARROWS[event.key];
    const row = cell.closest("tbody").rows[cell.parentElement.sectionRowIndex + down];
    const next = row?.cells[cell.cellIndex + right];
    if (!next?.dataset.send) return;
    event.preventDefault();
    event.stopPropagation();
    next.focus();
  }

  function press(picture, event) {
    const [down, right] = ARROWS[event.key] ?? [0, 0];
    if (!ARROWS[event.key] && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    const [row, column] = at(picture);
    const send = point(picture, row + down, column + right);
    if (!ARROWS[event.key]) outbox.post({ send });
  }

  content.addEventListener("keydown", (event) => {
    const picture = grid(event);
    if (picture) press(picture, event);
    const target = marked(event);
    if (target?.matches("tbody td") && event.key.startsWith("Arrow")) walk(event, target);
    if (target && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      event.stopPropagation();
      act(target, event);
    }
  });
  const showReady = () => root.classList.toggle("unanswered", !model.ready);
  showReady();
  model.on("ready", showReady);
  model.on("msg:custom", handOver);
  if (typeof Parts === "function") new Parts({ model, view, content, outbox, change }).arrive();
  else {
    model.on("html", draw);
    draw();
  }
  return root;
}
