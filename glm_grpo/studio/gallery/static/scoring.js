/* Raw scores and weights -> totals, advantages, order and shares, by the formulas of training.

   Pure functions, no DOM, in double precision: a page shows three digits. `group` is one of
   loadSteps(), with G images; `reward` is as run.reward. An image that a term with a weight refused is
   left out of its group: its parts and total are NaN, which count in no mean, and its advantage is 0. */
(function () {
  "use strict";

  const { isKnown, mean, sum } = window.glmGallery.parts;

  /* Of the largest |value| of a group: values that differ by no more are equal; see rewards.weighting. */
  const ZERO_STD_TOLERANCE = 2 ** -20;
  /* Of the largest part, or of 1: a stored total further away was weighted in another way. */
  const STORED_TOLERANCE = 1e-5;

  /** Weights that give no total; the message says value, rule and remedy. */
  class WeighingError extends Error {}

  const toleranceOf = (values) => ZERO_STD_TOLERANCE * Math.max(0, ...values.filter(isKnown).map(Math.abs));
  function isZeroStd(values) {
    const known = values.filter(isKnown);
    return Math.max(...known) - Math.min(...known) <= toleranceOf(known);
  }
  const dot = (one, other) => sum(one.map((value, index) => value * other[index]).filter(isKnown));
  /* Of one value it is 0. */
  const std = (centred) => Math.sqrt(dot(centred, centred) / Math.max(centred.filter(isKnown).length - 1, 1));

  /* Less their mean; 0 where they are all equal. */
  function centre(values) {
    const middle = isZeroStd(values) ? null : mean(values);
    return values.map((value) => (isKnown(value) && middle === null ? 0 : value - middle));
  }

  function standardise(scores, floor) {
    const centred = centre(scores);
    const divisor = Math.max(std(centred), floor);
    return centred.map((score) => score / divisor);
  }

  /** Name of each term -> what it adds to the G totals of a group; null where it does not apply. See
     rewards.weighting.contributions. */
  function contributions({ prompt_id: id, raw }, { combine, terms }) {
    const wrong = terms.find(({ weight }) => !Number.isFinite(weight));
    const rule = "must be a finite number; 0 leaves the term out";
    if (wrong) throw new WeighingError(`reward.terms.${wrong.name}.weight = ${wrong.weight}: ${rule}`);
    const applying = terms.filter(({ name }) => raw[name] != null);
    const sizeOf = (some) => sum(some.map(({ weight }) => Math.abs(weight)));
    if (sizeOf(applying) === 0) {
      const names = applying.map(({ name }) => name);
      throw new WeighingError(
        `prompt ${id} has no total: of the terms that apply to it (${names.join(", ")}) none has a weight ` +
          `other than 0; set one, such as reward.terms.${names[0]}.weight=0.1`,
      );
    }
    /* The weight of terms that do not apply goes to the others. */
    const scale = sizeOf(terms) / sizeOf(applying);
    const isLeftOut = (_, image) => applying.some(({ name, weight }) => weight !== 0 && raw[name][image] === null);
    const leftOut = raw[applying[0].name].map(isLeftOut);
    const weigh = ({ name, weight, std_floor: floor }) => {
      const kept = raw[name].map((score, image) => (leftOut[image] ? NaN : (score ?? NaN)));
      const scores = combine === "normalize_then_sum" ? standardise(kept, floor) : kept;
      /* A term without weight may have refused an image that stays. */
      return scores.map((score, image) => (weight === 0 && !leftOut[image] ? 0 : weight * scale * score));
    };
    return Object.fromEntries(terms.map((term) => [term.name, applying.includes(term) ? weigh(term) : null]));
  }

  /* The totals that parts add up to. */
  function addUp(parts) {
    const columns = Object.values(parts).filter(Boolean);
    return columns[0].map((_, image) => sum(columns.map((column) => column[image])));
  }

  /** Whether parts, as of contributions, add up to the stored totals of their group. */
  function areTotals(parts, stored) {
    const largest = Math.max(1, ...Object.values(parts).flat().filter(isKnown).map(Math.abs));
    const isNear = (total, other) => Math.abs(total - other) <= STORED_TOLERANCE * largest;
    return addUp(parts).every((total, image) =>
      isKnown(total) && isKnown(stored[image]) ? isNear(total, stored[image]) : isKnown(total) === isKnown(stored[image]),
    );
  }

  /* Advantages of the groups of a step from totals less penalties; see glm_grpo.grpo.advantages. */
  function advantages(rewards, { normalization, std_floor: floor, clip }) {
    const centred = rewards.map(centre);
    const stdOf = { group_std: std, batch_std: () => std(centred.flat()), mean_only: () => 0 }[normalization];
    return centred.map((values) => {
      const divisor = stdOf(values) === 0 ? 1 : Math.max(stdOf(values), floor);
      const largest = Math.max(0, ...values.filter(isKnown).map(Math.abs)) / divisor;
      /* The group is scaled as a whole, so that its sum stays zero. */
      const scale = clip === null ? 1 : clip / Math.max(largest, clip);
      return values.map((value) => (isKnown(value) ? (value / divisor) * scale : 0));
    });
  }

  /* 1, -1 or 0 for every pair of a group: which total is higher, or neither, or not both are known. */
  function pairOrders(totals) {
    const limit = toleranceOf(totals);
    const order = (gap) => (!isKnown(gap) || Math.abs(gap) <= limit ? 0 : Math.sign(gap));
    return totals.flatMap((one, index) => totals.slice(index + 1).map((other) => order(one - other)));
  }

  /** The rank of each image of a group from 1, the best: that of the highest total that its own equals.
      Images without a total share the last one. */
  function ranks(given) {
    const limit = toleranceOf(given);
    const totals = given.map((total) => (isKnown(total) ? total : -Number.MAX_VALUE));
    const falling = [...totals.keys()].sort((one, other) => totals[other] - totals[one]);
    const found = [];
    let highest = 0;
    falling.forEach((image, place) => {
      if (totals[image] < totals[falling[highest]] - limit) highest = place;
      found[image] = highest + 1;
    });
    return found;
  }

  /** The images of a group from the first rank to the last; those that share one as they were sampled. */
  const orderByRank = (found) => [...found.keys()].sort((one, other) => found[one] - found[other]);

  /** Which images of a group are its best: all of them in a zero-std group. */
  const best = (totals) => ranks(totals).map((rank) => rank === 1);

  /** Every group of the readable steps under a reward; `advantages` are null where `settings`, as
     run.advantage, are. Shares are parts of the variance, see rewards.weighting.advantage_shares. Throws
     WeighingError. */
  function score(steps, reward, settings) {
    return steps.flatMap(({ step, groups = [] }) => {
      const scored = groups.map((group) => {
        const parts = contributions(group, reward);
        const totals = addUp(parts);
        const centred = centre(totals);
        const variance = dot(centred, centred);
        const shares = Object.values(parts).map((part) => (part ? dot(part, centred) / variance : 0));
        const order = { isZeroStd: variance === 0, best: best(totals), orders: pairOrders(totals) };
        return { step, group, parts, totals, shares, ...order };
      });
      const rewards = scored.map(({ group, totals }) => totals.map((total, image) => total - group.penalty[image]));
      const found = settings && advantages(rewards, settings);
      return scored.map((each, row) => ({ ...each, advantages: found && found[row] }));
    });
  }

  function meanShare(scored, term) {
    const varied = scored.filter((each) => !each.isZeroStd);
    return varied.length ? mean(varied.map(({ shares }) => shares[term])) : 0;
  }

  /* Of one group under two rewards. Kendall's tau-b, null where it is a zero-std group before or after. */
  function compareGroup(before, after) {
    const untied = dot(before.orders, before.orders) * dot(after.orders, after.orders);
    const changes = (after.advantages ?? []).map((value, image) => Math.abs(value - before.advantages[image]));
    return {
      before,
      after,
      /* None of the best images is among the best any more. */
      isWinnerChanged: !before.best.some((isBest, image) => isBest && after.best[image]),
      tau: untied === 0 ? null : dot(before.orders, after.orders) / Math.sqrt(untied),
      largestChange: Math.max(0, ...changes),
    };
  }

  /** What `score` gives for two rewards, side by side; see glm_grpo.studio.rescore.rescore. */
  function compare(before, after) {
    const perGroup = before.map((each, row) => compareGroup(each, after[row]));
    const taus = perGroup.map(({ tau }) => tau).filter((tau) => tau !== null);
    const names = Object.keys(before[0]?.parts ?? {});
    return {
      perGroup,
      steps: new Set(before.map(({ step }) => step)).size,
      images: sum(before.map(({ totals }) => totals.length)),
      changedWinners: perGroup.filter((each) => each.isWinnerChanged).length,
      rankCorrelation: taus.length ? mean(taus) : null,
      rankedGroups: taus.length,
      zeroStdBefore: before.filter((each) => each.isZeroStd).length,
      zeroStdAfter: after.filter((each) => each.isZeroStd).length,
      differingGroups: before.filter(({ parts, group }) => !areTotals(parts, group.total)).length,
      terms: names.map((name, term) => ({ name, shareBefore: meanShare(before, term), shareAfter: meanShare(after, term) })),
    };
  }

  window.glmGallery.scoring = { WeighingError, areTotals, best, compare, contributions, orderByRank, ranks, score };
})();
