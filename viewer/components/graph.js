export function render({ model }) {
  const outbox = new Outbox(model);
  const svg = svgElement(null, "svg", { width: "100%", height: "100%" });
  const draw = () => {
    svg.replaceChildren();
    const scene = model.scene;
    svg.setAttribute("viewBox", `0 0 ${scene.width || 1} ${scene.height || 1}`);
    for (const box of scene.boxes) {
      const group = svgElement(svg, "g", { class: "node", tabindex: 0, "data-id": box.id });
      group.classList.toggle("selected", box.id === model.selected);
      svgElement(group, "rect", { x: box.x, y: box.y, width: box.w, height: box.h, rx: 6 });
      svgElement(group, "text", { x: box.x + 8, y: box.y + 20 }).textContent = box.label;
      group.addEventListener("click", () => outbox.post({ select: box.id }));
      group.addEventListener("dblclick", () => box.folded && outbox.post({ expand: box.id }));
    }
  };
  model.on("scene", draw); model.on("selected", draw); draw();
  return svg;
}
