/* Progress: held-out prompts as rows, evaluations as columns, the same seeds along a row. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { Problem, SizeControls, Title, isKnown, mean, useSizes } = parts;
  const { Table, newestOf } = gallery.progressTable;
  const { Details, RowViewer } = gallery.progressDetails;
  const { useCallback, useEffect, useMemo, useState } = preactHooks;

  /* CSS pixels of a cell where there is room; see progress.css. */
  const USUAL_SIZE = 192;

  const SORTS = {
    change: ["Most changed", (a, b) => order(size(b.change), size(a.change))],
    gain: ["Largest gain", (a, b) => order(b.change, a.change)],
    fall: ["Largest loss", (a, b) => order(a.change, b.change)],
    best: ["Highest total", (a, b) => order(b.total, a.total)],
    worst: ["Lowest total", (a, b) => order(a.total, b.total)],
    stored: ["Order of the file", () => 0],
    id: ["Prompt ID", (a, b) => (a.id < b.id ? -1 : 1)],
  };
  const size = (change) => (change === null ? null : Math.abs(change));

  /* What is not known comes last. */
  function order(a, b) {
    if (!isKnown(a) || !isKnown(b)) return !isKnown(a) - !isKnown(b);
    return a - b;
  }

  function Progress({ params }) {
    if (gallery.run.evaluations.length) return html`<${Evaluations} params=${params} />`;
    return html`<${Title} name="Progress" about=${about()} />
      <p>No evaluation is stored yet. After the first one this page shows its images. It updates by itself.</p>`;
  }

  const about = () => html`
    <p>Every row is a held-out prompt, every column an evaluation. All evaluations use the same random seeds, so along a
      row only the policy changes. Higher totals are better.</p>
    <p>Point at an image to see it with all its scores at the side; click on it to enlarge it.</p>
    ${gallery.run.reward.combine !== "weighted_sum" &&
    html`<p>Totals are in standard deviations of the base model's scores.</p>`}`;

  /* {step: {groups} | {problem}}; grows while the files load, the ends of the run first. */
  function useEvaluations() {
    const [loaded, setLoaded] = useState({});
    useEffect(() => {
      let isWanted = true;
      async function loadAll() {
        const [first, ...later] = gallery.run.evaluations;
        for (const evaluation of [first, ...later.slice(-1), ...later.slice(0, -1)]) {
          const entry = await gallery.loadEvaluation(evaluation);
          if (!isWanted) return;
          setLoaded((known) => (known[entry.step] === entry ? known : { ...known, [entry.step]: entry }));
        }
      }
      loadAll();
      return () => {
        isWanted = false;
      };
    }, [gallery.run]);
    return loaded;
  }

  /* One entry a prompt, in the order of its first appearance: {id, group, bySteps, count, total,
     change}, `group` of the first evaluation that has it, `total` the mean over the `count`
     samples of the last, `change` since the first. */
  function makeRows(loaded) {
    const rows = new Map();
    for (const { step } of gallery.run.evaluations) {
      for (const group of loaded[step]?.groups ?? []) {
        const id = group.prompt_id;
        if (!rows.has(id)) rows.set(id, { id, group, bySteps: {}, change: null });
        const row = rows.get(id);
        row.bySteps[step] = group;
        row.count = group.total.length;
        row.total = mean(group.total);
        if (group !== row.group) row.change = row.total - mean(row.group.total);
      }
    }
    return [...rows.values()];
  }

  const set = (change) => gallery.replace("progress", { ...gallery.route().params, ...change });

  function Evaluations({ params }) {
    const loaded = useEvaluations();
    const rows = useMemo(() => makeRows(loaded), [loaded, gallery.run]);
    const sort = Object.hasOwn(SORTS, params.sort ?? "") ? params.sort : "change";
    const sorted = useMemo(() => [...rows].sort(SORTS[sort][1]), [rows, sort]);
    const count = Math.max(1, ...rows.map((row) => row.group.images.length));
    const wanted = params.samples ?? params.sample ?? "0";
    const samples = useMemo(() => chooseSamples(wanted, count), [wanted, count]);
    const pinned = useMemo(
      () => findPlace(rows, params),
      [rows, params.prompt, params.step, params.sample],
    );
    const [hovered, setHovered] = useState(null);
    const place = hovered ?? pinned ?? firstPlace(sorted[0]);
    const pin = useCallback(({ row, step, sample }, others) => {
      setHovered(null);
      set({ prompt: row.id, step, sample, ...others });
    }, []);
    const open = useCallback((place, first) => pin(place, { first, large: 1 }), []);
    const unpin = () => {
      setHovered(null);
      set({ prompt: null, step: null, sample: null });
    };
    const sizes = useSizes("progress", { size: null, density: "captions" });
    /* Made again for what it shows only: what is pointed at changes often. */
    const table = useMemo(
      () =>
        html`<${Table} rows=${sorted} loaded=${loaded} samples=${samples}
          isDiff=${Boolean(params.diff)} pinned=${pinned} onHover=${setHovered}
          onOpen=${open} sizes=${sizes} />`,
      [gallery.run, sorted, loaded, samples, params.diff, pinned, sizes.size, sizes.density],
    );
    const isWhole = gallery.run.evaluations.every(({ step }) => loaded[step]);
    return html`<${Title} name="Progress" about=${about()}>
        <${Controls} params=${params} sort=${sort} count=${count} samples=${samples} sizes=${sizes}
          hasTargets=${rows.some((row) => row.group.target)} />
      </${Title}>
      <${TableProblems} loaded=${loaded} />
      ${!isWhole && !rows.length && html`<p role="status">Loading evaluations</p>`}
      ${isWhole && !pinned && html`<${UnknownPlace} rows=${rows} params=${params} />`}
      ${
        rows.length > 0 &&
        html`<div class="progress">
        ${table}
        <${Details} place=${place} isChosen=${Boolean(hovered ?? pinned)} onLarge=${open} onClose=${unpin} />
      </div>`
      }
      ${
        params.large &&
        pinned &&
        html`<${RowViewer} place=${pinned} rows=${sorted} first=${params.first}
        onShow=${(next) => pin(next, { first: null })}
        onClose=${() => set({ large: null, first: null })} />`
      }`;
  }

  /* Which samples are shown: "all", or the wanted one, the first where there is no such. */
  function chooseSamples(wanted, count) {
    const all = Array.from({ length: count }, (_, sample) => sample);
    return wanted === "all" ? all : [all.includes(Number(wanted)) ? Number(wanted) : 0];
  }

  /* Beside the table stands an image before any is chosen: the newest of the first row. */
  function firstPlace(row) {
    return row ? { row, step: newestOf(row), sample: 0 } : null;
  }

  function findPlace(rows, { prompt, step, sample = "0" }) {
    const row = rows.find(({ id }) => id === prompt);
    const group = row && row.bySteps[step];
    if (!group || group.images[sample] === undefined) return null;
    return { row, step: Number(step), sample: Number(sample) };
  }

  function Controls({ params, sort, count, samples, sizes, hasTargets }) {
    const option = (value, title) => html`<option key=${value} value=${value}>${title}</option>`;
    const numbers = Array.from({ length: count }, (_, sample) => String(sample));
    const toggle = () => set({ diff: params.diff ? null : 1 });
    return html`<label>Sort by
        <select value=${sort} onChange=${(event) => set({ sort: event.currentTarget.value })}>
          ${Object.entries(SORTS).map(([name, [title]]) => option(name, title))}
        </select>
      </label>
      ${
        count > 1 &&
        html`<label>Sample
        <select value=${samples.length > 1 ? "all" : String(samples[0])}
          onChange=${(event) => set({ samples: event.currentTarget.value })}>
          ${[...numbers, "all"].map((sample) => option(sample, sample))}
        </select>
      </label>`
      }
      ${
        hasTargets &&
        html`<label>
          <input type="checkbox" checked=${Boolean(params.diff)} onChange=${toggle} />
          Difference from target
        </label>`
      }
      <${SizeControls} sizes=${sizes} shown=${USUAL_SIZE} />`;
  }

  function TableProblems({ loaded }) {
    return gallery.run.evaluations
      .filter(({ step }) => loaded[step]?.problem)
      .map(
        ({ step }) =>
          html`<${Problem} key=${step} where=${`Evaluation of step ${step}`} message=${loaded[step].problem} />`,
      );
  }

  /* Where the address names an image that no evaluation has. */
  function UnknownPlace({ rows, params }) {
    if (params.prompt === undefined && params.step === undefined) return null;
    const row = rows.find(({ id }) => id === params.prompt);
    if (!row) {
      const message = `no evaluation has the prompt "${params.prompt ?? ""}".`;
      return html`<${Problem} where="Address" message=${message} />`;
    }
    const step = parts.nearest(Number(params.step), Object.keys(row.bySteps).map(Number));
    const wanted = `step "${params.step ?? ""}", sample "${params.sample ?? 0}"`;
    const message = `this prompt has no evaluation at ${wanted}.`;
    const nearest = link("progress", { ...params, step, sample: 0 });
    return html`<${Problem} where="Address" message=${message}>
      <p>The nearest is <a href=${nearest}>step ${step}</a>.</p>
    </${Problem}>`;
  }

  Progress.keyHelp = [
    ["\u2190 \u2191 \u2192 \u2193", "From image to image, once the table has the focus"],
    ["Enter", "The image large"],
  ];
  gallery.views.progress = Progress;
})();
