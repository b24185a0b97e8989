/* Hooks that the views share: keys of the page, what a promise brings, what is near the screen. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { useEffect, useLayoutEffect, useMemo, useRef, useState } = preactHooks;

  const NEAR_MARGIN = "800px";
  /* Of a region in its first rendering, before its height is known. */
  const FIRST_HEIGHT = 800;

  /* Places that need all keys for themselves, and those that need the named ones, such as arrows. */
  const TYPING = "input:not([type=checkbox], [type=radio], [type=range]), textarea";
  const MOVING = "[type=radio], [type=range], [role=grid], [role=slider], .scroll-region";

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
   * KeyboardEvent.key. Silent where a key has its own use, and without isInDialog while a dialog is
   * open.
   */
  function useKeys(map, { isInDialog = false } = {}) {
    const latest = useRef(map);
    latest.current = map;
    /* Before the next frame, in which a key may come already. */
    useLayoutEffect(() => {
      function onKeyDown(event) {
        if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.key.length === 1 && !keys.areOn) return;
        const handler = Object.hasOwn(latest.current, event.key) ? latest.current[event.key] : null;
        if (!handler || isUsed(event.key, event.target)) return;
        if (!isInDialog && document.querySelector("dialog[open]")) return;
        event.preventDefault();
        handler(event);
      }
      document.addEventListener("keydown", onKeyDown);
      return () => document.removeEventListener("keydown", onKeyDown);
    }, [isInDialog]);
  }

  /* Whether the element that has the focus needs the key itself. */
  function isUsed(key, target) {
    if (target.closest(TYPING)) return true;
    /* Letters and digits choose an entry of a list. */
    if (target.closest("select")) return key !== "?";
    return key.length > 1 && target.closest(MOVING) !== null;
  }

  /**
   * What a promise brings: {data, error, progress}. `start(onProgress)` is called again whenever
   * `deps` change, and when the page adopts newer data of the run: what was there then stays until
   * the new has come. progress is {done, total} or null.
   */
  function useLoaded(start, deps) {
    const [state, setState] = useState({ data: undefined, error: null, progress: null });
    const question = useMemo(() => ({}), deps);
    const asked = useRef(null);
    useEffect(() => {
      let isWanted = true;
      const update = (change) => isWanted && setState((state) => ({ ...state, ...change }));
      if (asked.current !== question) setState({ data: undefined, error: null, progress: null });
      asked.current = question;
      start((done, total) => update({ progress: { done, total } })).then(
        (data) => update({ data, error: null }),
        (error) => update({ error }),
      );
      return () => {
        isWanted = false;
      };
    }, [question, gallery.run]);
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
        /* Of the page, and of regions that scroll by themselves. */
        { rootMargin: NEAR_MARGIN, scrollMargin: NEAR_MARGIN },
      );
      observer.observe(ref.current);
      return () => observer.disconnect();
    }, [isNear]);
    return [ref, isNear];
  }

  /**
   * What of a region with a scroll bar is in sight, in CSS pixels: {top, height, width}. `top` in
   * whole rows: most movements need no other rows.
   */
  function useScrolled(ref, rowHeight) {
    const [view, setView] = useState({ top: 0, height: FIRST_HEIGHT, width: 0 });
    useLayoutEffect(() => {
      const region = ref.current;
      function look() {
        const { scrollTop, clientHeight: height, clientWidth: width } = region;
        const seen = { top: scrollTop - (scrollTop % rowHeight), height, width };
        setView((known) => (Object.keys(seen).every((key) => known[key] === seen[key]) ? known : seen));
      }
      look();
      const observer = new ResizeObserver(look);
      observer.observe(region);
      region.addEventListener("scroll", look);
      return () => {
        observer.disconnect();
        region.removeEventListener("scroll", look);
      };
    }, [rowHeight]);
    return view;
  }

  gallery.parts = { keys, memo, useKeys, useLoaded, useNear, useScrolled };
})();
