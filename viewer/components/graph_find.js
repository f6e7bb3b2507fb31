// The search box: suggests nodes as the user types, including those inside folds.

const SUGGESTIONS = 8;

class FindBox {
  constructor(parent, { names, choose, search }) {
    Object.assign(this, { names, choose, search, found: [], active: 0 });
    this.frame = htmlElement(parent, "div", "find");
    this.input = htmlElement(this.frame, "input");
    for (const [name, value] of Object.entries({
      type: "search", placeholder: "Find a node  ( / )", autocomplete: "off", spellcheck: "false",
      role: "combobox", "aria-label": "Find a node", "aria-expanded": "false",
      "aria-autocomplete": "list", "aria-controls": "found",
    })) this.input.setAttribute(name, value);
    this.list = htmlElement(this.frame, "div", "found");
    Object.assign(this.list, { id: "found", role: "listbox", hidden: true });
    this.input.addEventListener("input", () => this.#suggest());
    this.input.addEventListener("focus", () => this.#suggest());
    this.input.addEventListener("blur", () => setTimeout(() => this.#close(), 150));
    this.input.addEventListener("keydown", (event) => this.#key(event));
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  #suggest() {
    const terms = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!terms.length) return this.#close();
    const rank = (name) => {
      const last = name.slice(name.lastIndexOf(".") + 1);
      return name === terms[0] ? 0 : last === terms[0] ? 1 : last.startsWith(terms[0]) ? 2 : 3;
    };
    const fits = ({ name }) => terms.every((term) => name.toLowerCase().includes(term));
    this.found = this.names().filter(fits)
      .map((item, at) => ({ ...item, rank: rank(item.name.toLowerCase()), at }))
      .sort((a, b) => a.rank - b.rank || a.at - b.at);
    this.#show();
  }

  #show() {
    this.active = 0;
    this.list.replaceChildren();
    for (const item of this.found.slice(0, SUGGESTIONS)) {
      const row = htmlElement(this.list, "div", `option kind-${item.kind}`);
      row.setAttribute("role", "option");
      htmlElement(row, "span", "dot");
      htmlElement(row, "span", "name", item.name);
      if (item.inside) htmlElement(row, "span", "where", `in ${item.inside}`);
      row.addEventListener("pointerdown", (event) => {
        event.preventDefault();
        this.#take(item);
      });
    }
    const more = this.found.length - SUGGESTIONS;
    if (more > 0) htmlElement(this.list, "div", "more", `and ${more} more`);
    if (!this.found.length) htmlElement(this.list, "div", "more", "no matching nodes");
    this.list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.#mark();
  }

  #mark() {
    [...this.list.querySelectorAll(".option")].forEach((row, i) => {
      row.setAttribute("aria-selected", i === this.active ? "true" : "false");
    });
  }

  #key(event) {
    const count = Math.min(SUGGESTIONS, this.found.length);
    if ((event.key === "ArrowDown" || event.key === "ArrowUp") && count) {
      this.active = (this.active + (event.key === "ArrowDown" ? 1 : count - 1)) % count;
      this.#mark();
    } else if (event.key === "Enter") {
      this.#enter();
    } else if (event.key === "Escape") {
      this.#close();
      this.input.blur();
    } else return;
    event.preventDefault();
  }

  #enter() {
    if (this.found.length) return this.#take(this.found[this.active]);
    if (this.input.value.trim()) this.search(this.input.value.trim());
  }

  #take(item) {
    this.#close();
    this.input.value = "";
    this.found = [];
    this.choose(item);
  }

  #close() {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
  }
}
