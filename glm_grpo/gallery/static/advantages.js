/* Totals -> advantages, as training computes them: step by step, less what a penalty took off.

   Pure functions, no DOM. They follow glm_grpo/grpo/advantages.py, and round to float32 wherever
   that does. */
(function () {
  "use strict";

  const { scoring } = window.glmGallery;
  const { isFlat, mean, starts } = scoring;
  const round32 = Math.fround;

  /** Advantages of the groups first..last of one step, written into `out`; see
     glm_grpo.grpo.advantages. `returns` are totals less penalties. */
  function writeAdvantages(returns, imageStarts, [first, last], settings, out) {
    const [begin, end] = [imageStarts[first], imageStarts[last]];
    const centred = new Float64Array(end - begin);
    for (let row = first; row < last; row += 1) {
      const [from, to] = [imageStarts[row], imageStarts[row + 1]];
      if (!isFlat(returns, from, to)) {
        const centre = mean(returns.subarray(from, to));
        for (let image = from; image < to; image += 1) {
          centred[image - begin] = returns[image] - centre;
        }
      }
    }
    for (let row = first; row < last; row += 1) {
      const values = centred.subarray(imageStarts[row] - begin, imageStarts[row + 1] - begin);
      const divisor = findDivisor(values, centred, settings);
      /* Scaled as a whole, so that the sum of the group stays zero. */
      const largest = values.reduce((high, value) => Math.max(high, Math.abs(value)), 0) / divisor;
      const scale = settings.clip == null ? 1 : settings.clip / Math.max(largest, settings.clip);
      values.forEach((value, image) => {
        out[imageStarts[row] + image] = (value / divisor) * scale;
      });
    }
  }

  function findDivisor(group, batch, { normalization, std_floor: floor }) {
    if (normalization === "mean_only") {
      return 1;
    }
    /* Centred already: the mean of the squares is the variance. */
    const values = normalization === "group_std" ? group : batch;
    const squares = values.reduce((sum, value) => sum + value * value, 0);
    const std = Math.sqrt(squares / (values.length - 1));
    return std > 0 ? Math.max(std, floor) : 1;
  }

  /** Advantages of the groups of one step, G each, from their totals (an array of G each) and the
     settings of run.advantage. What was taken from the reward as a penalty is taken off first. */
  function advantages(groups, groupTotals, settings) {
    const imageStarts = starts(groups.map((group) => group.images.length));
    const returns = Float32Array.from(
      groups.flatMap((group, row) =>
        groupTotals[row].map((total, image) => round32(total) - round32(group.penalty[image])),
      ),
    );
    const values = new Float32Array(returns.length);
    writeAdvantages(returns, imageStarts, [0, groups.length], settings, values);
    return groups.map((_, row) =>
      Array.from(values.subarray(imageStarts[row], imageStarts[row + 1])),
    );
  }

  /** All groups of a table (see tabulate) under a reward: {totals, advantages, flat, shares}; images
      side by side as in the table, advantages null where `advantage` is. Throws WeighingError. */
  function score(table, reward, advantage) {
    const width = reward.terms.length;
    const parts = scoring.weigh(table, reward);
    const totals = scoring.addUp(parts, width, reward.terms);
    const flat = table.groups.map((_, row) =>
      isFlat(totals, table.imageStarts[row], table.imageStarts[row + 1]),
    );
    let advantages = null;
    if (advantage !== null) {
      advantages = new Float32Array(totals.length);
      const returns = totals.map((total, image) => total - table.penalty[image]);
      for (let step = 0; step + 1 < table.stepStarts.length; step += 1) {
        const rows = [table.stepStarts[step], table.stepStarts[step + 1]];
        writeAdvantages(returns, table.imageStarts, rows, advantage, advantages);
      }
    }
    return { totals, advantages, flat, shares: scoring.findShares(table, parts, width) };
  }

  Object.assign(scoring, { advantages, score });
})();
