/* Raw scores and weights -> totals and shares, as training computes them.

   Pure functions, no DOM. They follow rewards/reweigh.py, and round to float32 wherever that does,
   so that a group that is flat there is flat here.

   Axes: groups of G images, one a step and prompt; R terms in the order of `reward.terms`. */
(function () {
  "use strict";

  const round32 = Math.fround;

  /* Eight units of float32 rounding, 8 * 2^-23: see rewards.reweigh.FLAT_TOLERANCE. */
  const FLAT_TOLERANCE = 2 ** -20;
  /* Lanes in which torch adds up the numbers of a row: the order decides the last bit. */
  const LANES = 4;

  /** Weights that give no total; the message says value, rule and remedy. */
  /* Bounds of rewards.options. */
  const LEAST_WEIGHT = 1e-30;
  const LARGEST_WEIGHT = 1e12;

  class WeighingError extends Error {}

  const tables = new WeakMap();

  /** The scores of many steps side by side. `steps` as of loadSteps(); those with a problem are left
     out. Kept as long as `steps` is: moving a weight reads no object again. */
  function tabulate(steps, terms) {
    const known = tables.get(steps);
    if (known !== undefined) {
      return known;
    }
    const whole = steps.filter((step) => step.groups !== undefined);
    const groups = whole.flatMap((step) => step.groups);
    const table = {
      groups,
      steps: whole.flatMap((step) => step.groups.map(() => step.step)),
      /* First group of each step and first image of each group, each with the end as last entry. */
      stepStarts: starts(whole.map((step) => step.groups.length)),
      imageStarts: starts(groups.map((group) => group.images.length)),
      isApplicable: Uint8Array.from(
        groups.flatMap((group) => terms.map((term) => group.raw[term.name] != null)),
      ),
      standardised: new Map(),
    };
    const images = table.imageStarts[groups.length];
    table.raw = new Float32Array(images * terms.length);
    table.penalty = new Float32Array(images);
    groups.forEach((group, row) => fillGroup(table, terms, group, table.imageStarts[row]));
    tables.set(steps, table);
    return table;
  }

  function fillGroup(table, terms, group, start) {
    /* Evaluations have no penalty. */
    table.penalty.set(group.penalty ?? [], start);
    terms.forEach((term, column) => {
      const scores = group.raw[term.name] ?? [];
      scores.forEach((score, image) => {
        table.raw[(start + image) * terms.length + column] = score;
      });
    });
  }

  function starts(sizes) {
    const ends = new Int32Array(sizes.length + 1);
    sizes.forEach((size, index) => {
      ends[index + 1] = ends[index] + size;
    });
    return ends;
  }

  /** Scores centred and scaled inside each group; 0 in a group whose scores are all equal. */
  function standardise(table, terms) {
    const floors = terms.map((term) => round32(term.std_floor));
    const key = floors.join();
    if (!table.standardised.has(key)) {
      const scores = new Float32Array(table.raw.length);
      for (let row = 0; row < table.groups.length; row += 1) {
        floors.forEach((floor, column) => standardiseColumn(table, scores, row, column, floor));
      }
      table.standardised.set(key, scores);
    }
    return table.standardised.get(key);
  }

  function standardiseColumn(table, scores, row, column, floor) {
    const [first, last] = [table.imageStarts[row], table.imageStarts[row + 1]];
    const width = table.raw.length / table.penalty.length;
    const values = [];
    for (let image = first; image < last; image += 1) {
      values.push(table.raw[image * width + column]);
    }
    if (values.length < 2) {
      throw new WeighingError(
        `group size ${values.length}: normalize_then_sum compares the images of one prompt; ` +
          "sample at least 2 per prompt, or use weighted_sum",
      );
    }
    if (isFlat(values, 0, values.length)) {
      return;
    }
    const centre = mean(values);
    const squares = values.reduce((sum, value) => sum + (value - centre) ** 2, 0);
    const std = Math.max(Math.sqrt(squares / (values.length - 1)), floor);
    values.forEach((value, image) => {
      scores[(first + image) * width + column] = (value - centre) / std;
    });
  }

  /** What each term adds to each image's total, image by image; see rewards.reweigh.contributions. */
  function weigh(table, reward) {
    const { terms } = reward;
    const weights = Float32Array.from(terms.map((term) => term.weight));
    checkWeights(reward, weights);
    const scores = reward.combine === "normalize_then_sum" ? standardise(table, terms) : table.raw;
    const parts = new Float32Array(scores.length);
    const sizes = weights.map(Math.abs);
    const all = sumRow(sizes, 0, sizes.length);
    const applicable = new Float32Array(terms.length);
    for (let row = 0; row < table.groups.length; row += 1) {
      const start = row * terms.length;
      for (let column = 0; column < terms.length; column += 1) {
        applicable[column] = sizes[column] * table.isApplicable[start + column];
      }
      const present = sumRow(applicable, 0, terms.length);
      if (present === 0) {
        throw new WeighingError(describeMissingTotal(table, terms, row));
      }
      /* Exactly 1 where every term applies. */
      const scale = round32(all / present);
      const end = table.imageStarts[row + 1] * terms.length;
      for (let place = table.imageStarts[row] * terms.length; place < end; place += 1) {
        const column = place % terms.length;
        if (table.isApplicable[start + column]) {
          parts[place] = round32(weights[column] * scores[place]) * scale;
        }
      }
    }
    return parts;
  }

  function checkWeights({ terms }, weights) {
    if (terms.length === 0) {
      throw new WeighingError("reward.terms = {}: no term is used, so there is no reward");
    }
    terms.forEach((term) => {
      if (typeof term.weight !== "number" || !Number.isFinite(term.weight)) {
        throw new WeighingError(
          `reward.terms.${term.name}.weight = ${term.weight}: must be a finite number; ` +
            "0 leaves the term out",
        );
      }
      const size = Math.abs(term.weight);
      if (size > 0 && (size < LEAST_WEIGHT || size > LARGEST_WEIGHT)) {
        throw new WeighingError(
          `reward.terms.${term.name}.weight = ${term.weight}: must be 0, or 1e-30 to 1e+12 in ` +
            "size: float32 holds no other; set it to a number in this range",
        );
      }
    });
    if (weights.every((weight) => weight === 0)) {
      const names = terms.map((term) => term.name);
      throw new WeighingError(
        `the weights of all terms (${names.join(", ")}) are 0, so every reward is 0; ` +
          `set one of them, say reward.terms.${names[0]}.weight=1`,
      );
    }
  }

  function describeMissingTotal(table, terms, row) {
    const names = terms
      .filter((_, column) => table.isApplicable[row * terms.length + column])
      .map((term) => term.name);
    return (
      `prompt ${table.groups[row].prompt_id} has no total: of the terms that apply to it ` +
      `(${names.join(", ")}) none has a weight other than 0; set one, such as ` +
      `reward.terms.${names[0] ?? terms[0].name}.weight=0.1`
    );
  }

  /** Rounds after every addition. In the order of torch for fewer than 8 numbers; for more of them
     the last bits may differ, which the tolerance of flat and tied covers. */
  function sumRow(values, start, width) {
    const lanes = new Float32Array(LANES);
    const whole = width - (width % LANES);
    for (let index = 0; index < width; index += 1) {
      lanes[index < whole ? index % LANES : 0] += values[start + index];
    }
    return lanes.reduce((sum, lane) => round32(sum + lane));
  }

  function addUp(parts, width, terms) {
    const totals = new Float32Array(parts.length / width);
    for (let image = 0; image < totals.length; image += 1) {
      totals[image] = sumRow(parts, image * width, width);
    }
    if (!totals.every(Number.isFinite)) {
      const weights = terms.map((term) => `${term.name}: ${term.weight}`).join(", ");
      throw new WeighingError(
        `reward.terms have weights {${weights}}: with them a total is not a finite float32 ` +
          "number; use smaller ones",
      );
    }
    return totals;
  }

  /** Whether values[first..last) are equal to within FLAT_TOLERANCE of the largest. */
  function isFlat(values, first, last) {
    let [low, high] = [Infinity, -Infinity];
    for (let index = first; index < last; index += 1) {
      low = Math.min(low, values[index]);
      high = Math.max(high, values[index]);
    }
    return round32(high - low) <= FLAT_TOLERANCE * Math.max(Math.abs(low), Math.abs(high));
  }

  /** Each term's part of the variance inside groups; see rewards.reweigh.advantage_shares. */
  function findShares(table, parts, width) {
    const sums = new Float64Array(width);
    let varied = 0;
    for (let row = 0; row < table.groups.length; row += 1) {
      const [first, last] = [table.imageStarts[row], table.imageStarts[row + 1]];
      const totals = new Float64Array(last - first);
      for (let place = first * width; place < last * width; place += 1) {
        totals[Math.floor(place / width) - first] += parts[place];
      }
      if (!isFlat(Float32Array.from(totals), 0, totals.length)) {
        varied += 1;
        addShares(sums, parts.subarray(first * width, last * width), totals, width);
      }
    }
    return Array.from(sums, (sum) => (varied === 0 ? 0 : round32(sum / varied)));
  }

  function addShares(sums, parts, totals, width) {
    const centre = mean(totals);
    const variance = totals.reduce((sum, total) => sum + (total - centre) ** 2, 0);
    for (let place = 0; place < parts.length; place += 1) {
      const total = totals[Math.floor(place / width)];
      /* The mean of the part drops out: centred totals add up to 0. */
      sums[place % width] += (parts[place] * (total - centre)) / variance;
    }
  }

  function mean(values) {
    return values.reduce((sum, value) => sum + value, 0) / values.length;
  }

  function oneGroup(group, reward) {
    return tabulate([{ step: 0, groups: [group] }], reward.terms);
  }

  /** Name of each term -> what it adds to the G totals of a group; null where it does not apply. */
  function contributions(group, reward) {
    const table = oneGroup(group, reward);
    const parts = weigh(table, reward);
    const width = reward.terms.length;
    return Object.fromEntries(
      reward.terms.map(({ name }, column) => [
        name,
        table.isApplicable[column] ? group.images.map((_, g) => parts[g * width + column]) : null,
      ]),
    );
  }

  /** The G totals of a group. */
  function totals(group, reward) {
    const parts = weigh(oneGroup(group, reward), reward);
    return Array.from(addUp(parts, reward.terms.length, reward.terms));
  }

  /** Name of each term -> its share of what tells the images of a group apart; they add up to 1. */
  function shares(group, reward) {
    const table = oneGroup(group, reward);
    const found = findShares(table, weigh(table, reward), reward.terms.length);
    return Object.fromEntries(reward.terms.map(({ name }, column) => [name, found[column]]));
  }

  window.glmGallery.scoring = {
    FLAT_TOLERANCE,
    WeighingError,
    addUp,
    contributions,
    findShares,
    isFlat,
    mean,
    shares,
    starts,
    tabulate,
    totals,
    weigh,
  };
})();
