export function render({ model }) {
  const outbox = new Outbox(model);
  const bar = htmlElement(null, "div", "bar");
  const range = htmlElement(bar, "input");
  range.type = "range"; range.style.width = "70%"; range.min = 0;
  const text = htmlElement(bar, "span");
  const draw = () => {
    range.max = Math.max(0, model.steps.length - 1); range.value = model.index;
    text.textContent = ` step ${model.steps[model.index] ?? "-"} ${model.index + 1} / ${model.steps.length}`;
  };
  range.addEventListener("input", () => outbox.post({ index: Number(range.value) }));
  model.on("steps", draw); model.on("index", draw); draw();
  return bar;
}
