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

  // Keeps the focus on the same element when the content is replaced.
  function draw() {
    const focused = root.getRootNode().activeElement;
    const token = focused && focused.dataset ? focused.dataset.send : null;
    content.innerHTML = model.html;
    if (token) content.querySelector(`[data-send="${CSS.escape(token)}"]`)?.focus();
  }

  content.addEventListener("click", (event) => {
    const target = marked(event);
    if (target) outbox.post({ send: target.dataset.send });
  });
  content.addEventListener("keydown", (event) => {
    const target = marked(event);
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
