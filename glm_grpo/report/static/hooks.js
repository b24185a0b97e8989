/* Hooks that the views share: keys of the page, what a promise brings, what is near the screen. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { useEffect, useRef, useState } = preactHooks;

  const NEAR_MARGIN = "800px";

  /* Whether keys that are one character do anything: readers who speak to the computer switch them
     off, see WCAG 2.1.4. */
  const keys = { areOn: true };

  /** A component that is drawn again only when one of its props is another object or value. */
  function memo(Component) {
    return class extends preact.Component {
      shouldComponentUpdate(next) {
        return Object.keys(next).some((name) => next[name] !== this.props[name]);
      }

      render(props) {
        return preact.h(Component, props);
      }
    };
  }

  /**
   * Keys of the whole page while the component is shown: {key: handler}, keys as in
   * KeyboardEvent.key. Silent in fields, in tables that scroll and, without isInDialog, while a
   * dialog is open.
   */
  function useKeys(map, { isInDialog = false } = {}) {
    const latest = useRef(map);
    latest.current = map;
    useEffect(() => {
      function onKeyDown(event) {
        if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.key.length === 1 && !keys.areOn) return;
        const handler = Object.hasOwn(latest.current, event.key) ? latest.current[event.key] : null;
        if (!handler || isElsewhere(event.target, isInDialog)) return;
        event.preventDefault();
        handler(event);
      }
      document.addEventListener("keydown", onKeyDown);
      return () => document.removeEventListener("keydown", onKeyDown);
    }, [isInDialog]);
  }

  function isElsewhere(target, isInDialog) {
    if (!isInDialog && document.querySelector("dialog[open]")) return true;
    return target.closest("input, select, textarea, [role=grid], .scroll-region") !== null;
  }

  /**
   * What a promise brings: {data, error, progress}. `start(onProgress)` is called again whenever
   * `deps` change; progress is {done, total} or null.
   */
  function useLoaded(start, deps) {
    const [state, setState] = useState({ data: undefined, error: null, progress: null });
    useEffect(() => {
      let isWanted = true;
      const update = (change) => isWanted && setState((state) => ({ ...state, ...change }));
      setState({ data: undefined, error: null, progress: null });
      start((done, total) => update({ progress: { done, total } })).then(
        (data) => update({ data }),
        (error) => update({ error }),
      );
      return () => {
        isWanted = false;
      };
    }, deps);
    return state;
  }

  /** [ref, isNear]: isNear becomes and stays true once the element comes near the screen. */
  function useNear() {
    const ref = useRef(null);
    const [isNear, setIsNear] = useState(false);
    useEffect(() => {
      if (isNear || !ref.current) return undefined;
      const observer = new IntersectionObserver(
        (entries) => entries.some((entry) => entry.isIntersecting) && setIsNear(true),
        { rootMargin: NEAR_MARGIN },
      );
      observer.observe(ref.current);
      return () => observer.disconnect();
    }, [isNear]);
    return [ref, isNear];
  }

  gallery.parts = { keys, memo, useKeys, useLoaded, useNear };
})();
