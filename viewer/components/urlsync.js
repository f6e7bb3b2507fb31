// Keeps the page's URL in sync with the model's query, and reports Back and Forward.

const REPLACE_DELAY = 200; // ms; browsers refuse more than about 100 changes in 30 s

export function render({ model, el }) {
  el.style.display = "none";
  const outbox = new Outbox(model);
  let timer = null;

  const address = () => location.pathname + model.query + location.hash;
  const write = () => {
    clearTimeout(timer);
    timer = null;
    const query = model.query;
    if (query !== "" && !query.startsWith("?")) return;
    if (query !== location.search) {
      if (model.push) history.pushState(null, "", address());
      else history.replaceState(null, "", address());
    }
  };
  // `query` and `push` change together but arrive one after the other
  const change = () => setTimeout(() => {
    if (model.push) write();
    else timer = timer ?? setTimeout(write, REPLACE_DELAY);
  }, 0);
  const restore = () => {
    clearTimeout(timer);
    timer = null;
    outbox.post({ query: location.search });
  };

  history.replaceState(null, "", location.href); // so that the first Back has a target
  model.on("query", change);
  window.addEventListener("popstate", restore);
  restore();
}
