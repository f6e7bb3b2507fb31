// Times what a person sees: from the browser's own time stamp of an input event to the frame in
// which everything expected has been painted. Runs in the page before anything else.
(() => {
  const PATIENCE = 20000; // ms, for a change
  const OPENING = 60000; // ms, for a page
  const later = (act) => {
    const channel = new MessageChannel(); // after the paint of this frame, unlike a timeout
    channel.port1.onmessage = act;
    channel.port2.postMessage(0);
  };
  const roots = () => {
    const found = [document];
    for (const root of found) {
      for (const element of root.querySelectorAll("*")) {
        if (element.shadowRoot) found.push(element.shadowRoot);
      }
    }
    return found;
  };
  const probe = {
    roots: [],
    // Finds each place once: walking through all shadow roots takes longer than a change.
    settle() { probe.roots = roots(); },
    // What the server has answered, over all components of ours.
    answers() {
      const models = [...Bokeh.documents[0]._all_models.values()];
      return models.reduce((sum, model) => sum + (model.data?.attributes?.ack ?? 0), 0);
    },
    has(selector) {
      if (selector === "answered") return probe.answers() > probe.before;
      probe.roots = probe.roots.filter((root) => root === document || root.host.isConnected);
      return probe.roots.some((root) => root.querySelector(selector));
    },
    idle() {
      const [page] = window.Bokeh?.documents ?? [];
      return !!page && page.is_idle;
    },
    // Resolves with the time at which all selectors have been met and painted.
    painted(selectors, idle = true) {
      return new Promise((resolve, reject) => {
        const until = performance.now() + PATIENCE;
        const look = () => {
          if (performance.now() > until) return reject(new Error(`never came: ${selectors}`));
          if (selectors.every(probe.has) && (!idle || probe.idle())) {
            return later(() => resolve(performance.now()));
          }
          requestAnimationFrame(look);
        };
        requestAnimationFrame(look);
      });
    },
    // Waits for the next event of a type, then for what it should lead to: "answered", or CSS.
    expect(type, selectors, first) {
      const follow = async (event) => {
        const start = event.timeStamp;
        probe.before = probe.answers();
        const early = first && probe.painted([first], false);
        const all = await probe.painted(selectors);
        return { all: all - start, first: early ? (await early) - start : null };
      };
      probe.result = new Promise((resolve, reject) => {
        window.addEventListener(type, (event) => { follow(event).then(resolve, reject); },
          { capture: true, once: true });
        setTimeout(() => reject(new Error(`no ${type}, or no answer`)), 2 * PATIENCE);
      });
    },
    // Resolves when the page can be used: all drawn, and messages are accepted.
    async usable(selectors) {
      const ready = () => {
        probe.settle();
        const models = [...(window.Bokeh?.documents[0]?._all_models.values() ?? [])];
        const own = models.map((model) => model.data?.attributes ?? {})
          .filter((data) => "scene" in data || "runs" in data); // the graph, the bar of steps
        return own.length === 2 && own.every((data) => data.ready);
      };
      while (!ready() || !selectors.every(probe.has)) {
        if (performance.now() > OPENING) throw new Error(`never drawn: ${selectors}`);
        await new Promise((resolve) => { requestAnimationFrame(resolve); });
      }
      return probe.painted(selectors);
    },
    // Intervals between frames until stopped.
    frames() {
      const times = [];
      let going = true;
      const tick = (now) => { times.push(now); if (going) requestAnimationFrame(tick); };
      requestAnimationFrame(tick);
      probe.stop = () => { going = false; return times.slice(1).map((t, i) => t - times[i]); };
    },
    // Times from new colours of all boxes, as they arrive from the server, to the painted frame.
    async recolour(count) {
      const models = [...Bokeh.documents[0]._all_models.values()].map((model) => model.data);
      const graph = models.find((data) => data?.attributes && "scene" in data.attributes);
      const ids = graph.scene.boxes.map((box) => box.id);
      const shade = () => Math.floor(16 + Math.random() * 240).toString(16).padStart(2, "0");
      const times = [];
      for (let i = 0; i < count; i += 1) {
        const heat = Object.fromEntries(ids.map((id) =>
          [id, { fill: `#${shade()}${shade()}${shade()}`, text: Math.random().toPrecision(3) }]));
        const start = performance.now();
        graph.painted = JSON.stringify(heat);
        await new Promise((resolve) => { requestAnimationFrame(() => later(resolve)); });
        times.push(performance.now() - start);
        await new Promise((resolve) => { setTimeout(resolve, 300); }); // until all are coloured
      }
      return times;
    },
    // Changes the step many times by itself, for several pages at once.
    async drive(count, pause) {
      const times = [];
      for (let i = 0; i < count; i += 1) {
        const back = i % 2 === 0; // a page shows the last step first
        const now = +probe.roots.map((root) => root.querySelector("article")).find((x) => x)
          .dataset.step;
        const start = performance.now();
        const init = { key: back ? "," : ".", bubbles: true, composed: true };
        document.body.dispatchEvent(new KeyboardEvent("keydown", init));
        times.push(await probe.painted([`article[data-step="${now + (back ? -1 : 1)}"]`]) - start);
        await new Promise((resolve) => { setTimeout(resolve, pause); });
      }
      return times;
    },
  };
  window.probe = probe;
})();
