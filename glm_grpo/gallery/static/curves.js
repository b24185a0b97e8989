/* Curves: all metrics of the run, under the question each of them answers. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { Problem, useLoaded } = parts;
  const { arrange, canaryBand, makeColumns } = gallery.curveMetrics;
  const { EVALUATION_STYLE, lineStyle } = gallery.curveLayout;
  const { pointAt, useCursor, useScheme } = gallery.curvePlot;
  const { Chart, seriesOf } = gallery.curveChart;
  const { useEffect, useMemo, useRef } = preactHooks;

  const LARGEST_SMOOTHING = 0.99;
  /* Milliseconds the cursor rests before its step is part of the address. */
  const REST = 300;

  function Curves({ params }) {
    const { data, error, progress } = useLoaded(readRun, []);
    let content = html`<${Board} ...${data} params=${params} />`;
    if (error) content = html`<${Problem} where="Metrics" message=${error.message} />`;
    else if (!data) content = html`<p role="status">Loading metrics${progress && `: ${progress.done} of ${progress.total} files`}</p>`;
    else if (!data.steps.length) {
      content = html`<p>No metrics are recorded yet. After the first step this page shows them as
        curves. It appears by itself.</p>`;
    }
    return html`<h2>Curves</h2>${content}`;
  }

  Curves.keyHelp = [
    ["Left, Right", "In a chart: to the step before or after"],
    ["Page Up, Page Down", "In a chart: ten steps further"],
    ["Home, End", "In a chart: to the first or last step"],
    ["Enter", "In a chart: the pictures of the step"],
    ["Escape", "In a chart: takes the cursor away"],
  ];

  async function readRun(onProgress) {
    const rows = await gallery.loadMetrics(onProgress);
    const { steps, values } = makeColumns(rows);
    const counts = await countPrompts(steps);
    const terms = gallery.run.reward.terms.map((term) => term.name);
    const questions = arrange(Object.keys(values), terms).map((question) => ({
      ...question,
      charts: question.charts.map((chart) => fill(chart, values, counts)),
    }));
    return { steps, questions, heldOut: await findHeldOut() };
  }

  /* The first held-out prompt, at which the pictures of an evaluation are shown; undefined where
     none can be read. */
  async function findHeldOut() {
    const [first] = gallery.run.evaluations;
    const evaluation = first && (await gallery.load(first.key).catch(() => null));
    return evaluation?.groups?.[0]?.prompt_id;
  }

  /* Name of a term, or "" for all prompts -> how many prompts each step has; where a table cannot
     be read, as many as the step before. */
  async function countPrompts(steps) {
    const byStep = new Map((await gallery.loadSteps()).map((entry) => [entry.step, entry.groups]));
    const count = (isCounted) => {
      let last = 0;
      return steps.map((step) => {
        const groups = byStep.get(step);
        if (groups) last = groups.filter(isCounted).length;
        return last;
      });
    };
    const watched = gallery.run.reward.watch.map((name) => [name, count((group) => Boolean(group.raw[name]))]);
    return { "": count(() => true), ...Object.fromEntries(watched) };
  }

  /* A chart with the values of its metrics. */
  function fill(chart, values, counts) {
    const { bands, canary_margin: margin } = gallery.run;
    const canary = chart.id.startsWith("canary/") ? chart.id.slice("canary/".length) : "";
    const isJudged = canary && bands && margin && Object.hasOwn(bands, canary);
    return {
      ...chart,
      lines: chart.lines.map(({ name, std }, index) => ({
        name, values: values[name], std: values[std], stdName: std, style: lineStyle(index, chart.colour),
      })),
      evaluations: chart.evaluations.map((name) => ({ name, values: values[name], style: EVALUATION_STYLE })),
      band: isJudged ? canaryBand(canary, bands[canary], margin, counts[canary] || counts[""]) : null,
    };
  }

  function Board({ steps, questions, heldOut, params }) {
    const scheme = useScheme();
    const set = (change) => gallery.replace("curves", { ...gallery.route().params, ...change });
    const smoothing = readNumber(params.smooth, 0, LARGEST_SMOOTHING) ?? 0;
    const range = useMemo(() => readRange(params, steps), [params.from, params.to, steps]);
    const open = (step, isEvaluation) => {
      set({ step });
      gallery.go(...picturesAt(step, isEvaluation, heldOut));
    };
    const wanted = (params.metric || "").trim().toLowerCase();
    const isWanted = (chart) => [chart.title, ...seriesOf(chart).map(({ name }) => name)].join(" ").toLowerCase().includes(wanted);
    const found = questions
      .map((question) => ({ ...question, charts: question.charts.filter(isWanted) }))
      .filter(({ charts }) => charts.length);
    const count = found.reduce((sum, { charts }) => sum + charts.length, 0);
    return html`
      <p class="soft">Shaded: one standard deviation around the mean, and for canaries the band of the untrained model.
        Dashed with dots: held-out prompts. Dotted: values that were not finite. Press on a point to see its pictures;
        drag over steps to see them closer.</p>
      <${Toolbar} params=${params} steps=${steps} smoothing=${smoothing} range=${range} set=${set} />
      <p class="visually-hidden" role="status">${count} charts</p>
      <${StepBar} steps=${steps} heldOut=${heldOut} params=${params} set=${set} />
      ${!count && html`<p>No metric has "${params.metric}" in its name.</p>`}
      ${found.map((question) => html`<${Question} key=${question.key} question=${question} params=${params} set=${set}
        chartProps=${{ steps, smoothing, range, scheme, onOpen: open, onRange: set, large: params.large, set }} />`)}`;
  }

  /* A number inside limits, or null. */
  function readNumber(text, low, high) {
    const value = text === undefined || text === "" ? NaN : Number(text);
    return value >= low && value <= high ? value : null;
  }

  function readRange(params, steps) {
    const [first, last] = [steps[0], steps[steps.length - 1]];
    const from = readNumber(params.from, first, last);
    const to = readNumber(params.to, first, last);
    return (from ?? first) < (to ?? last) ? { from, to } : { from: null, to: null };
  }

  function picturesAt(step, isEvaluation, heldOut) {
    if (!isEvaluation) return ["groups", { step }];
    return ["progress", heldOut === undefined ? {} : { prompt: heldOut, step, sample: 0 }];
  }

  function Toolbar({ params, steps, smoothing, range, set }) {
    const [first, last] = [steps[0], steps[steps.length - 1]];
    const onRange = (name) => (event) => set({ [name]: event.currentTarget.value });
    return html`<div class="toolbar">
      <label>Metrics with <input type="search" value=${params.metric ?? ""} placeholder="part of a name"
        onInput=${(event) => set({ metric: event.currentTarget.value })} /></label>
      <label>Smoothing <input type="range" min="0" max=${LARGEST_SMOOTHING} step="0.01" value=${smoothing}
        onInput=${(event) => set({ smooth: event.currentTarget.value === "0" ? null : event.currentTarget.value })} />
        <output>${smoothing.toFixed(2)}</output></label>
      ${smoothing > 0 && html`<span class="soft">Figures stay as they were recorded</span>`}
      <label>Steps from <input type="number" min=${first} max=${last} value=${range.from ?? first} onChange=${onRange("from")} /></label>
      <label>to <input type="number" min=${first} max=${last} value=${range.to ?? last} onChange=${onRange("to")} /></label>
      <button type="button" disabled=${range.from === null && range.to === null}
        onClick=${() => set({ from: null, to: null })}>Whole run</button>
    </div>`;
  }

  /* The step the cursor is on, and the way to its pictures. */
  function StepBar({ steps, heldOut, params, set }) {
    const step = useCursor();
    const written = useRef(null);
    useEffect(() => {
      const asked = Number(params.step);
      if (params.step === undefined || asked === written.current) return;
      pointAt(steps.includes(asked) ? asked : null);
    }, [params.step]);
    useEffect(() => {
      const timer = setTimeout(() => {
        if (gallery.route().view !== "curves" || String(step ?? "") === (params.step ?? "")) return;
        written.current = step;
        set({ step });
      }, REST);
      return () => clearTimeout(timer);
    }, [step]);
    const shown = step ?? steps[steps.length - 1];
    const isTrained = gallery.run.chunks.some((chunk) => chunk.steps.includes(shown));
    const isEvaluated = gallery.run.evaluations.some((evaluation) => evaluation.step === shown);
    return html`<p class="step-bar">
      <strong>${step === null ? "Last step" : "Step"} ${shown}</strong>
      ${isTrained && html`<a href=${link(...picturesAt(shown, false))}>Groups</a>`}
      ${isEvaluated && html`<a href=${link(...picturesAt(shown, true, heldOut))}>Held-out pictures</a>`}
    </p>`;
  }

  function Question({ question, params, set, chartProps }) {
    const { key, title, charts } = question;
    const closed = (params.closed || "").split(",").filter(Boolean);
    const toggle = (event) => {
      const { open } = event.currentTarget;
      if (open !== closed.includes(key)) return;
      const others = closed.filter((other) => other !== key);
      set({ closed: (open ? others : [...others, key]).join(",") });
    };
    return html`<details class="question" open=${!closed.includes(key)} onToggle=${toggle}>
      <summary><h3>${title}</h3> <span class="soft">${charts.length} ${charts.length === 1 ? "chart" : "charts"}</span></summary>
      <div class="charts">
        ${charts.map((chart) => html`<${Chart} key=${chart.id} chart=${chart} ...${chartProps} />`)}
      </div>
    </details>`;
  }

  gallery.views.curves = Curves;
})();
