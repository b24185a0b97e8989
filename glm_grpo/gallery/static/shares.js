/* Weights that give each term the share of the advantage that is asked for.

   Pure functions, no DOM. They follow rewards/audit/shares.py, where the problem is explained; the
   equations are the same, solved by Levenberg and Marquardt's method. */
(function () {
  "use strict";

  const { scoring } = window.glmGallery;

  /* As in rewards/audit/shares.py. */
  const SHARE_TOLERANCE = 0.02;
  const GOOD_ENOUGH = 1e-4;
  const STARTS = 8;
  const LOG_RANGE = 12;
  const SMALLEST_VARIANCE = 1e-12;

  const MOST_STEPS = 100;
  /* So many steps in a row that leave more of the error than this are the last: a slider waits. */
  const STALLED = 0.99;
  const MOST_STALLS = 4;
  /* Damping at first, the factor it changes by, and where nothing is gained any more. */
  const DAMPING = 1e-3;
  const DAMPING_FACTOR = 4;
  const MOST_DAMPING = 1e12;
  /* Of the weights given: enough for shares to within 1e-5, few enough to be read and copied. */
  const DIGITS = 6;

  /**
   * Weights under which terms have the shares asked for, or come as near as was found.
   *
   * @param steps As of loadSteps().
   * @param reward As of run.reward, of fixed weights; their signs are kept, 0 counts as positive.
   * @param shares Name of a term -> share, >= 0, sum 1; 0 for those that are not named.
   * @returns {weights, reached, isReached}: arrays in the order of the terms; sizes of weights add
   *     up to 1. Throws WeighingError where a prompt has no term with a share.
   */
  function weightsForShares(steps, reward, shares) {
    const { terms } = reward;
    const table = scoring.tabulate(steps, terms);
    const asked = terms.map(({ name }) => shares[name] ?? 0);
    const signs = terms.map(({ weight }) => (weight < 0 ? -1 : 1));
    const weighed = (weights) => ({ ...reward, terms: terms.map((term, column) => ({ ...term, weight: weights[column] })) });
    const ones = weighed(asked.map((share, column) => (share > 0 ? signs[column] : 0)));
    const problem = readProblem(table, scoring.weigh(table, ones), asked);
    let nearest = null;
    for (const sizes of findSizes(problem)) {
      const weights = sizes.map((size, column) => Number((signs[column] * size).toPrecision(DIGITS)));
      const parts = scoring.weigh(table, weighed(weights));
      const reached = scoring.findShares(table, parts, terms.length);
      const difference = Math.max(...reached.map((share, column) => Math.abs(share - asked[column])));
      if (nearest === null || difference < nearest.difference) nearest = { weights, reached, difference };
      if (difference <= GOOD_ENOUGH) break;
    }
    return { ...nearest, isReached: nearest.difference <= SHARE_TOLERANCE };
  }

  /** Whether each term tells the images of any group apart; no weight gives the others a share. */
  function findVarying(steps, reward) {
    const { terms } = reward;
    const table = scoring.tabulate(steps, terms);
    return terms.map((_, column) =>
      table.groups.some((_, row) => {
        if (!table.isApplicable[row * terms.length + column]) return false;
        const values = columnOf(table, table.raw, terms.length, row, column);
        return !scoring.isFlat(values, 0, values.length);
      }),
    );
  }

  function columnOf(table, parts, width, row, column) {
    const values = [];
    for (let image = table.imageStarts[row]; image < table.imageStarts[row + 1]; image += 1) {
      values.push(parts[image * width + column]);
    }
    return values;
  }

  /* The terms with a share, their spreads, and their covariances in each group that is not flat, in
     units of the spreads. */
  function readProblem(table, parts, asked) {
    const columns = [...asked.keys()].filter((column) => asked[column] > 0);
    const groups = table.groups.flatMap((_, row) => {
      const centred = columns.map((column) => centre(columnOf(table, parts, asked.length, row, column)));
      return centred.some((values) => values !== null) ? [centred] : [];
    });
    const images = groups.reduce((count, group) => count + group.find(Boolean).length, 0);
    const squares = (values) => (values === null ? 0 : values.reduce((sum, value) => sum + value * value, 0));
    const spreads = columns.map((_, index) =>
      Math.sqrt(groups.reduce((sum, group) => sum + squares(group[index]), 0) / Math.max(images, 1)) || 1,
    );
    return { asked, columns, spreads, covariances: groups.map((group) => covariancesOf(group, spreads)) };
  }

  /* null for scores that are all equal: their roundings must not be taken for spread. */
  function centre(values) {
    if (scoring.isFlat(values, 0, values.length)) return null;
    const middle = scoring.mean(values);
    return values.map((value) => value - middle);
  }

  function covariancesOf(group, spreads) {
    const count = group.find(Boolean).length;
    return group.map((one, row) =>
      group.map((other, column) => {
        if (one === null || other === null) return 0;
        const sum = one.reduce((total, value, image) => total + value * other[image], 0);
        return sum / count / (spreads[row] * spreads[column]);
      }),
    );
  }

  /** Sizes of weights to be tried: those of the minimum, then by least squares from several starts. */
  function* findSizes({ asked, columns, spreads, covariances }) {
    const wanted = columns.map((column) => asked[column]);
    const first = wanted.map((share) => Math.max(0.5 * Math.log(share), -LOG_RANGE));
    const random = makeRandom();
    const minimum = solve(covariances, wanted, first, MINIMUM);
    yield toSizes(minimum);
    for (let start = 0; start < STARTS; start += 1) {
      const near = start < 2 ? [minimum, first][start] : first.map((value) => value + random());
      yield toSizes(solve(covariances, wanted, near, LEAST_SQUARES));
    }

    function toSizes(logs) {
      const highest = Math.max(...logs);
      const unscaled = logs.map((log, index) => Math.exp(log - highest) / spreads[index]);
      const sum = unscaled.reduce((total, size) => total + size, 0);
      const sizes = asked.map(() => 0);
      columns.forEach((column, index) => {
        sizes[column] = unscaled[index] / sum;
      });
      return sizes;
    }
  }

  /* The same numbers every time: sums of uniform ones, of about unit spread. */
  function makeRandom() {
    let state = 1;
    const uniform = () => {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
      return state / 2 ** 32;
    };
    return () => 2 * (uniform() + uniform() + uniform() - 1.5);
  }

  /* Two ways to the shares, each a value that falls, and the equations of a step without damping.
     The residual is the gradient of the objective, and its Jacobian the Hessian. */
  const MINIMUM = {
    valueOf: ({ objective }) => objective,
    hasStalled: () => false,
    equations: ({ jacobian, residual }) => ({ matrix: jacobian, right: residual.map((value) => -value) }),
  };
  const LEAST_SQUARES = {
    valueOf: ({ error }) => error,
    hasStalled: (found, at) => found.error > STALLED * at.error,
    equations: ({ jacobian, residual }) => ({
      matrix: jacobian.map((_, one) => jacobian.map((_, other) => dot(jacobian, one, (row) => row[other]))),
      right: jacobian.map((_, one) => -dot(jacobian, one, (_, index) => residual[index])),
    }),
  };

  /* Logarithms of weights at which the shares are as wanted, or near it. */
  function solve(covariances, wanted, start, { valueOf, hasStalled, equations }) {
    let logs = start;
    let at = evaluate(covariances, wanted, logs);
    let damping = DAMPING;
    let stalls = 0;
    for (let step = 0; step < MOST_STEPS && at.error > 1e-14 && damping < MOST_DAMPING; step += 1) {
      const change = solveLinear(equations(at), damping);
      const next = logs.map((log, index) => Math.min(Math.max(log + change[index], -LOG_RANGE), LOG_RANGE));
      const found = evaluate(covariances, wanted, next);
      if (valueOf(found) < valueOf(at)) {
        stalls = hasStalled(found, at) ? stalls + 1 : 0;
        [logs, at] = [next, found];
        if (stalls === MOST_STALLS) break;
        damping /= DAMPING_FACTOR;
      } else {
        damping *= DAMPING_FACTOR;
      }
    }
    return logs;
  }

  /* Shares less those wanted, how they change with the logarithm of each weight, and the objective
     whose minimum has the shares wanted. */
  function evaluate(covariances, wanted, logs) {
    const width = wanted.length;
    const highest = Math.max(...logs);
    const weights = logs.map((log) => Math.exp(log - highest));
    let objective = -wanted.reduce((sum, share, one) => sum + share * (logs[one] - highest), 0);
    const residual = wanted.map((share) => -share);
    const jacobian = wanted.map(() => new Array(width).fill(0));
    for (const matrix of covariances) {
      const products = matrix.map((row, one) => row.map((value, other) => weights[one] * value * weights[other]));
      const parts = products.map((row) => row.reduce((sum, value) => sum + value, 0));
      const apart = products.reduce((sum, row, one) => sum + row[one], 0);
      const variance = Math.max(parts.reduce((sum, part) => sum + part, 0), SMALLEST_VARIANCE * apart);
      objective += Math.log(variance) / (2 * covariances.length);
      for (let one = 0; one < width; one += 1) {
        const share = parts[one] / variance;
        residual[one] += share / covariances.length;
        for (let other = 0; other < width; other += 1) {
          const own = one === other ? share : 0;
          const slope = own + products[one][other] / variance - (2 * share * parts[other]) / variance;
          jacobian[one][other] += slope / covariances.length;
        }
      }
    }
    const error = residual.reduce((sum, value) => sum + value * value, 0);
    return { residual, jacobian, error, objective };
  }

  /* Of a column of a matrix with what `other` gives for each of its rows. */
  function dot(matrix, column, other) {
    return matrix.reduce((sum, row, index) => sum + row[column] * other(row, index), 0);
  }

  /* Solves matrix x = right by elimination, with damping added to the diagonal: with enough of it the
     matrix is positive definite. */
  function solveLinear({ matrix, right }, damping) {
    const width = matrix.length;
    const rows = matrix.map((row, one) => [
      ...row.map((value, other) => (one === other ? value + damping : value)),
      right[one],
    ]);
    for (let pivot = 0; pivot < width; pivot += 1) {
      for (let below = pivot + 1; below < width; below += 1) {
        const factor = rows[below][pivot] / rows[pivot][pivot];
        for (let column = pivot; column <= width; column += 1) rows[below][column] -= factor * rows[pivot][column];
      }
    }
    const found = new Array(width).fill(0);
    for (let one = width - 1; one >= 0; one -= 1) {
      let rest = rows[one][width];
      for (let other = one + 1; other < width; other += 1) rest -= rows[one][other] * found[other];
      found[one] = rest / rows[one][one];
    }
    return found;
  }

  Object.assign(scoring, { findVarying, weightsForShares });
})();
