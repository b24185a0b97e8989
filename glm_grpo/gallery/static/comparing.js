/* The same images under two rewards: which win, and how much their order changes.

   Pure functions, no DOM. They follow glm_grpo/report/rescoring/group_order.py and rescore.py, and round to
   float32 wherever those do, so that images that are tied there are tied here. */
(function () {
  "use strict";

  const { scoring } = window.glmGallery;
  const { FLAT_TOLERANCE, mean } = scoring;
  const round32 = Math.fround;

  /* Largest difference to a stored total, relative where it is above 1: a few float32 roundings. */
  const STORED_TOLERANCE = 1e-6;

  const scoredBefore = new WeakMap();

  function tolerance(values, first, last) {
    let largest = 0;
    for (let index = first; index < last; index += 1) {
      largest = Math.max(largest, Math.abs(values[index]));
    }
    return FLAT_TOLERANCE * largest;
  }

  /** The lowest value that counts as best among values[first..last): see group_order.py. */
  function findBestLimit(values, first, last) {
    let high = -Infinity;
    for (let index = first; index < last; index += 1) {
      high = Math.max(high, values[index]);
    }
    return round32(high - tolerance(values, first, last));
  }

  /** Whether none of a group's best images is among its best any more. */
  function isWinnerChanged(before, after, first, last) {
    const limits = [findBestLimit(before, first, last), findBestLimit(after, first, last)];
    for (let image = first; image < last; image += 1) {
      if (before[image] >= limits[0] && after[image] >= limits[1]) {
        return false;
      }
    }
    return true;
  }

  /** Kendall's tau-b of one group; null where it is flat before or after. */
  function rankCorrelation(before, after, first, last) {
    const limits = [tolerance(before, first, last), tolerance(after, first, last)];
    let [agreement, untiedBefore, untiedAfter] = [0, 0, 0];
    for (let one = first; one < last; one += 1) {
      for (let other = one + 1; other < last; other += 1) {
        const orderBefore = order(before[one], before[other], limits[0]);
        const orderAfter = order(after[one], after[other], limits[1]);
        agreement += orderBefore * orderAfter;
        untiedBefore += Math.abs(orderBefore);
        untiedAfter += Math.abs(orderAfter);
      }
    }
    const untied = untiedBefore * untiedAfter;
    return untied === 0 ? null : round32(agreement / Math.sqrt(untied));
  }

  function order(one, other, limit) {
    const difference = round32(one - other);
    return Math.abs(difference) <= limit ? 0 : Math.sign(difference);
  }

  /** The same images under two rewards of the same terms; see glm_grpo.rescoring.rescore.

     `steps` as of loadSteps(), `advantage` as of run.advantage (null: advantages are null). Throws
     WeighingError where weights give no total. Of every group: step, group, totals and advantages
     before and after (Float32Array), isFlatBefore, isFlatAfter, isWinnerChanged,
     rankCorrelation (null where flat) and largestChange (of an advantage, 0 where they are null). */
  function compare(steps, rewardBefore, rewardAfter, advantage) {
    const table = scoring.tabulate(steps, rewardBefore.terms);
    const before = scoreBefore(table, rewardBefore, advantage);
    const after = scoring.score(table, rewardAfter, advantage);
    const perGroup = table.groups.map((_, row) => new ComparedGroup(table, before, after, row));
    const ranked = perGroup.filter((group) => group.rankCorrelation !== null);
    return {
      steps: table.stepStarts.length - 1,
      images: table.penalty.length,
      groups: table.groups.length,
      changedWinners: perGroup.filter((group) => group.isWinnerChanged).length,
      rankCorrelation: ranked.length ? mean(ranked.map((group) => group.rankCorrelation)) : null,
      rankedGroups: ranked.length,
      flatBefore: before.flat.filter(Boolean).length,
      flatAfter: after.flat.filter(Boolean).length,
      differingGroups: before.differingGroups,
      terms: rewardAfter.terms.map((term, column) => ({
        name: term.name,
        weightBefore: rewardBefore.terms[column].weight,
        weightAfter: term.weight,
        shareBefore: before.shares[column],
        shareAfter: after.shares[column],
      })),
      perGroup,
    };
  }

  /** The run's own reward stays the same while a weight moves. */
  function scoreBefore(table, reward, advantage) {
    const known = scoredBefore.get(table);
    if (known?.reward === reward) {
      return known;
    }
    const scored = scoring.score(table, reward, advantage);
    const before = { ...scored, reward, differingGroups: countDiffering(table, scored.totals) };
    scoredBefore.set(table, before);
    return before;
  }

  /** Groups whose stored totals are not those that follow from the scores and the run's weights. */
  function countDiffering(table, computed) {
    return table.groups.filter((group, row) =>
      group.total.some((total, image) => {
        const difference = total - computed[table.imageStarts[row] + image];
        return Math.abs(difference) > STORED_TOLERANCE * Math.max(1, Math.abs(total));
      }),
    ).length;
  }

  function findLargestChange(before, after, first, last) {
    let largest = 0;
    for (let image = first; image < last; image += 1) {
      largest = Math.max(largest, Math.abs(after[image] - before[image]));
    }
    return largest;
  }

  /** One group before and after. Its columns are made when they are asked for: thousands of groups
      are compared at every move, a dozen is looked at. */
  class ComparedGroup {
    #scored;
    #images;

    constructor(table, before, after, row) {
      const images = [table.imageStarts[row], table.imageStarts[row + 1]];
      this.#scored = { before, after };
      this.#images = images;
      this.step = table.steps[row];
      this.group = table.groups[row];
      this.isFlatBefore = before.flat[row];
      this.isFlatAfter = after.flat[row];
      this.isWinnerChanged = isWinnerChanged(before.totals, after.totals, ...images);
      this.rankCorrelation = rankCorrelation(before.totals, after.totals, ...images);
      this.largestChange = after.advantages
        ? findLargestChange(before.advantages, after.advantages, ...images)
        : 0;
    }

    get totalsBefore() {
      return this.#scored.before.totals.slice(...this.#images);
    }

    get totalsAfter() {
      return this.#scored.after.totals.slice(...this.#images);
    }

    get advantagesBefore() {
      return this.#scored.before.advantages?.slice(...this.#images) ?? null;
    }

    get advantagesAfter() {
      return this.#scored.after.advantages?.slice(...this.#images) ?? null;
    }
  }

  /** Which images of a group are its best: all of them in a flat group. */
  function best(groupTotals) {
    const exact = Float32Array.from(groupTotals);
    const limit = findBestLimit(exact, 0, exact.length);
    return Array.from(exact, (total) => total >= limit);
  }

  /** The rank of each image of a group from 1, the best. An image has the rank of the highest total
     that its own equals within the tolerance; so the first is that of all that `best` finds. */
  function ranks(groupTotals) {
    const exact = Float32Array.from(groupTotals);
    const limit = tolerance(exact, 0, exact.length);
    const falling = [...exact.keys()].sort((one, other) => exact[other] - exact[one]);
    const found = [];
    let highest = 0;
    falling.forEach((image, place) => {
      if (exact[image] < round32(exact[falling[highest]] - limit)) highest = place;
      found[image] = highest + 1;
    });
    return found;
  }

  /** The images of a group from the first rank to the last; those that share one as they were
     sampled. */
  function orderByRank(groupRanks) {
    return [...groupRanks.keys()].sort(
      (one, other) => groupRanks[one] - groupRanks[other] || one - other,
    );
  }

  Object.assign(scoring, { best, compare, orderByRank, ranks });
})();
