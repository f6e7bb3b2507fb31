// A button with a menu of downloads, for mouse and keyboard.

const SAVE_CSS = `
.save { --ink: var(--panel-on-surface-color, #1c2333); display: var(--screen-only, block); position: relative; }
.save > button { align-items: center; background: none; border: 0; border-radius: 6px; color: var(--ink);
  cursor: pointer; display: flex; height: 22px; justify-content: center; opacity: 0.62; padding: 0; width: 24px; }
.save > button:hover, .save > button:focus-visible, .save > button[aria-expanded="true"] {
  background: color-mix(in srgb, var(--ink) 9%, transparent); opacity: 1; }
.save button:focus-visible { outline: 2px solid var(--panel-primary-color, #3f5fd0); outline-offset: -1px; }
.save [role="menu"] { background: var(--panel-surface-color, #fff); border-radius: 8px;
  box-shadow: 0 2px 10px rgb(0 0 0 / 30%); min-width: 150px; padding: 4px; position: absolute; right: 0;
  top: 24px; z-index: 20; }
.save [role="menu"][hidden] { display: none; }
.save [role="menuitem"] { background: none; border: 0; border-radius: 5px; color: var(--ink); cursor: pointer;
  display: block; font: 12px/1.4 system-ui, "Segoe UI", Roboto, sans-serif; padding: 4px 8px; text-align: left;
  white-space: nowrap; width: 100%; }
.save [role="menuitem"][hidden] { display: none; }
.save [role="menuitem"]:hover, .save [role="menuitem"]:focus {
  background: color-mix(in srgb, var(--ink) 9%, transparent); }
`;

// Each entry is [label, action, whether it needs the server]. The first word of the label is its name.
// `answered` returns whether the server answers.
function saveMenu(label, entries, answered) {
  const root = htmlElement(null, "div", "save");
  htmlElement(root, "style", "", SAVE_CSS);
  const button = htmlElement(root, "button");
  Object.assign(button, { type: "button", title: "Save" });
  for (const [name, value] of Object.entries({ "aria-label": `Save ${label}`,
    "aria-haspopup": "menu", "aria-expanded": "false" })) button.setAttribute(name, value);
  const icon = svgElement(button, "svg", { width: 14, height: 14, viewBox: "0 0 14 14",
    fill: "none", stroke: "currentColor", "stroke-width": 1.5, "aria-hidden": "true" });
  svgElement(icon, "path", { d: "M7 1v8M3.5 6L7 9.5L10.5 6M1.5 12.8h11" });
  const menu = htmlElement(root, "div");
  menu.setAttribute("role", "menu");
  menu.hidden = true;
  const items = entries.map(([text, act, asks = false]) => {
    const item = htmlElement(menu, "button", "", text);
    Object.assign(item, { type: "button", tabIndex: -1 });
    item.setAttribute("role", "menuitem");
    item.dataset.asks = asks;
    item.addEventListener("click", () => {
      open(false);
      act();
    });
    return item;
  });

  function open(wanted) {
    menu.hidden = !wanted;
    button.setAttribute("aria-expanded", String(wanted));
    for (const item of items) item.hidden = item.dataset.asks === "true" && !answered();
    if (wanted) items[0].focus();
    else if (root.contains(root.getRootNode().activeElement)) button.focus();
  }

  button.addEventListener("click", () => open(menu.hidden));
  root.addEventListener("focusout", (event) => {
    if (!root.contains(event.relatedTarget)) open(false);
  });
  root.addEventListener("keydown", (event) => {
    if (menu.hidden) return;
    const offered = items.filter((item) => !item.hidden);
    const at = offered.indexOf(root.getRootNode().activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (to !== undefined) offered.at(to % offered.length).focus();
    else if (event.key === "Escape") open(false);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  for (const name of ["pointerdown", "click", "dblclick"]) {
    root.addEventListener(name, (event) => event.stopPropagation()); // keep events from the figure
  }
  return root;
}

// Returns a file name valid on every system, with node and step from the URL.
function fileName(title, ending) {
  const at = new URLSearchParams(location.search);
  const step = at.get("step");
  const parts = [at.get("node"), step && `step${step}`, title].filter(Boolean);
  return parts.join("-").replace(/[^A-Za-z0-9._-]+/g, "_").slice(0, 150) + ending;
}

function paperOf(element) {
  const colour = getComputedStyle(element).getPropertyValue("--panel-surface-color").trim();
  return safeColour(colour, "#ffffff");
}
