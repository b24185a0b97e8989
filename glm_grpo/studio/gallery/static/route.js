/* The address: "#view?name=value&..." holds all state of a view that matters, so that an address
   shared or reloaded shows the same. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const DEFAULT_VIEW = "start";
  /* Browsers refuse more than about 200 changes of the address in ten seconds. */
  const WRITE_DELAY_MS = 100;

  const listeners = new Set();
  let current = parse();
  let timer = null;

  function parse() {
    const [view, query = ""] = splitOnce(location.hash.replace(/^#/, ""), "?");
    return { view: view || DEFAULT_VIEW, params: Object.fromEntries(new URLSearchParams(query)) };
  }

  function splitOnce(text, separator) {
    const at = text.indexOf(separator);
    return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
  }

  /** What the address says: {view, params}, values of params are strings. */
  function route() {
    return current;
  }

  /** "#view?name=value&..."; values that are undefined, null or "" are left out. */
  function link(view, params = {}) {
    const isGiven = ([, value]) => value !== undefined && value !== null && value !== "";
    const query = new URLSearchParams(Object.entries(params).filter(isGiven)).toString();
    return `#${view}${query ? `?${query}` : ""}`;
  }

  /** Show a view, as a new entry of the browser's history. */
  function go(view, params = {}) {
    write();
    history.pushState(null, "", link(view, params));
    follow();
  }

  /** Change the state of a view without a new entry; may be called as fast as a slider moves. */
  function replace(view, params = {}) {
    const query = link(view, params).slice(view.length + 2);
    current = { view, params: Object.fromEntries(new URLSearchParams(query)) };
    if (timer === null) timer = setTimeout(write, WRITE_DELAY_MS);
    notify();
  }

  function write() {
    if (timer === null) return;
    clearTimeout(timer);
    timer = null;
    history.replaceState(null, "", link(current.view, current.params));
  }

  function follow() {
    clearTimeout(timer);
    timer = null;
    current = parse();
    notify();
  }

  function notify() {
    listeners.forEach((listener) => listener(current));
  }

  /** Hook: the route, and a new rendering whenever it changes. */
  function useRoute() {
    const [shown, show] = preactHooks.useState(current);
    preactHooks.useLayoutEffect(() => {
      listeners.add(show);
      show(current);
      return () => listeners.delete(show);
    }, []);
    return shown;
  }

  window.addEventListener("popstate", follow);
  window.addEventListener("hashchange", follow);
  window.addEventListener("pagehide", write);

  Object.assign(gallery, { route, link, go, replace, useRoute });
})();
