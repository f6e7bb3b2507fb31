// Shows HTML from Python; elements with `data-send` act as buttons.

export function render({ model }) {
  const outbox = new Outbox(model);
  const root = document.createElement("div");
  root.className = "html";
  const style = document.createElement("style");
  style.textContent = model.css;
  const content = htmlElement(null, "div", "content");
  root.append(style, content);

  const marked = (event) => event.composedPath().find((e) => e.dataset && e.dataset.send);

  let opened = null;

  // Keeps the focus on the same element when the content is replaced, and shows what was opened.
  function draw() {
    const focused = root.getRootNode().activeElement;
    const token = focused && focused.dataset ? focused.dataset.send : null;
    content.innerHTML = model.html;
    if (token) content.querySelector(`[data-send="${CSS.escape(token)}"]`)?.focus();
    const card = content.querySelector("[data-opened]");
    if (card && card.dataset.opened !== opened) card.scrollIntoView({ block: "nearest" });
    opened = card ? card.dataset.opened : null;
  }

  content.addEventListener("click", (event) => {
    const target = marked(event);
    if (target) outbox.post({ send: target.dataset.send });
  });
  // Moves the focus between the cells of a table, of which Tab reaches only the first.
  function walk(event, cell) {
    const [down, right] =
      { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const row = cell.closest("tbody").rows[cell.parentElement.sectionRowIndex + down];
    const next = row?.cells[cell.cellIndex + right];
    if (!next?.dataset.send) return;
    event.preventDefault();
    event.stopPropagation();
    next.focus();
  }

  content.addEventListener("keydown", (event) => {
    const target = marked(event);
    if (target?.matches("tbody td") && event.key.startsWith("Arrow")) walk(event, target);
    if (target && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      event.stopPropagation();
      outbox.post({ send: target.dataset.send });
    }
  });
  const showReady = () => root.classList.toggle("unanswered", !model.ready);
  showReady();
  model.on("ready", showReady);
  model.on("msg:custom", handOver);
  model.on("html", draw);
  draw();
  return root;
}
