/* The groups of the Weights view: their samples in the order that the weights on trial give. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html } = gallery;
  const { useEffect, useMemo, useRef, useState } = preactHooks;
  const { FoundLarge, ImageButton, PromptText, clip, fmt, isKnown, signed } = gallery.parts;

  const { AskedRead, Read } = gallery.readings;

  const PAGE_SIZE = 10;
  /* Between two lists while a slider moves: figures and slider follow every move, a hundred images
     would hold them up. */
  const LIST_INTERVAL_MS = 80;
  const SORTINGS = {
    winner: "new winner, then widest totals",
    advantage: "largest change of advantage",
    order: "change of order (Kendall's tau)",
    step: "step",
  };

  /** How much a group changes by each sorting; more comes first. */
  const CHANGES = {
    winner: (group) => Number(!isTrivial(group)) + Number(group.isWinnerChanged),
    advantage: (group) => group.largestChange,
    order: (group) => -(group.tau ?? 1),
    step: ({ after }) => -after.step,
  };

  /** How far the totals of a group lie apart, where nothing changes. */
  function spreadOf({ after }) {
    const totals = after.totals.filter(isKnown);
    return Math.max(...totals) - Math.min(...totals);
  }

  /** Without a standard deviation under both rewards: eight equal images, from which nothing is learned. */
  const isAlwaysZeroStd = ({ before, after }) => before.isZeroStd && after.isZeroStd;

  /** The value of at most an interval ago; values between are skipped. */
  function useThrottled(value, interval) {
    const [shown, setShown] = useState(value);
    const latest = useRef(value);
    const timer = useRef(null);
    latest.current = value;
    useEffect(() => {
      if (timer.current !== null || value === shown) return;
      timer.current = setTimeout(() => {
        timer.current = null;
        setShown(latest.current);
      }, interval);
    }, [value, shown]);
    useEffect(() => () => clearTimeout(timer.current), []);
    return shown;
  }

  /** All groups by pages. `comparison` as scoring.compare gives it; `params` of the address. */
  function RankedGroups({ comparison: latest, params }) {
    const comparison = useThrottled(latest, LIST_INTERVAL_MS);
    /* They are not known where the run's config could not be read. */
    const areAdvantagesKnown = gallery.run.advantage !== null;
    const sorting = Object.hasOwn(SORTINGS, params.sort) ? params.sort : "winner";
    const listed = useMemo(() => {
      const listed = comparison.perGroup.filter(
        (group) => !isAlwaysZeroStd(group) && (!params.changed || group.isWinnerChanged),
      );
      const change = CHANGES[sorting];
      const then = CHANGES[areAdvantagesKnown ? "advantage" : "order"];
      return listed.sort(
        (one, other) =>
          change(other) - change(one) || then(other) - then(one) || spreadOf(other) - spreadOf(one),
      );
    }, [comparison, sorting, params.changed]);
    const zeroStd = useMemo(() => comparison.perGroup.filter(isAlwaysZeroStd), [comparison]);
    const [isZeroStdOpen, setIsZeroStdOpen] = useState(false);
    const open = (at) => enlarge({ at, large: 1 });
    const pages = Math.max(1, Math.ceil(listed.length / PAGE_SIZE));
    const page = Math.min(Math.max(Number.parseInt(params.page, 10) || 1, 1), pages);
    const shown = listed.slice((page - 1) * PAGE_SIZE, page * PAGE_SIZE);
    const set = (change) => gallery.replace("weights", { ...params, page: null, ...change });
    const enlarge = (change) =>
      gallery.replace("weights", { ...gallery.route().params, ...change });
    const title = useRef(null);
    function turn(to) {
      set({ page: to === 1 ? null : to });
      title.current.scrollIntoView();
      title.current.focus({ preventScroll: true });
    }
    return html`<section aria-labelledby="weights-groups-title">
      <h3 id="weights-groups-title" tabindex="-1" ref=${title}>Groups in their new order</h3>
      <div class="weights-listing">
        <label>Sort by <select value=${sorting}
            onChange=${(event) => set({ sort: event.currentTarget.value })}>
          ${Object.entries(SORTINGS).map(([name, label]) => html`<option key=${name} value=${name}>${label}</option>`)}
        </select></label>
        <label><input type="checkbox" checked=${Boolean(params.changed)}
          onChange=${(event) => set({ changed: event.currentTarget.checked ? 1 : null })} /> only groups whose winner changes</label>
      </div>
      ${listed.length === 0 && html`<p>${params.changed ? "The winner changes in no group." : "All groups are zero-std groups."}</p>`}
      <ol class="weights-groups">
        ${shown.map((compared) => html`<${Group} key=${`${compared.after.step} ${compared.after.group.prompt_id}`}
          compared=${compared} onOpen=${open} />`)}
      </ol>
      <${Pager} page=${page} pages=${pages} turn=${turn} />
      ${zeroStd.length > 0 && !params.changed && html`<details onToggle=${(event) => setIsZeroStdOpen(event.currentTarget.open)}>
        <summary>${gallery.parts.counted(zeroStd.length, "zero-std group")}: equal totals with both weights, nothing to learn</summary>
        ${isZeroStdOpen && html`<ol class="weights-groups">
          ${zeroStd.map((compared) => html`<${Group} key=${`${compared.after.step} ${compared.after.group.prompt_id}`}
            compared=${compared} onOpen=${open} />`)}
        </ol>`}
      </details>`}
      ${params.large && html`<${FoundLarge} rows=${[...shown, ...(isZeroStdOpen ? zeroStd : [])].map(samplesOf)} at=${params.at}
        onShow=${(at) => enlarge({ at })} onClose=${() => enlarge({ at: null, large: null })} />`}
    </section>`;
  }

  function Pager({ page, pages, turn }) {
    if (pages === 1) return null;
    return html`<nav class="weights-pager" aria-label="Pages of groups">
      <button type="button" disabled=${page === 1} onClick=${() => turn(page - 1)}>Previous</button>
      <span>Page ${page} of ${pages}</span>
      <button type="button" disabled=${page === pages} onClick=${() => turn(page + 1)}>Next</button>
    </nav>`;
  }

  const isTrivial = ({ tau }) => tau === null || tau === 1;

  /** The samples of the first rank, in words. */
  function nameBest(ranks) {
    const best = [...ranks.keys()].filter((sample) => ranks[sample] === 1);
    return `${best.length === 1 ? "sample" : "samples"} ${best.join(", ")}`;
  }

  /* The samples of a group in their new order, for the large view. */
  function samplesOf({ after }) {
    const order = gallery.scoring.orderByRank(gallery.scoring.ranks(after.totals));
    return order.map((sample) => ({ kind: "training", step: after.step, group: after.group, sample }));
  }

  function Group({ compared, onOpen }) {
    const { before, after, isWinnerChanged, tau } = compared;
    const { step, group } = after;
    const ranks = {
      before: gallery.scoring.ranks(before.totals),
      after: gallery.scoring.ranks(after.totals),
    };
    const href = gallery.link("groups", { step, prompt: group.prompt_id });
    return html`<li class="weights-group ${isWinnerChanged ? "is-changed" : ""}">
      <h4><a href=${href}>Step ${step}, prompt <span dir="auto">${clip(group.prompt_id)}</span></a></h4>
      <p class="weights-facts">
        ${isWinnerChanged && html`<strong>
          winner changes: ${nameBest(ranks.before)} to ${nameBest(ranks.after)}
        </strong>`}
        ${after.isZeroStd && html`<span>zero-std</span>`}
        <span class="soft" title="Kendall's tau: 1 if the order stays">tau ${tau === null ? "none (zero-std)" : fmt(tau)}</span>
      </p>
      <p><${PromptText} text=${group.prompt} /></p>
      ${isWinnerChanged && html`<div class="weights-pair">
        <${Best} caption="was best" compared=${compared} ranks=${ranks.before} onOpen=${onOpen} />
        <${Best} caption="is best" compared=${compared} ranks=${ranks.after} onOpen=${onOpen} />
      </div>`}
      <ol class="weights-samples">
        ${gallery.scoring.orderByRank(ranks.after).map((sample) => html`<${Sample} key=${sample}
          compared=${compared} sample=${sample} onOpen=${onOpen} rank=${ranks.after[sample]} rankBefore=${ranks.before[sample]} />`)}
      </ol>
    </li>`;
  }

  /* The first of those that share the first rank. */
  function Best({ caption, compared, ranks, onOpen }) {
    const { group } = compared.after;
    const sample = ranks.indexOf(1);
    return html`<figure>
      <${ImageButton} image=${group.images[sample]} alt=${`${caption}: sample ${sample} of prompt ${clip(group.prompt_id)}`}
        onOpen=${() => onOpen(group.images[sample])} attributes=${{ "aria-haspopup": "dialog" }} />
      <figcaption><strong>${caption}</strong> <span class="soft">sample ${sample}</span>
        <${AskedRead} group=${group} sample=${sample} isShort /></figcaption>
    </figure>`;
  }

  function Sample({ compared, sample, rank, rankBefore, onOpen }) {
    const { before, after } = compared;
    const { step, group } = after;
    const alt = `step ${step}, prompt ${clip(group.prompt_id)}, sample ${sample}`;
    const moved = rank === rankBefore ? "" : ` (was ${rankBefore})`;
    const isBest = rank === 1 && !after.isZeroStd;
    const [was, is] = [before, after].map(({ advantages }) => advantages && signed(advantages[sample], 2));
    return html`<li class=${isBest ? "is-best" : ""}>
      <${ImageButton} image=${group.images[sample]} alt=${alt} onOpen=${() => onOpen(group.images[sample])}
        attributes=${{ "aria-haspopup": "dialog" }} />
      <${Read} group=${group} sample=${sample} />
      <span class="weights-rank">rank ${rank}${moved}</span>
      ${is !== null && html`<span>advantage ${was === is ? is : `${was} to ${is}`}</span>`}
      <span class="soft">total ${fmt(after.totals[sample])}</span>
    </li>`;
  }

  gallery.RankedGroups = RankedGroups;
})();
