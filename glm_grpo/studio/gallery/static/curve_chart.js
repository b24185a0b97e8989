/* One chart with its legend, its values as a table, and the keyboard. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { useNear } = parts;
  const { describe, isNumber, makeWriter } = gallery.curveMetrics;
  const { Plot, pointAt, useCursor } = gallery.curvePlot;
  const { useMemo, useState } = preactHooks;

  /* Steps that Page Up and Page Down go. */
  const PAGE = 10;

  /** All that a chart draws: training first, then evaluations. */
  const seriesOf = (chart) => [...chart.lines, ...chart.evaluations];

  /**
   * A chart: what Plot draws, and what is read off it.
   *
   * @param chart As Plot takes it; its lines and evaluations have a `name`.
   * @param large `id` of the chart that is enlarged.
   * @param set Changes params of the address.
   * @param plotProps All else that Plot takes.
   */
  function Chart({ chart, large, set, ...plotProps }) {
    const { steps } = plotProps;
    const [ref, isNear] = useNear();
    const [areValuesShown, setAreValuesShown] = useState(false);
    const isLarge = large === chart.id;
    const id = `chart-${chart.id.replaceAll(/[^\w-]/g, "-")}`;
    const write = useMemo(() => makeWriter(seriesOf(chart).map(({ values }) => values), chart.unit), [chart]);
    const hasValues = seriesOf(chart).some(({ values }) => values.some(isNumber));
    return html`<figure class="chart panel ${isLarge ? "is-large" : ""} ${areValuesShown ? "is-open" : ""}" ref=${ref}>
      <figcaption>
        <h4 id=${id}>${chart.title}</h4>
        <button type="button" aria-expanded=${areValuesShown} aria-label="Values of ${chart.title}"
          onClick=${() => setAreValuesShown(!areValuesShown)}>Values</button>
        <button type="button" aria-pressed=${isLarge} aria-label="Enlarge ${chart.title}"
          onClick=${() => set({ large: isLarge ? null : chart.id })}>Enlarge</button>
      </figcaption>
      ${hasValues
        ? html`<${Reader} id=${id} chart=${chart} write=${write} steps=${steps} onOpen=${plotProps.onOpen}>
            ${isNear && html`<${Plot} chart=${chart} ...${plotProps} />`}
          </${Reader}>`
        : html`<p class="no-values">No finite value at any step</p>`}
      ${areValuesShown && html`<${Values} chart=${chart} write=${write} steps=${steps} />`}
    </figure>`;
  }

  /* The legend with the values at the cursor, and the drawing, which the keyboard moves along. */
  function Reader({ id, chart, write, steps, onOpen, children }) {
    const step = useCursor();
    const series = seriesOf(chart);
    const index = step === null ? -1 : steps.indexOf(step);
    const known = useMemo(() => steps.map((_, at) => at).filter((at) => series.some(({ values }) => isNumber(values[at]))), [chart]);
    const summary = useMemo(() => series.map((each) => summarise(each, steps, write)).join(" "), [chart]);
    const texts = series.map((each) => ({ ...each, ...readAt(each, index, chart.band, write) }));
    const shown = index < 0 ? steps[known[known.length - 1]] : step;
    const onKeyDown = (event) => {
      const at = known.findIndex((each) => each >= index);
      const here = index < 0 ? known.length - 1 : at < 0 ? known.length : at;
      const isBetween = known[here] !== index && index >= 0;
      const to = moves(here, known.length - 1, isBetween)[event.key];
      if (to !== undefined) pointAt(steps[known[Math.min(Math.max(to, 0), known.length - 1)]]);
      else if (event.key === "Escape") pointAt(null);
      else if (event.key === "Enter") onOpen(shown, !chart.lines.some(({ values }) => isNumber(values[steps.indexOf(shown)])));
      else return;
      event.preventDefault();
    };
    return html`
      <ul class="legend">
        ${texts.map(({ name, style, text, isKnown }) => html`<li key=${name}>
          <${Swatch} style=${style} /><code>${name}</code> <span class=${isKnown ? "value" : "soft"}>${text}</span>
        </li>`)}
      </ul>
      <div class="plot" role="slider" tabindex="0" aria-labelledby=${id} aria-describedby="${id}-summary"
        aria-valuemin=${steps[known[0]]} aria-valuemax=${steps[known[known.length - 1]]} aria-valuenow=${shown}
        aria-valuetext="${index < 0 ? "last values" : `step ${shown}`}: ${texts.map(({ name, text }) => `${name} ${text}`).join(", ")}"
        onKeyDown=${onKeyDown}>${children}</div>
      <p id="${id}-summary" class="visually-hidden">${summary}</p>`;
  }

  /* Key -> place among the known steps; the cursor may stand between two of them. */
  function moves(here, last, isBetween) {
    const next = isBetween ? here : here + 1;
    return {
      ArrowLeft: here - 1, ArrowDown: here - 1, ArrowRight: next, ArrowUp: next,
      PageDown: here - PAGE, PageUp: here + PAGE, Home: 0, End: last,
    };
  }

  function Swatch({ style }) {
    return html`<svg class="line-swatch" width="24" height="8" aria-hidden="true">
      <line x1="0" y1="4" x2="24" y2="4" stroke-dasharray=${style.dash.join(" ")} style=${{ stroke: `var(${style.colour})` }} />
    </svg>`;
  }

  /* {text, isKnown}: the value at an index with its band, or without an index the last. */
  function readAt({ values, low, high }, index, band, write) {
    const at = index < 0 ? values.findLastIndex(isNumber) : index;
    if (!isNumber(values[at])) return { text: values[at] === null ? "not finite" : "none at this step", isKnown: false };
    const spread = isNumber(low?.[at]) ? ` (${write(low[at])} to ${write(high[at])})` : "";
    return { text: write(values[at]) + spread + (band ? judge(values[at], band, at, write) : ""), isKnown: true };
  }

  function judge(value, band, at, write) {
    const [low, high] = [band.low[at], band.high[at]];
    if (low === null) return "";
    const isInside = value >= low && (band.isOpenAbove || value <= high);
    const extent = band.isOpenAbove ? `from ${write(low)} up` : `${write(low)} to ${write(high)}`;
    return `, ${isInside ? "in" : "outside"} the band ${extent}`;
  }

  function summarise({ name, values }, steps, write) {
    const found = describe(steps, values);
    if (!found) return `${name}: no finite value.`;
    const say = ({ step, value }) => `${write(value)} at step ${step}`;
    return `${name}: first ${say(found.first)}, last ${say(found.last)}, lowest ${say(found.lowest)}, highest ${say(found.highest)}.`;
  }

  function Values({ chart, write, steps }) {
    const columns = seriesOf(chart).flatMap(({ name, values, std, stdName }) =>
      std ? [{ name, values }, { name: stdName, values: std }] : [{ name, values }],
    );
    const rows = steps.map((_, at) => at).filter((at) => columns.some(({ values }) => values[at] !== undefined));
    return html`<div class="scroll-region values" tabindex="0" role="region" aria-label="Values of ${chart.title}">
      <table>
        <thead><tr><th scope="col">Step</th>${columns.map(({ name }) => html`<th scope="col">${name}</th>`)}</tr></thead>
        <tbody>
          ${rows.map((at) => html`<tr key=${at}><th scope="row">${steps[at]}</th>
            ${columns.map(({ values }) => html`<td>${values[at] !== undefined && html`<data value=${values[at] ?? ""}>${isNumber(values[at]) ? write(values[at]) : "not finite"}</data>`}</td>`)}
          </tr>`)}
        </tbody>
      </table>
    </div>`;
  }

  gallery.curveChart = { Chart, seriesOf };
})();
