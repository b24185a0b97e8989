/* Curves: all metrics of the run, under the question each of them answers. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { Loading, Title, useLoaded } = parts;
  const { arrange, canaryBand, makeColumns, namesWithout, quantile, unusedTerms } = gallery.curveMetrics;
  const { EVALUATION_STYLE, lineStyle } = gallery.curveLayout;
  const { pointAt, useCursor, useScheme } = gallery.curvePlot;
  const { Chart, seriesOf } = gallery.curveChart;
  const { useEffect, useMemo, useRef, useState } = preactHooks;

  /* Quantiles: ends of the band that is drawn around a reward. */
  const SPREAD = [0.1, 0.9];
  const TERM = /^reward\/(.+)\/mean$/;
  const LARGEST_SMOOTHING = 0.99;
  /* Milliseconds the cursor rests before its step is part of the address. */
  const REST = 300;

  const ABOUT = html`
    <p>All metrics of the run, grouped by the question they answer. Click on a point to see its images; drag over
      steps to zoom in.</p>
    <dl>
      <dt>Solid line</dt><dd>Training steps. Dotted parts bridge values that were not finite.</dd>
      <dt>Dashed line with dots</dt><dd>Held-out prompts.</dd>
      <dt>Shaded band</dt><dd>Around a reward: the middle 80 % of the step's samples. Around a canary: the range of the
        base model.</dd>
    </dl>`;

  function Curves({ params }) {
    const { data, error, progress } = useLoaded(readRun, []);
    if (data?.steps.length) return html`<${Board} ...${data} params=${params} />`;
    return html`<${Title} name="Curves" about=${ABOUT} />
      ${data
        ? html`<p>No metrics are stored yet. After the first step this page shows them as curves. It updates by itself.</p>`
        : html`<${Loading} what="Metrics" error=${error} progress=${progress} />`}`;
  }

  Curves.keyHelp = [
    ["Left, Right", "In a chart: to the step before or after"],
    ["Page Up, Page Down", "In a chart: ten steps further"],
    ["Home, End", "In a chart: to the first or last step"],
    ["Enter", "In a chart: the images of the step"],
    ["Escape", "In a chart: takes the cursor away"],
  ];

  async function readRun(onProgress) {
    const rows = await gallery.loadMetrics(onProgress);
    const { steps, values } = makeColumns(rows);
    const byStep = new Map((await gallery.loadSteps()).map((entry) => [entry.step, entry.groups]));
    const counts = countPrompts(steps, byStep);
    const terms = gallery.run.reward.terms.map((term) => term.name);
    const unused = unusedTerms(values, terms);
    const questions = arrange(namesWithout(Object.keys(values), unused), terms).map((question) => ({
      ...question,
      charts: question.charts.map((chart) => fill(chart, values, counts, (term) => findSpread(steps, byStep, term))),
    }));
    return { steps, questions, unused, heldOut: await findHeldOut() };
  }

  /* The first held-out prompt, at which the images of an evaluation are shown; undefined where
     none can be read. */
  async function findHeldOut() {
    const [first] = gallery.run.evaluations;
    const evaluation = first && (await gallery.load(first.key).catch(() => null));
    return evaluation?.groups?.[0]?.prompt_id;
  }

  /* Name of a term, or "" for all prompts -> how many prompts each step has; where a table cannot
     be read, as many as the step before. */
  function countPrompts(steps, byStep) {
    const count = (isCounted) => {
      let last = 0;
      return steps.map((step) => {
        const groups = byStep.get(step);
        if (groups) last = groups.filter(isCounted).length;
        return last;
      });
    };
    const watched = gallery.run.reward.watch.map((name) => [name, count((group) => Boolean(group.raw[name]?.some(isKnown)))]);
    return { "": count(() => true), ...Object.fromEntries(watched) };
  }

  /* {low, high} at each step: the band that holds the middle 80 % of the samples' scores by a term, or
     of their totals without one; undefined where the step has no table. */
  function findSpread(steps, byStep, term) {
    const sorted = steps.map((step) => {
      const scores = byStep
        .get(step)
        ?.flatMap((group) => (term ? group.raw[term] : group.total) ?? [])
        .filter((score) => score !== null);
      return scores?.length ? scores.sort((one, other) => one - other) : null;
    });
    const [low, high] = SPREAD.map((share) => sorted.map((scores) => scores?.length ? quantile(scores, share) : undefined));
    return { low, high };
  }

  /* A chart with the values of its metrics. */
  function fill(chart, values, counts, spreadOf) {
    const { bands, canary_margin: margin } = gallery.run;
    const canary = chart.id.startsWith("canary/") ? chart.id.slice("canary/".length) : "";
    const isJudged = canary && bands && margin && Object.hasOwn(bands, canary);
    return {
      ...chart,
      lines: chart.lines.map(({ name, std }, index) => ({
        name, values: values[name], std: values[std], stdName: std, style: lineStyle(index, chart.colour),
        ...(std && spreadOf(TERM.exec(name)?.[1])),
      })),
      evaluations: chart.evaluations.map((name) => ({ name, values: values[name], style: EVALUATION_STYLE })),
      band: isJudged ? canaryBand(canary, bands[canary], margin, counts[canary] || counts[""]) : null,
    };
  }

  function Board({ steps, questions, unused, heldOut, params }) {
    const scheme = useScheme();
    const set = (change) => gallery.replace("curves", { ...gallery.route().params, ...change });
    const smoothing = readNumber(params.smooth, 0, LARGEST_SMOOTHING) ?? 0;
    const range = useMemo(() => readRange(params, steps), [params.from, params.to, steps]);
    const open = (step, isEvaluation) => {
      set({ step });
      gallery.go(...imagesAt(step, isEvaluation, heldOut));
    };
    const wanted = (params.metric || "").trim().toLowerCase();
    const isWanted = (chart) => [chart.title, ...seriesOf(chart).map(({ name }) => name)].join(" ").toLowerCase().includes(wanted);
    const found = questions
      .map((question) => ({ ...question, charts: question.charts.filter(isWanted) }))
      .filter(({ charts }) => charts.length);
    const count = found.reduce((sum, { charts }) => sum + charts.length, 0);
    return html`<${Title} name="Curves" about=${ABOUT}>
      <${Controls} params=${params} steps=${steps} smoothing=${smoothing} range=${range} set=${set} />
      </${Title}>
      <p class="visually-hidden" role="status">${parts.counted(count, "chart")}</p>
      <${StepBar} steps=${steps} heldOut=${heldOut} params=${params} set=${set} />
      ${unused.length > 0 && html`<p class="soft">Without charts, because they apply to no prompt: ${unused.join(", ")}.</p>`}
      ${!count && html`<p>No metric has “${params.metric}” in its name.</p>`}
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

  function imagesAt(step, isEvaluation, heldOut) {
    if (!isEvaluation) return ["groups", { step }];
    return ["progress", heldOut === undefined ? {} : { prompt: heldOut, step, sample: 0 }];
  }

  function Controls({ params, steps, smoothing, range, set }) {
    const [first, last] = [steps[0], steps[steps.length - 1]];
    const bound = (name, other) => html`<${Bound} min=${first} max=${last} value=${range[name] ?? other}
      onChange=${(value) => set({ [name]: value })} />`;
    return html`<label>Metric <input type="search" value=${params.metric ?? ""} placeholder="part of a name"
        onInput=${(event) => set({ metric: event.currentTarget.value })} /></label>
      <label>Smoothing <input type="range" min="0" max=${LARGEST_SMOOTHING} step="0.01" value=${smoothing}
        onInput=${(event) => set({ smooth: event.currentTarget.value === "0" ? null : event.currentTarget.value })} />
        <output>${smoothing.toFixed(2)}</output></label>
      ${smoothing > 0 && html`<span class="soft">Figures are not smoothed</span>`}
      <label>Steps from ${bound("from", first)}</label>
      <label>to ${bound("to", last)}</label>
      <button type="button" disabled=${range.from === null && range.to === null}
        onClick=${() => set({ from: null, to: null })}>Whole run</button>`;
  }

  /* A step; what is typed stays until it is entered, whatever is drawn anew meanwhile. */
  function Bound({ min, max, value, onChange }) {
    const [draft, setDraft] = useState(null);
    const enter = (event) => {
      setDraft(null);
      onChange(event.currentTarget.value);
    };
    return html`<input type="number" min=${min} max=${max} value=${draft ?? value}
      onInput=${(event) => setDraft(event.currentTarget.value)} onChange=${enter} />`;
  }

  /* The step the cursor is on, and the way to its images. */
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
      ${isTrained && html`<a href=${link(...imagesAt(shown, false))}>Groups</a>`}
      ${isEvaluated && html`<a href=${link(...imagesAt(shown, true, heldOut))}>Held-out images</a>`}
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
      <summary><h3>${title}</h3> <span class="soft">${parts.counted(charts.length, "chart")}</span></summary>
      <div class="charts">
        ${charts.map((chart) => html`<${Chart} key=${chart.id} chart=${chart} ...${chartProps} />`)}
      </div>
    </details>`;
  }

  gallery.views.curves = Curves;
})();
