// Theme and sidebar toggles, which work without the server.
(() => {
  const root = document.documentElement;
  const KEY = "comgra_decl.theme";
  const kept = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const keep = (name) => { try { localStorage.setItem(KEY, name); } catch { /* not allowed */ } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  let looked = new WeakMap(); // figure part -> CSS property -> computed value

  // On every paint, Bokeh queries the style sheets for each property of each figure part. This takes half of the painting time, although the values change only with the theme.
  const remembered = (part, name, look) => {
    if (!looked.has(part)) looked.set(part, new Map());
    const known = looked.get(part);
    if (!known.has(name)) known.set(name, look());
    return known.get(name);
  };
  const remember = () => {
    const part = Bokeh.require("core/visuals/visual").VisualProperties.prototype;
    const look = part._get_css_value;
    part._get_css_value = function (name) {
      if (!this.obj.el.isConnected) return look.call(this, name); // no style sheet applies yet
      return remembered(this, name, () => look.call(this, name));
    };
    // On every paint, each figure part rewrites its position, usually unchanged. Rewriting a style
    // sheet makes the browser restyle the page before it draws the next character.
    const { InlineStyleSheet } = Bokeh.require("core/dom");
    const write = InlineStyleSheet.prototype._update;
    InlineStyleSheet.prototype._update = function (css) {
      if (this.el.textContent !== css) write.call(this, css);
    };
    const { PlotView } = Bokeh.require("models/plots/plot_canvas");
    const size = Object.getOwnPropertyDescriptor(PlotView.prototype, "base_font_size").get;
    Object.defineProperty(PlotView.prototype, "base_font_size", {
      get() { return remembered(this, "font-size", () => size.call(this)); },
    });
  };

  const wear = (theme = kept() ?? (system.matches ? "dark" : "light")) => {
    looked = new WeakMap();
    root.dataset.theme = theme;
    for (const figure of window.Bokeh?.index.query((view) => "request_repaint" in view) ?? []) {
      figure.request_repaint(); // a canvas keeps its old colours
    }
  };
  wear(); // before anything is painted
  system.addEventListener("change", () => wear());
  // Between "beforeprint" and the print, the browser applies the style sheets but runs no observers.
  // The page is therefore laid out for paper here: white, without controls, as wide as A4.
  const lay = (printed) => {
    wear(printed ? "light" : undefined);
    root.classList.toggle("paper", printed);
    window.dispatchEvent(new CustomEvent("paper", { detail: printed }));
    for (const figure of window.Bokeh?.index.query((view) => "repaint" in view) ?? []) {
      figure.after_resize();
      figure.request_repaint(); // of everything
      figure.repaint();
      const { primary, overlays } = figure.canvas_view;
      // Chromium prints what a canvas cleared as white, which would cover the canvas below
      if (printed && figure.is_displayed) primary.ctx.drawImage(overlays.canvas, 0, 0);
      overlays.canvas.style.visibility = printed ? "hidden" : "";
    }
  };
  const paper = matchMedia("print");
  paper.addEventListener("change", () => lay(paper.matches));
  window.addEventListener("beforeprint", () => lay(true));
  window.addEventListener("afterprint", () => {
    lay(false);
    requestAnimationFrame(() => lay(paper.matches)); // the style sheets for paper applied until now
  });
  window.addEventListener("storage", (event) => { if (event.key === KEY) wear(); });
  if (window.Bokeh) {
    try {
      remember();
    } catch (error) {
      console.info("Unsupported Bokeh version: figures are drawn more slowly.", error);
    }
  }
  const narrow = matchMedia("(max-width: 1000px)"); // the open sidebar then covers the page
  const fold = () => root.classList.toggle("alone", narrow.matches);
  fold();
  narrow.addEventListener("change", fold);
  document.addEventListener("click", (event) => {
    const { id } = event.target.closest?.("button") ?? {};
    if (id === "again") location.reload();
    if (id === "menu") root.classList.toggle("alone");
    else if (narrow.matches && !event.target.closest("#side")) root.classList.add("alone");
    if (id !== "theme") return;
    keep(root.dataset.theme === "dark" ? "light" : "dark");
    wear();
  });
})();
