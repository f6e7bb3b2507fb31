// A tour of the page in four stops, shown on the first visit. A click or Escape ends it. It works without the server. Automated browsers see it only if the URL ends in #tour.
(() => {
  const KEY = "comgra_decl.tour";
  const LOOK = 300; // ms between checks of whether the page has loaded
  const STOPS = [
    [".strip", "The verdict on the run", "What the rules found, worst first. “Show me” walks you through the evidence, "
      + "which you can export as one file."],
    [".graph", "The network", "Click a box to select its tensor. Double-click a group to expand it. "
      + "Press / to find a node."],
    [".stepbar", "The steps", "Every recorded step. Press , or . to move by one step. Flags mark where findings begin."],
    [".tabs", "The sections", "Overview compares all tensors over all steps. Inspect shows the selected tensor. "
      + "All sections share one selection."],
  ];
  const seen = () => { try { return localStorage.getItem(KEY); } catch { return "unknown"; } };
  const remember = () => { try { localStorage.setItem(KEY, "seen"); } catch { /* not allowed */ } };

  // Returns the first visible match, including matches in shadow roots.
  function find(selector, root = document) {
    for (const element of root.querySelectorAll(selector)) {
      if (element.getClientRects().length) return element;
    }
    for (const element of root.querySelectorAll("*")) {
      const found = element.shadowRoot && find(selector, element.shadowRoot);
      if (found) return found;
    }
    return null;
  }

  function make(parent, tag, className, text = "") {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    parent.append(element);
    return element;
  }

  let open = false; // whether the tour is on the page

  function start() {
    if (open) return;
    const before = document.activeElement;
    const root = make(document.body, "div", "tour");
    const frame = make(root, "div", "tour-frame");
    const card = make(root, "div", "tour-card");
    card.setAttribute("role", "dialog");
    card.setAttribute("aria-modal", "true");
    card.setAttribute("aria-labelledby", "tour-title");
    card.setAttribute("aria-describedby", "tour-text");
    const title = make(card, "h2", "");
    title.id = "tour-title";
    const text = make(card, "p", "");
    text.id = "tour-text";
    const row = make(card, "div", "tour-row");
    const place = make(row, "span", "");
    const end = make(row, "button", "", "End tour");
    const next = make(row, "button", "main", "Next");
    for (const button of [end, next]) button.type = "button";
    let at = 0;

    function show() {
      const [selector, head, body] = STOPS[at];
      const target = find(selector)?.getBoundingClientRect() ?? new DOMRect(0, 0, innerWidth, 0);
      title.textContent = head;
      text.textContent = body;
      place.textContent = `${at + 1} of ${STOPS.length}`;
      next.textContent = at + 1 < STOPS.length ? "Next" : "Done";
      Object.assign(frame.style, { left: `${target.left}px`, top: `${target.top}px`,
        width: `${target.width}px`, height: `${target.height}px` });
      const { offsetHeight: height, offsetWidth: width } = card;
      const below = target.bottom + 10;
      const top = below + height < innerHeight ? below : target.top - height - 10;
      card.style.top = `${Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
      card.style.left = `${Math.max(8, Math.min(target.left + 14, innerWidth - width - 8))}px`;
    }
    function close() {
      remember();
      removeEventListener("resize", show);
      document.removeEventListener("keydown", key, true);
      root.remove();
      open = false;
      before?.focus?.();
    }
    function step(by) {
      at = Math.max(0, at + by);
      if (at < STOPS.length) show();
      else close();
    }
    function key(event) {
      const moves = { Escape: close, ArrowRight: () => step(1), ArrowLeft: () => step(-1) };
      const other = event.composedPath()[0] === end ? next : end; // Tab stays inside
      if (event.key === "Tab") other.focus();
      else if (moves[event.key]) moves[event.key]();
      else if (event.key !== "Enter" && event.key !== " ") close(); // the page's own keys keep working
      if (event.key === "Tab" || moves[event.key]) {
        event.preventDefault();
        event.stopPropagation();
      }
    }
    next.addEventListener("click", () => step(1));
    end.addEventListener("click", close);
    root.addEventListener("click", (event) => { if (event.target === root) close(); });
    addEventListener("resize", show);
    document.addEventListener("keydown", key, true);
    open = true;
    show();
    next.focus();
  }

  document.addEventListener("click", (event) => {
    if (event.target.closest?.("button")?.id === "tour") start();
  });
  const asked = location.hash === "#tour";
  if (!asked && (seen() || navigator.webdriver)) return;
  const timer = setInterval(() => {
    if (!find(".strip") || !find(".stepbar")) return;
    clearInterval(timer);
    start();
  }, LOOK);
})();
