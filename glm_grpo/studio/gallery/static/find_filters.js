/* The filters of Find: fields, and a histogram of every score. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html } = gallery;
  const { BOUNDS, isRanged, listCanaries } = gallery.imageTable;
  const { listReaders } = gallery.readings;
  const { fmt } = gallery.parts;
  const { useMemo, useRef } = preactHooks;

  const BINS = 24;
  /* Thousandths, as scores are shown. */
  const DIGITS = 1000;
  const SOURCES = { training: "training steps", evaluations: "evaluations", both: "both" };
  const WAYS_OF_LOOKING = ["of", "sort", "order", "credit"];

  /** The address without filters: the way of looking stays. */
  function withoutFilters(params) {
    return Object.fromEntries(WAYS_OF_LOOKING.map((name) => [name, params[name]]));
  }

  /** How many filters the address sets. */
  function countFilters(params) {
    return Object.keys(params).filter((name) => ![...WAYS_OF_LOOKING, "at", "large"].includes(name)).length;
  }

  function Filters({ source, images, columns, params, set }) {
    const canaries = listCanaries();
    const field = (name, type, label) => html`<label>${label}
      <input type=${type} step="any" value=${params[name] ?? ""}
        onInput=${(event) => set({ [name]: event.currentTarget.value })} />
    </label>`;
    const box = (name, label) => html`<label class="find-box"><input type="checkbox" checked=${Boolean(params[name])}
      onChange=${(event) => set({ [name]: event.currentTarget.checked ? 1 : null })} /> ${label}</label>`;
    const choice = (name, label, options, value = params[name] ?? "") => html`<label>${label}
      <select value=${value} onChange=${(event) => set({ [name]: event.currentTarget.value })}>
        ${options.map(([option, title]) => html`<option key=${option} value=${option}>${title}</option>`)}
      </select></label>`;
    return html`<form id="find-filters" role="search" aria-label="Filters" class="find-filters panel"
        onSubmit=${(event) => event.preventDefault()}>
      ${choice("of", "Images of", Object.entries(SOURCES), source)}
      ${field("text", "search", "Prompt contains")}
      ${listReaders().length > 0 && field("read", "search", "Text read contains")}
      ${columns.filter(isRanged).map((column) => html`<${Range} key=${column.id} column=${column} images=${images}
        bounds=${BOUNDS.map((bound) => params[`${bound}.${column.id}`])} set=${set} />`)}
      ${box("best", "Best of its group")}
      ${box("zero_std", "Zero-std groups")}
      ${box("masked", "Terms that do not apply")}
      ${canaries.length > 0 && choice("canary", "Canary outside its band", [
        ["", "does not matter"], ["any", "any canary"], ...canaries.map((name) => [name, name]),
      ])}
      <span class="find-pair">${field("from", "number", "From step")}${field("to", "number", "to step")}</span>
      ${field("id", "search", "Prompt ID")}
      <button type="button" onClick=${() => gallery.replace("find", withoutFilters(params))}>Clear filters</button>
    </form>`;
  }

  /* {low, width, counts}: how many values lie in each of BINS equal parts; null without any value. */
  function makeHistogram(images, column) {
    const values = images.map(column.value).filter((value) => value != null);
    if (!values.length) return null;
    const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [
      Infinity, -Infinity,
    ]);
    const width = (high - low) / BINS || 1;
    const counts = new Array(BINS).fill(0);
    for (const value of values) counts[Math.min(Math.floor((value - low) / width), BINS - 1)] += 1;
    return { low, high, width, counts };
  }

  /* A histogram over which a range is dragged, and the two ends as fields. */
  function Range({ column: { id, title, ...column }, images, bounds, set }) {
    const histogram = useMemo(() => makeHistogram(images, column), [images, id]);
    const start = useRef(0);
    if (!histogram) return null;
    const { low, high, width, counts } = histogram;
    const [from, to] = [bounds[0] || low, bounds[1] || high].map(Number);
    const most = Math.max(...counts);
    const binAt = ({ clientX, currentTarget }) => {
      const { left, width: whole } = currentTarget.getBoundingClientRect();
      return Math.min(Math.max(Math.floor(((clientX - left) / whole) * BINS), 0), BINS - 1);
    };
    function drag(event) {
      if (event.type === "pointerdown") {
        start.current = binAt(event);
        event.currentTarget.setPointerCapture(event.pointerId);
      } else if (event.buttons !== 1) return;
      const [one, other] = [start.current, binAt(event)].sort((a, b) => a - b);
      set({
        [`min.${id}`]: one === 0 ? null : Math.floor((low + one * width) * DIGITS) / DIGITS,
        [`max.${id}`]: other === BINS - 1 ? null : Math.ceil((low + (other + 1) * width) * DIGITS) / DIGITS,
      });
    }
    const isIn = (bin) => low + bin * width < to + width / 2 && low + (bin + 1) * width > from + width / 2;
    const field = (bound, index, label, end) => html`<input type="number" step="any" aria-label=${label}
      placeholder=${fmt(end).replace("\u2212", "-")} value=${bounds[index] ?? ""}
      onInput=${(event) => set({ [`${bound}.${id}`]: event.currentTarget.value })} />`;
    return html`<fieldset class="find-range">
      <legend>${title}</legend>
      <svg viewBox="0 0 ${BINS} 1" preserveAspectRatio="none" aria-hidden="true" onPointerDown=${drag} onPointerMove=${drag}>
        ${counts.map((count, bin) => {
          /* By the square root, so that a bar of few shows beside one of thousands. */
          const size = Math.sqrt(count / most);
          return html`<rect key=${bin} class=${isIn(bin) ? "is-in" : ""} x=${bin + 0.08} width="0.84" y=${1 - size} height=${size} />`;
        })}
      </svg>
      <span class="find-pair">${field(BOUNDS[0], 0, "at least", low)}${field(BOUNDS[1], 1, "at most", high)}</span>
    </fieldset>`;
  }

  gallery.findFilters = { Filters, SOURCES, countFilters, withoutFilters };
})();
