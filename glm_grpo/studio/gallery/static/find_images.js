/* All images of a run as rows: what is known of each, which are asked for, and in which order. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { scoring } = gallery;
  const { clip, fmt, isKnown, signed } = gallery.parts;
  const { listReaders, textRead } = gallery.readings;

  const BOUNDS = ["min", "max"];
  const collator = new Intl.Collator("en", { numeric: true });

  /** Every image of training steps and evaluations: {images, problems}. */
  async function loadImages(source, onProgress) {
    const { run } = gallery;
    const entries = [];
    const metrics = new Map();
    if (source !== "evaluations") {
      const steps = await gallery.loadSteps(onProgress);
      (await gallery.loadMetrics()).forEach((row) => metrics.set(row.step, row));
      entries.push(...steps.map((entry) => ({ ...entry, kind: "training" })));
    }
    if (source !== "training") {
      const loaded = await Promise.all(run.evaluations.map(gallery.loadEvaluation));
      entries.push(...loaded.map((entry) => ({ ...entry, kind: "evaluation" })));
    }
    return {
      images: entries.flatMap((entry) => listImages(entry, metrics.get(entry.step))),
      problems: entries.filter((entry) => entry.problem !== undefined),
    };
  }

  /** The images of a step, each with what is asked of it. */
  function listImages({ kind, step, groups }, metrics) {
    if (groups === undefined) return [];
    const departures = metrics && kind === "training" ? listDepartures(metrics, groups) : [];
    return groups.flatMap((group) => {
      const best = scoring.best(group.total);
      const shared = {
        kind,
        step,
        group,
        departures,
        isZeroStd: group.is_zero_std === true,
        isMasked: gallery.run.reward.terms.some((term) => group.raw[term.name] == null),
        /* Where all are best, as in a zero-std group, none is better than another. */
        hasBest: best.includes(false),
        searched: group.prompt.toLowerCase(),
      };
      return group.images.map((image, sample) => ({
        shared,
        sample,
        image,
        isBest: shared.hasBest && best[sample],
      }));
    });
  }

  /** Where the page of an image is: view and params. */
  function addressOf({ shared, sample }) {
    const { kind, step, group } = shared;
    const view = kind === "training" ? "groups" : "progress";
    return [view, { step, prompt: group.prompt_id, sample }];
  }

  /** What an image is, in words. */
  function nameOf({ shared, sample }) {
    const kind = shared.kind === "training" ? "step" : "evaluation at step";
    return `${kind} ${shared.step}, prompt ${clip(shared.group.prompt_id)}, sample ${sample}`;
  }

  /** Names of the canaries that can be judged. */
  function listCanaries() {
    const { bands, canary_margin: margin } = gallery.run;
    return bands === null || margin === null ? [] : Object.keys(bands);
  }

  /** Names of the canaries that left their band in a step; see rewards.canaries.find_departures.
      `metrics` is the step's row of loadMetrics(). */
  function listDepartures(metrics, groups) {
    return listCanaries().filter((name) => judgeCanary(name, metrics, groups)?.isInside === false);
  }

  /** A canary in one step: {value, low, high, isInside}; null where it has no value there. */
  function judgeCanary(name, metrics, groups) {
    const { bands, canary_margin: margin, reward } = gallery.run;
    const value = metrics[`canary/${name}`];
    /* A term is judged over the prompts of which it scored an image, a measure of images over all. */
    const judged = reward.watch.includes(name)
      ? groups.filter((group) => group.raw[name]?.some(isKnown))
      : groups;
    if (value == null || judged.length === 0) return null;
    const { low, high, isOpenAbove } = gallery.curveMetrics.canaryBand(name, bands[name], margin, [judged.length]);
    const isInside = value >= low[0] && (isOpenAbove || value <= high[0]);
    return { value, low: low[0], high: isOpenAbove ? null : high[0], isInside };
  }

  /** What the table shows: {id, title, value(image), isText, show(value)}, images aside. */
  function listColumns(terms) {
    /* An image without a score has none in any range. */
    const number = (id, title, value, show = fmt) => ({ id, title, value: (image) => value(image) ?? undefined, show });
    const text = (id, title, value) => ({ id, title, value, isText: true, show: (found) => found });
    return [
      number("step", "Step", ({ shared }) => shared.step, String),
      text("prompt", "Prompt", ({ shared }) => shared.group.prompt),
      text("id", "Prompt ID", ({ shared }) => shared.group.prompt_id),
      ...(listReaders().length ? [text("reading", "Text read", ({ shared, sample }) => textRead(shared.group, sample))] : []),
      number("sample", "Sample", ({ sample }) => sample, String),
      number("total", "Total", ({ shared, sample }) => shared.group.total[sample]),
      number("advantage", "Advantage", ({ shared, sample }) => shared.group.advantage?.[sample], signed),
      ...terms.map(({ name }) => number(`raw.${name}`, name, ({ shared, sample }) => shared.group.raw[name]?.[sample])),
    ];
  }

  const isRanged = (column) => !column.isText && !["step", "sample"].includes(column.id);

  /* The address may hold anything. */
  const isNumber = (text) => Boolean(text) && Number.isFinite(Number(text));

  /** What the address asks for, as a list of tests that an image must pass. */
  function listTests(params, columns) {
    const { text, read, id, from, to, zero_std: onlyZeroStd, masked, best, canary } = params;
    const tests = [];
    const words = (text ?? "").toLowerCase();
    if (words) tests.push(({ shared }) => shared.searched.includes(words));
    const reading = (read ?? "").toLowerCase();
    if (reading) tests.push(({ shared, sample }) => textRead(shared.group, sample).toLowerCase().includes(reading));
    if (id) tests.push(({ shared }) => shared.group.prompt_id === id);
    if (isNumber(from)) tests.push(({ shared }) => shared.step >= Number(from));
    if (isNumber(to)) tests.push(({ shared }) => shared.step <= Number(to));
    if (onlyZeroStd) tests.push(({ shared }) => shared.isZeroStd);
    if (masked) tests.push(({ shared }) => shared.isMasked);
    if (best) tests.push(({ isBest }) => isBest);
    if (canary === "any" && listCanaries().length) tests.push(({ shared }) => shared.departures.length > 0);
    else if (listCanaries().includes(canary)) tests.push(({ shared }) => shared.departures.includes(canary));
    columns.filter(isRanged).forEach((column) => {
      const [low, high] = BOUNDS.map((bound) => params[`${bound}.${column.id}`]);
      /* No score is in no range. */
      if (isNumber(low)) tests.push((image) => column.value(image) >= Number(low));
      if (isNumber(high)) tests.push((image) => column.value(image) <= Number(high));
    });
    return tests;
  }

  /** The images that pass all that the address asks for. */
  function filterImages(images, params, columns) {
    const tests = listTests(params, columns);
    return images.filter((image) => tests.every((test) => test(image)));
  }

  /** Sorted by a column; images without a value come last in either direction. */
  function sortImages(images, column, isDescending) {
    const values = images.map(column.value);
    const sign = isDescending ? -1 : 1;
    const compareValues = column.isText
      ? (one, other) => sign * collator.compare(values[one], values[other])
      : (one, other) => {
          const isMissing = [values[one] == null, values[other] == null];
          return isMissing[0] || isMissing[1]
            ? isMissing[0] - isMissing[1]
            : sign * (values[one] - values[other]);
        };
    return [...images.keys()].sort(compareValues).map((index) => images[index]);
  }

  gallery.imageTable = {
    BOUNDS, addressOf, filterImages, isRanged, judgeCanary, listCanaries, listColumns, loadImages, nameOf,
    sortImages,
  };
})();
