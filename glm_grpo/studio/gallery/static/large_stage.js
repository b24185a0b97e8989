/* The place of the large view where images are: all of them under one zoom, side by side or one
   over the other. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { Layer } = parts;
  const { useCallback, useEffect, useLayoutEffect, useRef, useState } = preactHooks;

  const GAP = 6;
  const LARGEST_SCALE = 32;
  /* From this scale on pixels keep their edges. */
  const PIXEL_SCALE = 2;
  const WHEEL_FACTOR = 0.002;
  /* Of one turn, in CSS pixels: wheels of some systems count in lines. */
  const LINE_HEIGHT = 40;
  const LARGEST_TURN = 200;
  /* CSS pixels that a finger goes before it turns the page. */
  const SWIPE = 60;

  /* There with the next frame, not some frames after it. */
  const AT_ONCE = { loading: "eager", decoding: "sync", draggable: false };

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  /** Columns and size of the panes of `count` images that show them largest. */
  function tile(count, stage, size) {
    let best = null;
    for (let columns = 1; columns <= count; columns += 1) {
      const rows = Math.ceil(count / columns);
      const width = (stage.width - GAP * (columns - 1)) / columns;
      const height = (stage.height - GAP * (rows - 1)) / rows;
      const fit = Math.min(width / size.width, height / size.height);
      if (best === null || fit > best.fit) best = { columns, width, height, fit };
    }
    return best;
  }

  /**
   * Hook: the zoom that all panes share: {scale, isFit, place, across, pan, zoomAt,
   * scaleTo, fit}. `place` is the style of an image in its pane.
   *
   * @param pane {width, height, fit}: its size, and the scale that fits an image into it.
   * @param size {width, height} of an image.
   */
  function useZoom(pane, size) {
    /* scale null: fits. x, y: the point of the image, 0 to 1, in the middle of its pane. */
    const [zoom, setZoom] = useState({ scale: null, x: 0.5, y: 0.5 });
    const scale = zoom.scale ?? pane.fit;
    const within = (at, length, room) => {
      const half = room / 2 / length;
      return half >= 0.5 ? 0.5 : clamp(at, half, 1 - half);
    };
    /* From the state as it is then: several events may come between two renderings. */
    const update = (change) =>
      setZoom((known) => {
        const next = { ...known, ...change(known, known.scale ?? pane.fit) };
        const at = next.scale ?? pane.fit;
        const x = within(next.x, size.width * at, pane.width);
        const y = within(next.y, size.height * at, pane.height);
        return { scale: next.scale, x, y };
      });
    const zoomTo = (wanted, [x, y]) =>
      update((known, before) => {
        const low = Math.min(pane.fit, 1);
        const next = clamp(wanted(before), low, Math.max(LARGEST_SCALE, pane.fit));
        const hold = (at, away, length) => at + (away / length) * (1 / before - 1 / next);
        return { scale: next, x: hold(known.x, x, size.width), y: hold(known.y, y, size.height) };
      });
    const [width, height] = [size.width * scale, size.height * scale];
    const left = pane.width / 2 - within(zoom.x, width, pane.width) * width;
    const top = pane.height / 2 - within(zoom.y, height, pane.height) * height;
    return {
      scale,
      isFit: zoom.scale === null,
      place: { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` },
      /** Where in the image, 0 to 1, a place of the pane is. */
      across: (x) => (x - left) / width,
      /** Moves what is seen by CSS pixels. */
      pan: (x, y) =>
        update((known, at) => ({
          x: known.x - x / at / size.width,
          y: known.y - y / at / size.height,
        })),
      /** Scales by a factor around a point, in CSS pixels from the middle of the pane. */
      zoomAt: (factor, point = [0, 0]) => zoomTo((before) => before * factor, point),
      /** To CSS pixels for one of the image. */
      scaleTo: (wanted, point = [0, 0]) => zoomTo(() => wanted, point),
      fit: () => setZoom({ scale: null, x: 0.5, y: 0.5 }),
    };
  }

  /** Hook: [ref, {width, height}] of an element, in CSS pixels. */
  function useSize() {
    const ref = useRef(null);
    const [size, setSize] = useState({ width: 1, height: 1 });
    useLayoutEffect(() => {
      const measure = () => {
        const { clientWidth, clientHeight } = ref.current;
        setSize({ width: Math.max(clientWidth, 1), height: Math.max(clientHeight, 1) });
      };
      measure();
      const observer = new ResizeObserver(measure);
      observer.observe(ref.current);
      return () => observer.disconnect();
    }, []);
    return [ref, size];
  }

  /* Hook: drags, pinches, swipes, wheel and double clicks on the panes of an element. */
  function useGestures(ref, handlers) {
    const latest = useRef(handlers);
    latest.current = handlers;
    const fingers = useRef(new Map());
    const call = useCallback((name, ...values) => latest.current[name](...values), []);
    useEffect(() => {
      const element = ref.current;
      /* By hand: the browser takes wheel listeners for passive ones otherwise. */
      const onWheel = (event) => {
        const pane = event.target.closest(".large-pane");
        if (!pane) return;
        event.preventDefault();
        const turn = event.deltaY * (event.deltaMode === 0 ? 1 : LINE_HEIGHT);
        const factor = Math.exp(-clamp(turn, -LARGEST_TURN, LARGEST_TURN) * WHEEL_FACTOR);
        call("zoomAt", factor, fromMiddle(pane, event));
      };
      element.addEventListener("wheel", onWheel, { passive: false });
      return () => element.removeEventListener("wheel", onWheel);
    }, []);
    /* The pane and the event of the first finger: later events have the element that captured the
       pointer as their target. `isSingle` until there is a second. */
    const start = useRef(null);
    return {
      onPointerDown(event) {
        const pane = event.target.closest(".large-pane");
        if (!pane || event.button !== 0) return;
        event.currentTarget.setPointerCapture(event.pointerId);
        fingers.current.set(event.pointerId, event);
        if (fingers.current.size > 1) start.current.isSingle = false;
        else start.current = { pane, event, isSingle: true };
        if (start.current.isSingle && !event.shiftKey) call("drag", pane, event, 0, 0);
      },
      onPointerMove(event) {
        const before = fingers.current.get(event.pointerId);
        if (!before) return;
        const { pane, isSingle } = start.current;
        const other = [...fingers.current.values()].find((finger) => finger !== before);
        fingers.current.set(event.pointerId, event);
        const [x, y] = [event.clientX - before.clientX, event.clientY - before.clientY];
        if (isSingle) call(event.shiftKey ? "pan" : "drag", pane, event, x, y);
        if (!other) return;
        const apart = (finger) =>
          Math.hypot(finger.clientX - other.clientX, finger.clientY - other.clientY);
        call("zoomAt", apart(event) / Math.max(apart(before), 1), fromMiddle(pane, event));
      },
      onPointerUp(event) {
        if (!fingers.current.delete(event.pointerId)) return;
        if (!start.current.isSingle || event.pointerType !== "touch") return;
        const from = start.current.event;
        call("swipe", event.clientX - from.clientX, event.clientY - from.clientY);
      },
      onPointerCancel(event) {
        fingers.current.delete(event.pointerId);
      },
      onDblClick(event) {
        if (start.current) call("toggle", fromMiddle(start.current.pane, event));
      },
    };
  }

  function fromMiddle(pane, { clientX, clientY }) {
    const { left, top, width, height } = pane.getBoundingClientRect();
    return [clientX - left - width / 2, clientY - top - height / 2];
  }

  /**
   * @param focus A ref that is given the element.
   * @param label What it is called.
   * @param layout "one", "side", "wipe" or "difference".
   * @param shown Images in their order: [{key, title, image, alt, over}], `over` laid over it; of layouts but "side" the
   *     first two count: what is seen, and what it is held against.
   * @param isFlipped Of "one": show the second.
   * @param wipe Of "wipe": how much of the width, 0 to 1, is the first's.
   * @param onWipe Called with another `wipe`.
   * @param moves What a swipe does: {left, right, up, down}, or undefined each.
   * @param zoomRef Is given the zoom; see useZoom.
   * @param onZoom Called when the zoom has another scale.
   */
  function Stage({ focus, label, layout, shown, isFlipped, wipe, onWipe, moves, zoomRef, onZoom }) {
    const size = gallery.run.image_size ?? { width: 256, height: 256 };
    const [ref, stage] = useSize();
    const pane = tile(layout === "side" ? shown.length : 1, stage, size);
    const zoom = useZoom(pane, size);
    zoomRef.current = zoom;
    useEffect(() => onZoom(zoom.scale), [zoom.scale]);
    const gestures = useGestures(ref, {
      zoomAt: zoom.zoomAt,
      pan: (_, event, x, y) => zoom.pan(x, y),
      drag(element, event, x, y) {
        if (layout !== "wipe" || !shown[1]) return zoom.pan(x, y);
        const { left } = element.getBoundingClientRect();
        return onWipe(clamp(zoom.across(event.clientX - left), 0, 1));
      },
      swipe(x, y) {
        if (!zoom.isFit || layout === "wipe" || Math.max(Math.abs(x), Math.abs(y)) < SWIPE) return;
        const way = Math.abs(x) > Math.abs(y) ? (x < 0 ? "right" : "left") : y < 0 ? "down" : "up";
        moves[way]?.();
      },
      toggle: (point) => (zoom.isFit ? zoom.scaleTo(1, point) : zoom.fit()),
    });
    const kind = zoom.scale >= PIXEL_SCALE ? "large-sheet is-pixelated" : "large-sheet";
    const paneStyle = { width: `${pane.width}px`, height: `${pane.height}px` };
    const over = (plates) => html`<div class="large-pane" style=${paneStyle}>${plates}</div>`;
    const single = (plate, title = plate.title) => html`<figure key=${plate.key} class="large-pane"
        style=${paneStyle}>
      <${Sheet} plate=${plate} kind=${kind} style=${zoom.place} />
      <figcaption>${title}</figcaption>
    </figure>`;
    return html`<div class="large-stage" ref=${(element) => {
      ref.current = element;
      focus.current = element;
    }} tabindex="0" role="group" aria-label=${label}
        style=${{ gridTemplateColumns: `repeat(${pane.columns}, ${pane.width}px)` }} ...${gestures}>
      ${layout === "side" && shown.map((plate) => single(plate))}
      ${layout === "one" && over(html`<${Flicker} shown=${shown} isFlipped=${isFlipped} kind=${kind}
        style=${zoom.place} />`)}
      ${layout === "wipe" && over(html`<${Wipe} shown=${shown} wipe=${wipe} kind=${kind}
        style=${zoom.place} />`)}
      ${layout === "difference" && over(html`<${Difference} shown=${shown} kind=${kind}
        style=${zoom.place} />`)}
    </div>`;
  }

  function Sheet({ plate, kind, style, isHidden }) {
    return html`<div class=${kind} style=${{ ...style, visibility: isHidden ? "hidden" : null }}>
      <${Layer} key=${plate.image} path=${plate.image} alt=${plate.alt} isFull attributes=${AT_ONCE} />
      ${plate.over}
    </div>`;
  }

  /* Both are there, so that the change takes no time. */
  function Flicker({ shown, isFlipped, kind, style }) {
    const seen = isFlipped && shown[1] ? 1 : 0;
    return html`${shown.slice(0, 2).map(
      (plate, index) => html`<${Sheet} key=${plate.key} plate=${plate} kind=${kind} style=${style}
        isHidden=${index !== seen} />`,
    )}
    <p class="large-label" role="status">${shown[seen].title}</p>`;
  }

  function Wipe({ shown: [first, second], wipe, kind, style }) {
    const share = `${wipe * 100}%`;
    return html`<${Sheet} key=${first.key} plate=${first} kind=${kind} style=${style} />
      ${
        second &&
        html`<${Sheet} key=${second.key} plate=${second} kind=${kind}
          style=${{ ...style, clipPath: `inset(0 0 0 ${share})` }} />
        <div class="large-sheet" style=${style}><span class="large-divider" style=${{ left: share }}></span></div>`
      }
      <p class="large-label">${first.title}</p>
      ${second && html`<p class="large-label is-right">${second.title}</p>`}`;
  }

  function Difference({ shown: [first, second], kind, style }) {
    if (!second) {
      return html`<${Sheet} plate=${first} kind=${kind} style=${style} />
        <p class="large-label">${first.title}: nothing to compare with</p>`;
    }
    const layer = (plate, alt) =>
      html`<${Layer} key=${plate.image} path=${plate.image} alt=${alt} isFull attributes=${AT_ONCE} />`;
    const title = `${first.title} minus ${second.title}`;
    return html`<div class=${`${kind} difference`} style=${style}>
        ${layer(second, "")}${layer(first, `Difference, brightened: ${first.alt}, ${second.title}`)}
      </div>
      ${first.over && html`<div class="large-sheet" style=${style}>${first.over}</div>`}
      <p class="large-label">Difference, brightened: ${title.toLowerCase()}</p>`;
  }

  gallery.largeStage = { Stage };
})();
