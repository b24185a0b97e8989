/* What a reader has set for all runs: remembered by the browser, where it lets a page do so. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { useEffect, useReducer } = preactHooks;

  const PREFIX = "glm-grpo.";
  const values = new Map();
  const listeners = new Set();

  /* A browser may refuse storage to pages from disk, or be out of room: it is then remembered until
     the page is left. */
  function withStorage(use) {
    try {
      return use(window.localStorage);
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      return null;
    }
  }

  /** The value of a setting as a string; null where none was set. */
  function get(name) {
    if (!values.has(name)) values.set(name, withStorage((storage) => storage.getItem(PREFIX + name)));
    return values.get(name);
  }

  /** Sets it; null forgets it. */
  function set(name, value) {
    values.set(name, value === null ? null : String(value));
    withStorage((storage) =>
      value === null ? storage.removeItem(PREFIX + name) : storage.setItem(PREFIX + name, value),
    );
    listeners.forEach((listener) => listener());
  }

  /** Hook: [value, set], and a new rendering whenever any component sets it. */
  function useSetting(name) {
    const [, update] = useReducer((count) => count + 1, 0);
    useEffect(() => {
      listeners.add(update);
      return () => listeners.delete(update);
    }, []);
    return [get(name), (value) => set(name, value)];
  }

  /** Hook: [isShown, toggle] of a part of a view that is shown or hidden. */
  function useShown(name, isUsual) {
    const [stored, set] = useSetting(name);
    const isShown = stored === null ? isUsual : stored === "yes";
    return [isShown, () => set(isShown ? "no" : "yes")];
  }

  Object.assign(gallery, { useSetting, useShown });
})();
