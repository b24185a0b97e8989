/* One drawing of curves by uPlot, and the cursor that all drawings share. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html } = gallery;
  const { axes, layOut, yRange } = gallery.curveLayout;
  const { isNumber } = gallery.curveMetrics;
  const { useEffect, useRef, useState } = preactHooks;

  /* Pixels that a press may move and still be a click. */
  const CLICK_TOLERANCE = 5;

  const listeners = new Set();
  const cursor = { step: null };

  /** Puts the cursor of all drawings on a step; null takes it away. */
  function pointAt(step) {
    if (step === cursor.step) return;
    cursor.step = step;
    listeners.forEach((listener) => listener(step));
  }

  /** Hook: the step the cursor is on, or null. */
  function useCursor() {
    const [step, setStep] = useState(cursor.step);
    useEffect(() => {
      listeners.add(setStep);
      setStep(cursor.step);
      return () => listeners.delete(setStep);
    }, []);
    return step;
  }

  /** Hook: "dark" or "light", whichever the system asks for. */
  function useScheme() {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const [isDark, setIsDark] = useState(query.matches);
    useEffect(() => {
      const update = (event) => setIsDark(event.matches);
      query.addEventListener("change", update);
      return () => query.removeEventListener("change", update);
    }, []);
    return isDark ? "dark" : "light";
  }

  /**
   * A drawing that fills its place. It follows the shared cursor and moves it.
   *
   * @param steps Of the columns.
   * @param chart As layOut takes it, with the `unit` of its axis.
   * @param range {from, to}: the steps shown; null for the ends of the run.
   * @param onOpen Called by a click on a step: (step, isEvaluation).
   * @param onRange Called with {from, to} when a range was dragged over.
   */
  function Plot({ steps, chart, smoothing, range, scheme, onOpen, onRange }) {
    const place = useRef(null);
    const drawn = useRef(null);
    const latest = useRef({});
    const { min, max } = ends(steps, range);
    latest.current = { chart, smoothing, min, max, onOpen, onRange };
    useEffect(() => {
      drawn.current = draw(place.current, steps, latest);
      return drawn.current.end;
    }, [steps, chart, scheme]);
    useEffect(() => drawn.current.refresh(), [smoothing, min, max]);
    return html`<div class="plot-place" ref=${place}></div>`;
  }

  /* Draws into a place: {refresh, end}. What is out of sight is brought up to date once it is seen,
     so that a slider moves as fast with forty long charts as with four. */
  function draw(place, steps, latest) {
    const shown = { smoothing: latest.current.smoothing, isSeen: true };
    const { columns, series, bands } = layOut(steps, latest.current.chart, shown.smoothing);
    const plot = new uPlot(options(place, series, bands, steps, latest), columns, place);
    const refresh = () => {
      const { chart, smoothing, min, max } = latest.current;
      const { x } = plot.scales;
      if (!shown.isSeen || (shown.smoothing === smoothing && x.min === min && x.max === max)) return;
      if (shown.smoothing !== smoothing) plot.setData(layOut(steps, chart, smoothing).columns, false);
      shown.smoothing = smoothing;
      plot.setScale("x", { min, max });
    };
    const follow = () => shown.isSeen && showCursor(plot);
    const sizes = new ResizeObserver(() => {
      const { clientWidth: width, clientHeight: height } = place;
      if (width && (width !== plot.width || height !== plot.height)) plot.setSize({ width, height });
      follow();
    });
    const sights = new IntersectionObserver((entries) => {
      shown.isSeen = entries[entries.length - 1].isIntersecting;
      refresh();
      follow();
    });
    refresh();
    sizes.observe(place);
    sights.observe(place);
    listeners.add(follow);
    const end = () => {
      listeners.delete(follow);
      sizes.disconnect();
      sights.disconnect();
      plot.destroy();
    };
    return { refresh, end };
  }

  /* A single step lies in the middle. */
  function ends(steps, range) {
    const [min, max] = [range.from ?? steps[0], range.to ?? steps[steps.length - 1]];
    return min < max ? { min, max } : { min: min - 1, max: max + 1 };
  }

  function options(place, series, bands, steps, latest) {
    return {
      width: place.clientWidth,
      height: place.clientHeight,
      padding: [8, 16, 0, 0],
      legend: { show: false },
      scales: { x: { time: false }, y: { range: yRange } },
      axes: axes(latest.current.chart.unit),
      series,
      bands,
      cursor: {
        y: false,
        /* uPlot takes a cursor that snaps for one that was dragged, and would swallow the click. */
        drag: { x: true, y: false, setScale: false, dist: CLICK_TOLERANCE, click: () => undefined },
        points: { show: false },
        /* The cursor stays where it was, so that what it shows can be read and followed. */
        bind: { mouseleave: () => null, dblclick: () => null },
        move: (plot, left, top) => [snap(plot, steps, left), top],
      },
      hooks: {
        init: [(plot) => openOnClick(plot, steps, latest)],
        setCursor: [({ cursor: { idx } }) => typeof idx === "number" && pointAt(steps[idx])],
        setSelect: [(plot) => zoom(plot, latest.current.onRange)],
      },
    };
  }

  /* To the nearest step. */
  function snap(plot, steps, left) {
    if (left < 0 || !plot.data || plot.scales.x.min === null) return left;
    return plot.valToPos(steps[plot.posToIdx(left)], "x");
  }

  function showCursor(plot) {
    const { step } = cursor;
    const isShown = step !== null && step >= plot.scales.x.min && step <= plot.scales.x.max;
    plot.setCursor({ left: isShown ? plot.valToPos(step, "x") : -10, top: 0 }, false);
  }

  function zoom(plot, onRange) {
    const { left, width } = plot.select;
    if (width < CLICK_TOLERANCE) return;
    const [from, to] = [left, left + width].map((at) => Math.round(plot.posToVal(at, "x")));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (to > from) onRange({ from, to });
  }

  /* A finger has no way to look before it presses: it moves the cursor only. */
  function openOnClick(plot, steps, latest) {
    let pressedAt = 0;
    plot.over.addEventListener("mousedown", (event) => (pressedAt = event.clientX));
    plot.over.addEventListener("click", (event) => {
      const { idx, top } = plot.cursor;
      const wasDragged = Math.abs(event.clientX - pressedAt) >= CLICK_TOLERANCE;
      if (event.pointerType === "touch" || wasDragged || typeof idx !== "number") return;
      const { chart, onOpen } = latest.current;
      const away = ({ values }) =>
        isNumber(values[idx]) ? Math.abs(plot.valToPos(values[idx], "y") - top) : Infinity;
      const isEvaluation = Math.min(...chart.evaluations.map(away)) < Math.min(...chart.lines.map(away));
      onOpen(steps[idx], isEvaluation);
    });
  }

  gallery.curvePlot = { Plot, pointAt, useCursor, useScheme };
})();
