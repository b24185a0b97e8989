/* One prompt's group of samples, in order of reward, with what made up each reward. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { ImageButton, Notes, Problem, PromptText, Scores, clip, fmt, signed, useNear } = parts;
  const { AskedRead } = gallery.readings;
  const { CreditOver, Scale } = gallery.credit;
  const { listReferences } = gallery.progressTable;
  const { useEffect, useRef } = preactHooks;

  const OTHER_WEIGHTS =
    "the parts use the weights in config.yaml, but these totals were computed with other weights, so " +
    "the parts do not add up to them.";

  /**
   * A group with its samples from the best to the worst, their ranks (equal totals share one) and
   * the parts of their totals: {group, order, ranks, parts, extent, problem}.
   */
  function arrange(group) {
    const { total } = group;
    const ranks = gallery.scoring.ranks(total);
    const order = gallery.scoring.orderByRank(ranks);
    try {
      const weighed = gallery.scoring.contributions(group, gallery.run.reward);
      const problem = gallery.scoring.areTotals(weighed, total) ? null : OTHER_WEIGHTS;
      return { group, order, ranks, parts: weighed, extent: parts.stackExtent(weighed), problem };
    } catch (error) {
      if (!(error instanceof gallery.scoring.WeighingError)) throw error;
      const extent = { low: 0, high: 0 };
      return { group, order, ranks, parts: {}, extent, problem: error.message };
    }
  }

  /**
   * @param arranged As arrange gives it.
   * @param reach The largest |advantage| of the step.
   * @param isDiff Show differences to the target.
   * @param credit Of the group, to lay over its samples; undefined for none.
   * @param density "images", "captions" or "figures": what stands below them.
   * @param chosen Sample that the address names, "" for none; null where it names another prompt.
   */
  function Group({ arranged, step, reach, isDiff, credit, density, chosen }) {
    const { group, order, problem } = arranged;
    const [near, isNear] = useNear();
    const heading = useRef(null);
    const isChosen = chosen !== null;
    useEffect(() => {
      /* Not below the large view: who leaves it finds the page as it was. */
      if (!isChosen || gallery.route().params.large) return;
      heading.current.scrollIntoView({ block: "start" });
    }, [isChosen]);
    const references = listReferences(group);
    const masked = Object.keys(group.raw).filter((name) => group.raw[name] === null);
    const id = `group-${group.images[0]}`;
    return html`<section class="group panel" ref=${near} aria-labelledby=${id}>
      <h3 ref=${heading} id=${id} tabindex="-1">
        <span dir="auto">${clip(group.prompt_id)}</span>
        ${group.is_zero_std && html` <strong class="badge" title="All totals are equal">zero-std group: the policy learns nothing from it</strong>`}
      </h3>
      <p class="group-prompt"><${PromptText} text=${group.prompt} /> ${credit && html`<${Scale} credit=${credit} />`}</p>
      ${masked.length > 0 && html`<p class="soft">Terms that do not apply here: ${masked.join(", ")}</p>`}
      ${problem && html`<${Problem} where="Parts" message=${problem} />`}
      ${
        (isNear || isChosen) &&
        html`<div class="group-images" style=${{ "--count": order.length + references.length }}>
        ${references.map(({ name, title, image }) => html`<div class="sample" key=${name}>
          <h4>${title}</h4>
          <${ImageButton} image=${image} alt=${`${title} of ${clip(group.prompt_id)}`} attributes=${OPENS}
            onOpen=${() => openLarge(step, group, order[0], name)} />
        </div>`)}
        <ol role="list" aria-label="Samples in order of reward">
          ${order.map(
            (sample) =>
              html`<${Sample} key=${sample} arranged=${arranged} sample=${sample} step=${step}
                reach=${reach} isDiff=${isDiff} credit=${credit} density=${density}
                isChosen=${chosen === String(sample)} />`,
          )}
        </ol>
      </div>`
      }
    </section>`;
  }

  /* The large view of a sample, or with `first` of its target or source. */
  function openLarge(step, group, sample, first) {
    const place = { step, prompt: group.prompt_id, sample, first, large: 1 };
    gallery.replace("groups", { ...gallery.route().params, ...place });
  }

  const OPENS = { "aria-haspopup": "dialog" };

  /** What a sample is, in words. */
  function sampleTitle({ group, ranks }, sample) {
    const rank = `rank ${ranks[sample]} of ${group.images.length}`;
    return `${clip(group.prompt_id)}, sample ${sample}, ${rank}`;
  }

  /* Below every image stands the same, part by part in a row of the grid: figures are level. */
  function Sample({ arranged, sample, step, reach, isDiff, credit, density, isChosen }) {
    const { group, ranks } = arranged;
    const caption = `total ${fmt(group.total[sample])}, advantage ${signed(group.advantage[sample], 2)}`;
    return html`<li class="sample" aria-current=${isChosen ? "true" : undefined}>
      <h4>${group.total[sample] === null ? "Left out" : `Rank ${ranks[sample]}`} ${density !== "images" && html`<span class="soft">sample ${sample}</span>`}</h4>
      <${ImageButton} image=${group.images[sample]} target=${group.target} isDiff=${isDiff}
        over=${credit && html`<${CreditOver} credit=${credit} sample=${sample} />`}
        alt=${sampleTitle(arranged, sample)} onOpen=${() => openLarge(step, group, sample)}
        attributes=${{ ...OPENS, ...(density === "images" && { title: caption }) }} />
      ${
        density !== "images" &&
        html`<div><${AskedRead} group=${group} sample=${sample} isShort=${density === "captions"} /></div>`
      }
      ${density === "captions" && html`<p class="caption">${caption}</p>`}
      ${density === "figures" && html`<${SampleFigures} arranged=${arranged} sample=${sample} reach=${reach} />`}
    </li>`;
  }

  /** Advantage, scores and notes of one sample; `hasParts`: what each term adds to the total, too. */
  function SampleFigures({ arranged, sample, reach, hasParts }) {
    const { group, extent } = arranged;
    const penalty = group.penalty[sample];
    return html`<div>
        <${Advantage} value=${group.advantage[sample]} reach=${reach} />
        ${penalty !== 0 && html`<p class="line"><span>Penalty</span> ${fmt(penalty)}</p>`}
      </div>
      <div>
        <${Scores} parts=${pick(arranged.parts, sample)} raw=${pick(group.raw, sample)}
          total=${group.total[sample]} extent=${extent} hasParts=${hasParts} />
        <${Notes} group=${group} sample=${sample} />
      </div>`;
  }

  /* {name: [G numbers] | null} -> {name: number | null}; NaN for an image without a score. */
  function pick(columns, sample) {
    const entries = Object.entries(columns);
    return Object.fromEntries(entries.map(([name, values]) => [name, values && (values[sample] ?? NaN)]));
  }

  /* A number with a bar to its side of the middle; `reach` is the length of half the bar. */
  function Advantage({ value, reach }) {
    const share = reach ? (Math.abs(value) / reach) * 50 : 0;
    const style = { left: `${value < 0 ? 50 - share : 50}%`, width: `${share}%` };
    const side = value < 0 ? "is-below" : "is-above";
    return html`<p class="line">
        <span>Advantage</span>
        <strong class=${parts.changeClass(value)}>${signed(value)}</strong>
      </p>
      <div class="bar advantage" aria-hidden="true">
        <span class=${`piece ${side}`} style=${style}></span>
        <span class="zero" style=${{ left: "50%" }}></span>
      </div>`;
  }

  /** What the large view needs of a sample; see LargeView. */
  function largeItem(arranged, sample, step, reach) {
    const { group } = arranged;
    return {
      id: group.images[sample],
      image: group.images[sample],
      target: group.target,
      sources: group.sources,
      credit: group.credit && { key: group.credit, group: group.images[0], sample },
      alt: sampleTitle(arranged, sample),
      title: `Step ${step}: ${sampleTitle(arranged, sample)}`,
      earlier: () => findEarlier(group.prompt_id, sample, step),
      body: () => html`<p><${PromptText} text=${group.prompt} /></p>
        <${AskedRead} group=${group} sample=${sample} />
        <${SampleFigures} arranged=${arranged} sample=${sample} reach=${reach} hasParts />
        <p class="soft">Noise seed ${group.decode_seed}.</p>`,
    };
  }

  /* The same sample of a prompt at the training steps before one, for LargeView. */
  async function findEarlier(promptId, sample, step) {
    const entries = (await gallery.loadSteps()).filter((entry) => entry.step < step);
    return entries.flatMap((entry) => {
      const group = entry.groups?.find((each) => each.prompt_id === promptId);
      const image = group?.images[sample];
      return image ? [{ step: entry.step, image, title: `Step ${entry.step}, sample ${sample}` }] : [];
    });
  }

  gallery.groupSamples = { Group, arrange, largeItem };
})();
