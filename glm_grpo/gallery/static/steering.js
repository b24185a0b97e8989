/* Weights that move from step to step: shares of the advantage that hold, and bounds of scores.

   Pure functions, no DOM. They follow rewards/steering.py, where the rules are explained, and
   rewards.reweigh.units_of. */
(function () {
  "use strict";

  const { scoring } = window.glmGallery;
  const round32 = Math.fround;

  const LEAST_SHARE = 0.05;
  const LARGEST_STEP = 2;
  const FURTHEST = 100;

  /** Whether the weights of a reward move. */
  function moves(reward) {
    return reward.combine === "shares" || reward.terms.some((term) => term.at_least != null);
  }

  /** Where the weights stand before the first step, whose groups are `rows`: {units, weights,
     multipliers}. */
  function begin(table, { terms }, rows) {
    const asked = terms.map((term) => round32(term.weight));
    const sum = total(asked.map(Math.abs));
    return {
      units: terms.map((term, column) => unitOf(table, term, column, terms.length, rows)),
      weights: asked.map((weight) => weight / sum),
      multipliers: terms.map(() => 0),
    };
  }

  /** Mean of a term, and its spread inside groups. */
  function unitOf(table, term, column, width, rows) {
    const scores = [];
    let inside = 0;
    for (const group of scoresOf(table, column, width, rows)) {
      const centre = scoring.mean(group);
      inside += total(group.map((score) => (score - centre) ** 2));
      scores.push(...group);
    }
    const count = Math.max(scores.length, 1);
    const floor = round32(term.std_floor);
    const centre = total(scores) / count;
    const std = Math.sqrt(inside / count);
    if (std >= floor) return [round32(centre), round32(std)];
    const overall = Math.sqrt(total(scores.map((score) => (score - centre) ** 2)) / count);
    return [round32(centre), overall < floor ? 1 : round32(overall)];
  }

  /** The scores of a term, group after group of those to which it applies. */
  function* scoresOf(table, column, width, rows) {
    for (let row = rows[0]; row < rows[1]; row += 1) {
      if (table.isApplicable[row * width + column]) {
        const group = [];
        for (let image = table.imageStarts[row]; image < table.imageStarts[row + 1]; image += 1) {
          group.push(table.raw[image * width + column]);
        }
        yield group;
      }
    }
  }

  /** The weights of a step, and what scores are measured in there: {weights, units}. */
  function inForce({ combine, terms }, at) {
    if (combine === "shares") {
      return { weights: Float32Array.from(at.weights), units: at.units };
    }
    const asked = terms.map((term) => round32(term.weight));
    const stds = at.units.map(([, std]) => (combine === "normalize_then_sum" ? 1 : std));
    const whole = total(asked.map((weight, column) => Math.abs(weight) * stds[column]));
    const weights = asked.map(
      (weight, column) => weight + (at.multipliers[column] * whole) / stds[column],
    );
    return { weights: Float32Array.from(weights), units: null };
  }

  /** Where the weights stand after the step of `rows`, whose parts are given. */
  function move(table, reward, at, rows, parts) {
    const { combine, terms } = reward;
    const multipliers = terms.map((_, column) => movedMultiplier(table, reward, at, rows, column));
    const moved = { ...at, multipliers };
    return {
      units: at.units,
      weights: combine === "shares" ? movedWeights(table, reward, moved, rows, parts) : at.weights,
      multipliers,
    };
  }

  function movedWeights(table, { terms, steering }, at, rows, parts) {
    const wanted = wantedShares(terms, at);
    const reachable = reachableShares(table, parts, wanted, rows);
    const measured = scoring.findShares(table, parts, terms.length, rows);
    const moved = wanted.map((share, column) => {
      const part = reachable[column];
      const quotient = (part - measured[column]) / Math.max(part, LEAST_SHARE);
      const step = part > 0 ? clamp(quotient, -LARGEST_STEP, LARGEST_STEP) : 0;
      const before = at.weights[column] === 0 && share > 0 ? share : at.weights[column];
      const weight = before * Math.exp(steering.share_rate * step);
      return clamp(weight, share / FURTHEST, share * FURTHEST);
    });
    const sum = total(moved);
    return moved.map((weight) => weight / sum);
  }

  function wantedShares(terms, at) {
    const asked = terms.map((term) => round32(term.weight));
    const sum = total(asked);
    const wanted = asked.map((weight, column) => weight / sum + at.multipliers[column]);
    const all = total(wanted);
    return wanted.map((share) => share / all);
  }

  /** What can be had of the shares: in each group, the part among the terms that vary there. */
  function reachableShares(table, parts, wanted, rows) {
    const width = wanted.length;
    const sums = new Array(width).fill(0);
    let counted = 0;
    for (let row = rows[0]; row < rows[1]; row += 1) {
      const images = range(table.imageStarts[row], table.imageStarts[row + 1]);
      const of = (column) => images.map((image) => parts[image * width + column]);
      const varied = wanted.map((share, column) =>
        scoring.isFlat(of(column), 0, images.length) ? 0 : share,
      );
      const totals = images.map((image) => scoring.sumRow(parts, image * width, width));
      const sum = total(varied);
      if (sum > 0 && !scoring.isFlat(totals, 0, images.length)) {
        counted += 1;
        varied.forEach((share, column) => {
          sums[column] += share / sum;
        });
      }
    }
    return sums.map((sum) => (counted === 0 ? 0 : sum / counted));
  }

  function movedMultiplier(table, { terms, steering }, at, rows, column) {
    const bound = terms[column].at_least ?? null;
    const scores = [...scoresOf(table, column, terms.length, rows)].flat();
    if (bound === null || scores.length === 0) return at.multipliers[column];
    const distance = clamp((bound - scoring.mean(scores)) / at.units[column][1], -1, 1);
    const moved = at.multipliers[column] + steering.bound_rate * distance;
    return clamp(moved, 0, steering.bound_max);
  }

  function range(first, last) {
    return Array.from({ length: last - first }, (_, index) => first + index);
  }

  function clamp(value, low, high) {
    return Math.min(Math.max(value, low), high);
  }

  function total(values) {
    return values.reduce((sum, value) => sum + value, 0);
  }

  Object.assign(scoring, { begin, inForce, move, moves });
})();
