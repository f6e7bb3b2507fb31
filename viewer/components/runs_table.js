// A table of runs. Only the rows in view exist as elements; sorting and filtering need no server.

const ROW = 28; // height of a row in pixels, as in runs_table.css
const SPARE = 8; // rows kept above and below the view
const COMPARE = /^(.+?)(<=|>=|<|>|=)(.*)$/;

export function render({ model }) {
  const outbox = new Outbox(model);
  const root = htmlElement(null, "div", "runs");
  const bar = htmlElement(root, "div", "bar");
  const input = htmlElement(bar, "input", "find");
  Object.assign(input, { type: "search", placeholder: "Filter: words, loss<0.5, state=live" });
  input.setAttribute("aria-label", "Filter runs");
  const status = htmlElement(bar, "span", "status");
  status.setAttribute("role", "status");
  const none = htmlElement(bar, "button", "", "Untick all");
  none.type = "button";
  const view = htmlElement(root, "div", "view");
  const grid = htmlElement(view, "div", "grid");
  grid.setAttribute("role", "grid");
  grid.setAttribute("aria-label", "Runs");
  const head = htmlElement(grid, "div", "row head");
  head.setAttribute("role", "row");
  const body = htmlElement(grid, "div", "body");
  body.setAttribute("role", "rowgroup");

  const paper = matchMedia("print");
  let table = { columns: [], rows: [] };
  let order = []; // rows that pass the filter, sorted
  let sort = null; // {column, down}
  let problem = ""; // what is wrong with the filter
  let labels = "";
  let ticked = new Set();

  const plain = (text) => String(text).toLowerCase();

  // Returns a test of one word of the filter: "loss<0.5", "state=live", or text in any cell.
  function test(word) {
    const [, left, sign, right] = word.match(COMPARE) ?? [];
    const column = left ? columnOf(left) : -1;
    if (column < 0) {
      if (left) problem = `no column "${left}"`;
      return (row) => row.text.some((text) => plain(text).includes(word));
    }
    const wanted = right === "" ? NaN : Number(right);
    if (sign !== "=" && Number.isNaN(wanted)) problem = `"${right}" is not a number`;
    if (sign === "=") {
      return (row) => plain(row.text[column]) === right
        || (row.key[column] !== null && plain(row.key[column]) === right)
        || (typeof row.key[column] === "number" && row.key[column] === wanted);
    }
    const compare = {
      "<": (a) => a < wanted, ">": (a) => a > wanted, "<=": (a) => a <= wanted, ">=": (a) => a >= wanted,
    }[sign];
    return (row) => typeof row.key[column] === "number" && compare(row.key[column]);
  }

  // Returns a column by its label, or by the beginning of its label if that is unique.
  function columnOf(name) {
    const names = table.columns.map((column) => plain(column.label).replaceAll(" ", ""));
    const exact = names.indexOf(name);
    const begun = names.flatMap((each, i) => (each.startsWith(name) ? [i] : []));
    return exact >= 0 ? exact : begun.length === 1 ? begun[0] : -1;
  }

  function arrange() {
    problem = "";
    const tests = plain(input.value).split(/\s+/).filter(Boolean).map(test);
    order = table.rows.filter((row) => tests.every((passes) => passes(row)));
    if (sort) {
      const { column, down } = sort;
      const sign = down ? -1 : 1;
      const text = new Intl.Collator("en", { numeric: true });
      order.sort((a, b) => {
        const [x, y] = [a.key[column], b.key[column]];
        if (x === null || y === null) return (x === null) - (y === null);
        if (typeof x === "number" && typeof y === "number") return sign * (x - y);
        return sign * text.compare(x, y);
      });
    }
    body.style.height = `${order.length * ROW}px`;
    grid.setAttribute("aria-rowcount", String(order.length + 1));
    say();
    drawHead();
    draw();
  }

  function say() {
    const of = order.length < table.rows.length ? `${order.length} of ` : "";
    const runs = table.rows.length === 1 ? "run" : "runs";
    const more = model.reading ? `, reading ${model.reading} more` : "";
    const why = problem && !order.length ? `: ${problem}` : "";
    status.textContent = `${of}${table.rows.length} ${runs}${why}, ${ticked.size} ticked${more}`;
    none.disabled = !ticked.size;
  }

  function drawHead() {
    head.replaceChildren();
    const all = htmlElement(head, "span", "cell tick");
    all.setAttribute("role", "columnheader");
    const box = checkbox(all, "Tick all listed runs");
    const on = order.filter((row) => ticked.has(row.name)).length;
    box.checked = on > 0 && on === order.length;
    box.indeterminate = on > 0 && on < order.length;
    box.addEventListener("change", () => {
      for (const row of order) ticked[box.checked ? "add" : "delete"](row.name);
      send();
    });
    table.columns.forEach((column, index) => {
      const cell = htmlElement(head, "span", column.number ? "cell number" : "cell");
      cell.setAttribute("role", "columnheader");
      cell.title = column.help;
      const chosen = sort?.column === index;
      cell.setAttribute("aria-sort", chosen ? (sort.down ? "descending" : "ascending") : "none");
      const mark = chosen ? (sort.down ? " \u2193" : " \u2191") : "";
      const button = htmlElement(cell, "button", "", `${column.label}${mark}`);
      button.type = "button";
      button.dataset.column = column.label;
      button.addEventListener("click", () => {
        if (!chosen) sort = { column: index, down: false };
        else sort = sort.down ? null : { column: index, down: true };
        arrange();
        head.querySelectorAll("button")[index].focus();
      });
    });
  }

  function checkbox(parent, label) {
    const box = htmlElement(parent, "input");
    box.type = "checkbox";
    box.setAttribute("aria-label", label);
    return box;
  }

  function line(row, index) {
    const element = htmlElement(null, "div", "row");
    element.setAttribute("role", "row");
    element.setAttribute("aria-rowindex", String(index + 2));
    element.style.top = `${index * ROW}px`;
    element.dataset.run = row.name;
    if (row.name === model.shown) element.setAttribute("aria-current", "true");
    const tick = htmlElement(element, "span", "cell tick");
    tick.setAttribute("role", "gridcell");
    const box = checkbox(tick, `Tick ${visible(row.name)}`);
    box.checked = ticked.has(row.name);
    box.style.accentColor = safeColour(row.colour, "#3f6fd8");
    box.addEventListener("change", () => {
      ticked[box.checked ? "add" : "delete"](row.name);
      send();
    });
    row.text.forEach((text, column) => {
      const cell = htmlElement(element, "span", table.columns[column].number ? "cell number" : "cell");
      cell.setAttribute("role", "gridcell");
      if (column) cell.textContent = visible(text);
      else {
        const dot = htmlElement(cell, "i", "dot");
        if (ticked.has(row.name)) dot.style.background = safeColour(row.colour, "none");
        const open = htmlElement(cell, "button", "open", text);
        open.type = "button";
        open.addEventListener("click", () => outbox.post({ open: row.name }));
      }
      cell.title = visible(text);
    });
    return element;
  }

  function draw() {
    const focused = root.getRootNode().activeElement;
    const kept = focused?.closest(".body .row")?.dataset.run;
    const kind = focused?.type;
    const all = paper.matches; // paper cannot be scrolled
    const first = all ? 0 : Math.max(0, Math.floor(view.scrollTop / ROW) - SPARE);
    const last = all ? order.length : Math.ceil((view.scrollTop + view.clientHeight) / ROW) + SPARE;
    body.replaceChildren(...order.slice(first, last).map((row, i) => line(row, first + i)));
    if (!kept) return;
    const again = body.querySelector(`[data-run="${CSS.escape(kept)}"]`);
    again?.querySelector(kind === "checkbox" ? "input" : ".open")?.focus({ preventScroll: true });
  }

  function send() {
    const names = table.rows.map((row) => row.name).filter((name) => ticked.has(name));
    say();
    drawHead();
    draw();
    outbox.post({ ticked: names });
  }

  // Columns have the width of their widest text, up to a limit.
  function measure() {
    const pen = document.createElement("canvas").getContext("2d");
    const { fontSize, fontFamily } = getComputedStyle(root);
    pen.font = `600 ${fontSize} ${fontFamily}`;
    const widths = table.columns.map((column, index) => {
      const longest = table.rows.reduce(
        (most, row) => (row.text[index].length > most.length ? row.text[index] : most), "");
      const width = Math.max(pen.measureText(longest).width, pen.measureText(`${column.label} \u2193`).width);
      return `${Math.ceil(Math.min(width, index ? 210 : 300)) + (index ? 18 : 36)}px`;
    });
    grid.style.setProperty("--columns", `34px ${widths.join(" ")}`);
  }

  function take() {
    table = JSON.parse(model.content);
    if (outbox.idle) ticked = new Set(model.ticked);
    const now = JSON.stringify(table.columns.map((column) => column.label));
    if (sort && now !== labels) {
      const label = JSON.parse(labels)[sort.column];
      const column = table.columns.findIndex((each) => each.label === label);
      sort = column < 0 ? null : { ...sort, column };
    }
    labels = now;
    measure();
    arrange();
  }

  input.addEventListener("input", () => {
    view.scrollTop = 0;
    arrange();
  });
  none.addEventListener("click", () => {
    ticked.clear();
    send();
  });
  view.addEventListener("scroll", draw, { passive: true });
  paper.addEventListener("change", () => root.isConnected && draw());
  let styled = false; // fonts are known once the element is on the page
  new ResizeObserver(() => {
    if (!styled) measure();
    styled = true;
    draw();
  }).observe(view);
  const showReady = () => root.classList.toggle("unanswered", !model.ready);
  showReady();
  model.on("ready", showReady);
  model.on("content", take);
  model.on("shown", draw);
  model.on("reading", say);
  model.on("ticked", () => {
    if (!outbox.idle) return; // a newer choice is about to arrive
    ticked = new Set(model.ticked);
    say();
    drawHead();
    draw();
  });
  model.on("msg:custom", handOver);
  take();
  root.dataset.drawn = "";
  return root;
}
