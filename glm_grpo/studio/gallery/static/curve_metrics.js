/* Which metric stands in which chart, and what is computed from it. Pure functions, no page. */
(function () {
  "use strict";

  const { fmt } = window.glmGallery.parts;

  /* As STD_FLOOR of rewards/canaries.py: the smallest standard deviation of a band. */
  const BAND_STD_FLOOR = 1e-3;
  /* Least and greatest value of the measures of images there; terms that watch may have any. Those
     without an upper end have one that rounding can pass. */
  const SHARE = [0, 1];
  const RANGES = {
    edge_density: SHARE,
    dark_fraction: SHARE,
    bright_fraction: SHARE,
    source_copies: SHARE,
    colour_entropy: [0, Infinity],
    pixel_diversity: [0, Infinity],
  };
  /* Significant digits of figures. */
  const DIGITS = 4;
  /* Of which every 64-bit number has as many. */
  const MOST_DIGITS = 15;
  const EVALUATION = "eval/";
  const CANARY = "canary/";
  const PART_OF_TERM = /^reward\/(.+)\/(mean|std|std_within|advantage_share|zero_std_fraction|refused_fraction)$/;

  /* One chart each: [title, names, options]. Options: `unit` of the figures. */
  const POLICY = [
    ["KL divergence", ["kl/reference", "kl/reference/preview", "kl/reference/target", "kl/behaviour"]],
    ["Entropy of the policy", ["policy/entropy", "policy/entropy/preview", "policy/entropy/target"]],
    ["Log probability of the sampled tokens", ["policy/log_prob"]],
    ["Probability outside the codebook", ["policy/outside_codebook"]],
  ];
  const UPDATE = [
    ["Clip fraction", ["ratio/clip_fraction", "ratio/clip_fraction/preview", "ratio/clip_fraction/target"]],
    ["Probability ratio", ["ratio/mean", "mismatch/ratio"]],
    ["Deviation of mean log ratios between images", ["ratio/sequence_std"]],
    ["Effective sample size", ["ratio/effective_sample_size", "mismatch/effective_sample_size"]],
    ["Tokens that sampler and trainer rate differently", ["mismatch/outside_fraction", "mismatch/limited_fraction"]],
    ["KL of sampler and trainer", ["mismatch/kl"]],
    ["Replay gap", ["policy/replay_gap"]],
    ["Gradient norm", ["optim/grad_norm"]],
    ["Cross-entropy of target images, nats a token", ["sft/cross_entropy", "sft/cross_entropy/preview", "sft/cross_entropy/target"]],
    ["Weight of target images in the loss", ["sft/weight"]],
    ["Learning rate", ["optim/learning_rate"]],
    ["Loss", ["loss/total", "loss/policy", "loss/kl", "loss/entropy"]],
    ["Skipped updates", ["optim/skipped_updates"]],
    ["Loss scale", ["optim/loss_scale"]],
  ];
  const COST = [
    ["Time by phase", ["time/step", "time/sources", "time/rollout", "time/decode", "time/reward", "time/update", "time/recheck", "time/records", "time/evaluation"], "s"],
    ["Share of the device's peak (MFU)", ["perf/mfu/rollout", "perf/mfu/decode", "perf/mfu/update"]],
    ["Images per second", ["throughput/images_per_second"]],
    ["Tokens per second", ["throughput/tokens_per_second"]],
    ["Age of the policy that sampled, updates", ["async/policy_age"]],
    ["Learner and collectors waiting", ["async/wait_learner_seconds", "async/wait_collectors_seconds"], "s"],
    ["Batches that wait", ["async/queue_length"]],
    ["Restarts of collectors", ["async/restarts"]],
    ["Most memory in use", ["memory/peak_bytes"], "bytes"],
    ["Memory of the run and its scorers", ["memory/process_bytes"], "bytes"],
  ];

  /** Rows of metrics as columns: {steps: [rising], values: {name: [number | null | undefined]}}. */
  function makeColumns(rows) {
    const byStep = new Map();
    for (const row of rows) byStep.set(row.step, { ...byStep.get(row.step), ...row });
    const merged = [...byStep.values()].sort((a, b) => a.step - b.step);
    const values = {};
    for (const name of new Set(merged.flatMap((row) => Object.keys(row)))) {
      if (name !== "step") values[name] = merged.map((row) => row[name]);
    }
    return { steps: merged.map((row) => row.step), values };
  }

  /** Terms that apply to no prompt: the run measured them, and found no score. */
  function unusedTerms(values, terms) {
    return terms.filter((term) => {
      const columns = [values[`reward/${term}/mean`], values[`${EVALUATION}${term}`]].filter(Boolean);
      return columns.length > 0 && !columns.flat().some(isNumber);
    });
  }

  /** Names of metrics without those of some terms. */
  function namesWithout(names, terms) {
    const isOf = (name, term) =>
      [`reward/${term}/`, `${EVALUATION}${term}/`].some((start) => name.startsWith(start)) ||
      [EVALUATION + term, `${EVALUATION}${term}_exact`, CANARY + term].includes(name) ||
      (name.startsWith("correlation/") && name.split("/").includes(term));
    return names.filter((name) => !terms.some((term) => isOf(name, term)));
  }

  /**
   * Charts under the questions they answer; each metric stands in one chart, and those that are in
   * none of the groups come last, under "Other".
   *
   * @param names Of all metrics of the run.
   * @param terms Names of the terms in the order of the config.
   * @returns [{key, title, charts: [{id, title, unit, colour, lines: [{name, std}],
   *     evaluations: [name]}]}]; `std` is the standard deviation of a line, which has no line of its
   *     own; `colour` the index of the first line's.
   */
  function arrange(names, terms) {
    const left = new Set(names);
    const found = [...left].map((name) => PART_OF_TERM.exec(name)?.[1]).filter(Boolean);
    const allTerms = [...new Set([...terms, ...found])];
    const chart = (title, lines, { evaluations = [], unit = "", colour = 0 } = {}) => {
      const take = (name) => left.delete(name);
      const taken = lines.filter(({ name }) => take(name));
      const shown = taken.map(({ name, std }) => (std && take(std) ? { name, std } : { name }));
      const held = evaluations.filter(take);
      if (!shown.length && !held.length) return [];
      const id = shown.length ? shown[0].name : held[0];
      return [{ id, title, unit, colour, lines: shown, evaluations: held }];
    };
    const listed = (entries) =>
      entries.flatMap(([title, list, unit]) => chart(title, list.map((name) => ({ name })), { unit }));
    const ofTerms = (title, part, isHeld = false) =>
      chart(
        title,
        allTerms.map((term) => ({ name: `reward/${term}/${part}` })),
        { evaluations: isHeld ? allTerms.map((term) => `${EVALUATION}${term}/${part}`) : [] },
      );
    const starting = (start) => [...left].filter((name) => name.startsWith(start));
    const canaryCharts = () =>
      starting(CANARY).flatMap((name) => chart(inWords(name.slice(CANARY.length)), [{ name }]));

    const questions = [
      { key: "reward", title: "Does the reward rise?", charts: rewardCharts(allTerms, chart) },
      {
        key: "signal",
        title: "What does the policy learn from?",
        charts: [
          ...ofTerms("Share of the advantage, by term", "advantage_share"),
          ...listed([["Zero-std groups, as a fraction", ["advantage/zero_std_fraction"]]]),
          ...listed([
            ["Share of the differences in groups that has a place", ["credit/placed"]],
            ["Root mean square of the tokens' advantages", ["credit/token_rms"]],
            ["Zero-std groups that were replaced", ["advantage/discarded_groups"]],
          ]),
          ...ofTerms("Standard deviation inside groups, by term", "std_within"),
          ...ofTerms("Groups in which a term has no standard deviation, as a fraction", "zero_std_fraction"),
          ...ofTerms("Images that a term refused, as a fraction", "refused_fraction", true),
          ...chart("Correlation between terms, inside groups", starting("correlation/").map((name) => ({ name }))),
        ],
      },
      { key: "policy", title: "How far has the policy moved?", charts: listed(POLICY) },
      { key: "update", title: "Are the updates sound?", charts: listed(UPDATE) },
      {
        key: "canaries",
        title: "Does the policy game its reward?",
        charts: [...listed([["Canaries outside their band", [`${CANARY}departures`]]]), ...canaryCharts()],
      },
      { key: "cost", title: "Where do time and memory go?", charts: listed(COST) },
    ];
    const other = [...left].flatMap((name) => chart(name, [{ name }]));
    return [...questions, { key: "other", title: "Other", charts: other }].filter(
      ({ charts }) => charts.length,
    );
  }

  function rewardCharts(terms, chart) {
    const line = (start) => [{ name: `${start}/mean`, std: `${start}/std` }];
    /* Otherwise held-out totals are standardised, and the mean of a step is that of raw scores. */
    const isSum = window.glmGallery.run.reward.combine === "weighted_sum";
    const held = { evaluations: [`${EVALUATION}total`] };
    return [
      ...(isSum
        ? chart("Total", line("reward"), held)
        : [
            ...chart("Weighted mean of raw scores", [{ name: "reward/mean" }]),
            ...chart("Held-out total, standard deviations", [], held),
          ]),
      ...terms.flatMap((term, colour) =>
        chart(term, line(`reward/${term}`), { evaluations: [EVALUATION + term], colour }),
      ),
      ...chart("Texts read without a mistake, as a fraction", [], {
        evaluations: [`${EVALUATION}ocr_exact`],
      }),
      ...chart("Images that show all that was asked for, as a fraction", [], {
        evaluations: [`${EVALUATION}composition_exact`],
      }),
    ];
  }

  const inWords = (name) => (name.charAt(0).toUpperCase() + name.slice(1)).replaceAll("_", " ");

  /**
   * The band of a canary at each step: {low, high, isOpenAbove}, arrays of numbers; null where the number of
   * prompts is not known. A mean of few prompts has a wider one. What no value of the canary can
   * reach is left out, which changes no judgement.
   *
   * @param name Of the canary.
   * @param band Of the base model: {mean, std, prompts, collapse_below, is_judged_below,
   *     is_of_evaluations}.
   * @param margin Half width in standard errors.
   * @param prompts How many prompts the mean of each step is taken over.
   * Source: Band.limits of rewards/canaries.py.
   */
  function canaryBand(name, band, margin, prompts) {
    const counts = band.is_of_evaluations ? prompts.map(() => band.prompts) : prompts;
    const halves = counts.map((count) =>
      count > 0
        ? margin * Math.max(band.std, BAND_STD_FLOOR) * Math.sqrt(1 / count + 1 / band.prompts)
        : null,
    );
    const [least, most] = RANGES[name] ?? [-Infinity, Infinity];
    const lowest = Math.max(band.collapse_below ?? -Infinity, least);
    const low = (half) => (band.is_judged_below === false ? 0 : Math.max(band.mean - half, lowest));
    return {
      low: halves.map((half) => (half === null ? null : low(half))),
      high: halves.map((half) => (half === null ? null : Math.min(band.mean + half, most))),
      isOpenAbove: band.is_of_evaluations === true,
    };
  }

  /**
   * Exponential moving average that is not drawn towards zero at its start; what is no number stays.
   *
   * @param weight Of the past, 0 (none) up to but not including 1.
   * Source: Kingma and Ba, "Adam" (2015), section 3, correction of the bias.
   */
  function smooth(values, weight) {
    let sum = 0;
    let norm = 0;
    return values.map((value) => {
      if (!isNumber(value)) return value;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  /** Of a column: {first, last, lowest, highest}, each {step, value}; null without any number. */
  function describe(steps, values) {
    const known = steps.map((step, index) => ({ step, value: values[index] })).filter(({ value }) => isNumber(value));
    if (!known.length) return null;
    const extreme = (isBetter) => known.reduce((best, each) => (isBetter(each.value, best.value) ? each : best));
    return {
      first: known[0],
      last: known[known.length - 1],
      lowest: extreme((a, b) => a < b),
      highest: extreme((a, b) => a > b),
    };
  }

  /** Whether a column has a value that was not finite between two numbers. */
  function hasGap(values) {
    const first = values.findIndex(isNumber);
    const last = values.findLastIndex(isNumber);
    return first >= 0 && values.slice(first, last).includes(null);
  }

  /**
   * Significant digits, four or more, with a true minus sign and the unit; "none" for what is not
   * finite.
   */
  function figure(value, unit = "", wanted = DIGITS) {
    if (!isNumber(value)) return "none";
    const [scaled, suffix] = unit === "bytes" ? [value / 1e9, " GB"] : [value, unit && ` ${unit}`];
    const size = Math.abs(scaled);
    const digits = Math.min(Math.max(wanted, DIGITS), MOST_DIGITS);
    const text = isWide(size)
      ? size.toExponential(digits - 1).replace(/\.?0+e/, "e")
      : String(Number(size.toPrecision(digits)));
    return `${scaled < 0 ? "\u2212" : ""}${text.replace("e-", "e\u2212").replace("e+", "e")}${suffix}`;
  }

  /* Whether a size is written with an exponent. */
  const isWide = (size) => size !== 0 && (size < 1e-3 || size >= 1e6);

  /** Writes the figures of one chart with as many decimals each: four significant digits of the largest. */
  function makeWriter(columns, unit = "") {
    const known = columns.flat().filter(isNumber);
    const largest = known.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    if (unit || isWide(largest)) return (value) => figure(value, unit);
    const digits = known.every(Number.isInteger) ? 0 : Math.max(0, DIGITS - 1 - Math.floor(Math.log10(largest)));
    const isTiny = (value) => value !== 0 && Math.abs(value) < 10 ** -digits;
    return (value) => (isTiny(value) ? figure(value) : fmt(value, digits));
  }

  /** The value below which a share of the rising `values` lies, between two of them by proportion. */
  function quantile(values, share) {
    const at = share * (values.length - 1);
    const [below, above] = [values[Math.floor(at)], values[Math.ceil(at)]];
    return below + (above - below) * (at % 1);
  }

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  window.glmGallery.curveMetrics = {
    arrange, canaryBand, describe, figure, hasGap, isNumber, makeColumns, makeWriter, namesWithout,
    quantile, smooth, unusedTerms,
  };
})();
