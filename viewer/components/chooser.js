// Drop-downs and button rows with labels. They are updated in place, so that an open menu keeps its
// position while other fields change.

const MANY = 20; // menus with more options get a search box

export function render({ model }) {
  const outbox = new Outbox(model);
  const root = htmlElement(null, "div", "chooser");
  const drawn = new Map(); // field name -> {holder, signature, show}
  let groups = [];
  let shape = "";

  const signature = (field) => JSON.stringify([field.style, field.options]);

  function fillMenu(select, field) {
    select.replaceChildren();
    const groups = new Map();
    for (const option of field.options) {
      let parent = select;
      if (option.group) {
        if (!groups.has(option.group)) {
          const group = htmlElement(select, "optgroup");
          group.label = option.group;
          groups.set(option.group, group);
        }
        parent = groups.get(option.group);
      }
      htmlElement(parent, "option", "", option.label).value = option.value;
    }
  }

  function menu(holder, field) {
    const narrow = field.options.length > MANY ? finder(holder, field) : null;
    const select = htmlElement(holder, "select");
    select.setAttribute("aria-label", field.label);
    fillMenu(select, field);
    narrow?.(select);
    select.addEventListener("change", () => outbox.post({ [field.name]: select.value }));
    return (now) => {
      select.value = now.value;
      select.disabled = now.options.length < 2;
    };
  }

  // Filters a long menu to the options that contain all typed words. Enter selects the first one.
  function finder(holder, field) {
    const input = htmlElement(holder, "input", "finder");
    Object.assign(input, { type: "search", placeholder: `Search ${field.options.length} options` });
    input.setAttribute("aria-label", `Search ${field.label}`);
    return (select) => {
      const found = () => {
        const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
        const text = (option) => `${option.group}/${option.label}`.toLowerCase();
        return field.options.filter((o) => words.every((word) => text(o).includes(word)));
      };
      const clear = () => {
        const value = select.value || chosen;
        input.value = "";
        fillMenu(select, field);
        select.value = value;
      };
      let chosen = "";
      input.addEventListener("focus", () => { chosen = select.value || chosen; });
      input.addEventListener("input", () => {
        const options = found();
        const kept = options.some((option) => option.value === chosen);
        fillMenu(select, { ...field, options });
        if (!kept) select.prepend(new Option(`${options.length} found`, "", true, true));
        else select.value = chosen;
      });
      input.addEventListener("keydown", (event) => {
        const [first] = found();
        if (event.key === "Escape") clear();
        if (event.key !== "Enter" || !first) return;
        clear();
        select.value = first.value;
        outbox.post({ [field.name]: first.value });
      });
      select.addEventListener("change", clear);
    };
  }

  function buttons(holder, field) {
    const row = htmlElement(holder, "div", "buttons");
    row.setAttribute("role", "radiogroup");
    row.setAttribute("aria-label", field.label);
    for (const option of field.options) {
      const button = htmlElement(row, "button", "", option.label);
      button.type = "button";
      button.dataset.value = option.value;
      button.setAttribute("role", "radio");
      button.addEventListener("click", () => outbox.post({ [field.name]: option.value }));
    }
    return (now) => {
      for (const button of row.children) {
        const chosen = button.dataset.value === now.value;
        button.setAttribute("aria-checked", String(chosen));
        button.classList.toggle("chosen", chosen);
      }
    };
  }

  // A number input with a range. Sends the number when the user has finished typing.
  function number(holder, field) {
    const input = htmlElement(holder, "input");
    input.type = "number";
    input.setAttribute("aria-label", field.label);
    input.addEventListener("change", () => {
      const wanted = Math.min(input.max, Math.max(input.min, Math.round(Number(input.value))));
      if (input.value !== "" && Number.isFinite(wanted)) outbox.post({ [field.name]: String(wanted) });
    });
    return (now) => {
      input.min = now.low;
      input.max = now.high;
      if (input.getRootNode().activeElement !== input || Number(input.value) !== Number(now.value)) {
        input.value = now.value;
      }
      input.disabled = now.low >= now.high;
    };
  }

  // A slider over the options. Sends the option at which the user lets go.
  function slider(holder, field) {
    const row = htmlElement(holder, "div", "slider");
    const input = htmlElement(row, "input");
    const output = htmlElement(row, "output");
    Object.assign(input, { type: "range", min: 0, max: field.options.length - 1 });
    input.setAttribute("aria-label", field.label);
    const say = () => {
      output.textContent = field.options[input.value].label;
      input.setAttribute("aria-valuetext", output.textContent);
    };
    input.addEventListener("input", say);
    input.addEventListener("change", () => {
      outbox.post({ [field.name]: field.options[input.value].value });
    });
    return (now) => {
      if (input.matches(":active")) return;
      input.value = now.options.findIndex((option) => option.value === now.value);
      say();
    };
  }

  // Buttons that trigger an action. No button remains selected.
  function actions(holder, field) {
    const row = htmlElement(holder, "div", "buttons actions");
    for (const option of field.options) {
      const button = htmlElement(row, "button", "", option.label);
      button.type = "button";
      button.dataset.value = option.value;
      button.addEventListener("click", () => outbox.post({ [field.name]: option.value }));
    }
    return () => {};
  }

  const STYLES = { menu, buttons, number, actions, slider };

  function build() {
    root.replaceChildren();
    drawn.clear();
    for (const group of groups) {
      const section = htmlElement(root, "section");
      htmlElement(section, "h2", "", group.title);
      for (const field of group.fields) {
        const holder = htmlElement(section, "div", "field");
        holder.dataset.field = field.name;
        htmlElement(holder, "label", "", field.label);
        holder.title = field.help || "";
        const show = STYLES[field.style](holder, field);
        drawn.set(field.name, { holder, signature: signature(field), show });
      }
    }
  }

  function rebuildField(field, old) {
    const typing = old.holder.querySelector(".finder:focus");
    for (const part of old.holder.querySelectorAll("select, input, .buttons, .slider")) part.remove();
    old.show = STYLES[field.style](old.holder, field);
    old.signature = signature(field);
    const input = old.holder.querySelector(".finder");
    if (!typing || !input) return;
    old.show(field);
    input.focus();
    input.value = typing.value;
    input.dispatchEvent(new Event("input"));
  }

  function draw() {
    groups = JSON.parse(model.layout);
    const now = JSON.stringify(groups.map((g) => [g.title, g.fields.map((f) => f.name)]));
    if (now !== shape) {
      shape = now;
      build();
    }
    for (const field of groups.flatMap((group) => group.fields)) {
      const old = drawn.get(field.name);
      if (old.signature !== signature(field)) rebuildField(field, old);
      old.holder.title = field.help || "";
      old.show(field);
    }
  }

  const showReady = () => root.classList.toggle("unanswered", !model.ready);
  showReady();
  model.on("ready", showReady);
  model.on("layout", draw);
  model.on("msg:custom", handOver);
  draw();
  return root;
}
