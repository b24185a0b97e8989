/* One prompt's group of samples, in order of reward, with what made up each reward. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { Notes, Picture, Problem, PromptText, Scores, Texts, clip, fmt, signed, useNear } = parts;
  const { useEffect, useRef } = preactHooks;

  /* The parts come from the weights of config.yaml; a total further away than this was weighed
     with others. */
  const PART_TOLERANCE = 1e-4;
  const OTHER_WEIGHTS =
    "the parts follow the weights of config.yaml, but these totals were weighed with others, so " +
    "the parts do not add up to them.";

  /**
   * A group with its samples from the best to the worst, their ranks (equal totals share one) and
   * the parts of their totals: {group, order, ranks, parts, extent, problem}.
   */
  function arrange(group) {
    const { total } = group;
    const order = total.map((_, sample) => sample);
    order.sort((a, b) => total[b] - total[a] || a - b);
    const ranks = total.map((own) => 1 + total.filter((other) => other > own).length);
    try {
      const weighed = gallery.scoring.contributions(group, gallery.run.reward);
      const problem = addUp(weighed, total) ? null : OTHER_WEIGHTS;
      return { group, order, ranks, parts: weighed, extent: parts.stackExtent(weighed), problem };
    } catch (error) {
      if (!(error instanceof gallery.scoring.WeighingError)) throw error;
      const extent = { low: 0, high: 0 };
      return { group, order, ranks, parts: {}, extent, problem: error.message };
    }
  }

  /* Whether the parts of every sample give its total. */
  function addUp(weighed, total) {
    const columns = Object.values(weighed).filter(Boolean);
    const partsOf = (sample) => parts.sum(columns.map((column) => column[sample]));
    return total.every((own, sample) => Math.abs(partsOf(sample) - own) <= PART_TOLERANCE);
  }

  /**
   * @param arranged As arrange gives it.
   * @param reach The largest |advantage| of the step.
   * @param isDiff Show differences to the target.
   * @param chosen Sample that the address names, "" for none; null where it names another prompt.
   */
  function Group({ arranged, step, reach, isDiff, chosen }) {
    const { group, order, problem } = arranged;
    const [near, isNear] = useNear();
    const heading = useRef(null);
    const isChosen = chosen !== null;
    useEffect(() => {
      /* Not below the large view: who leaves it finds the page as it was. */
      if (!isChosen || gallery.route().params.large) return;
      heading.current.scrollIntoView({ block: "start" });
    }, [isChosen]);
    const masked = Object.keys(group.raw).filter((name) => group.raw[name] === null);
    const id = `group-${group.images[0]}`;
    return html`<section class="group panel" ref=${near} aria-labelledby=${id}>
      <h3 ref=${heading} id=${id} tabindex="-1">
        <span dir="auto">${clip(group.prompt_id)}</span>
        ${group.is_flat && html` <strong class="badge">flat group</strong>`}
      </h3>
      <p><${PromptText} text=${group.prompt} /></p>
      <${Texts} texts=${group.texts} />
      ${
        group.is_flat &&
        html`<p>
        Flat group: all its rewards are equal, so every advantage is 0 and nothing is learnt from
        it.
      </p>`
      }
      ${
        masked.length > 0 &&
        html`<p class="soft">Terms that do not apply to this prompt: ${masked.join(", ")}.</p>`
      }
      ${problem && html`<${Problem} where="Parts" message=${problem} />`}
      ${
        (isNear || isChosen) &&
        html`<div class="group-pictures">
        <${Target} group=${group} />
        <ol class="samples" aria-label="Samples in order of reward">
          ${order.map(
            (sample) =>
              html`<${Sample} key=${sample} arranged=${arranged} sample=${sample} step=${step}
                reach=${reach} isDiff=${isDiff} isChosen=${chosen === String(sample)} />`,
          )}
        </ol>
      </div>`
      }
    </section>`;
  }

  function Target({ group }) {
    return html`<div class="target">
      <h4>Target</h4>
      ${
        group.target
          ? html`<${Picture} image=${group.target} alt=${`Target of ${clip(group.prompt_id)}`} />`
          : html`<p class="soft">This prompt has no target picture.</p>`
      }
    </div>`;
  }

  /** What a sample is, in words. */
  function sampleTitle({ group, ranks }, sample) {
    const rank = `rank ${ranks[sample]} of ${group.images.length}`;
    return `${clip(group.prompt_id)}, sample ${sample}, ${rank}`;
  }

  function Sample({ arranged, sample, step, reach, isDiff, isChosen }) {
    const { group, ranks } = arranged;
    const open = () => {
      const place = { step, prompt: group.prompt_id, sample, large: 1 };
      gallery.replace("groups", { ...gallery.route().params, ...place });
    };
    return html`<li class="sample" aria-current=${isChosen ? "true" : undefined}>
      <h4>Rank ${ranks[sample]} <span class="soft">sample ${sample}</span></h4>
      <${Picture} image=${group.images[sample]} target=${group.target} isDiff=${isDiff}
        alt=${sampleTitle(arranged, sample)} onOpen=${open}
        attributes=${{ "aria-haspopup": "dialog" }} />
      <${SampleFigures} arranged=${arranged} sample=${sample} reach=${reach} />
    </li>`;
  }

  /** Advantage, scores and notes of one sample. */
  function SampleFigures({ arranged, sample, reach }) {
    const { group, extent } = arranged;
    const penalty = group.penalty[sample];
    return html`<div class="figures">
      <${Advantage} value=${group.advantage[sample]} reach=${reach} />
      ${penalty !== 0 && html`<p class="line"><span>Penalty</span> ${fmt(penalty)}</p>`}
      <${Scores} parts=${pick(arranged.parts, sample)} raw=${pick(group.raw, sample)}
        total=${group.total[sample]} extent=${extent} />
      <${Notes} notes=${group.notes} sample=${sample} />
    </div>`;
  }

  /* {name: [G numbers] | null} -> {name: number | null} */
  function pick(columns, sample) {
    const entries = Object.entries(columns);
    return Object.fromEntries(entries.map(([name, values]) => [name, values && values[sample]]));
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

  gallery.groupSamples = { Group, SampleFigures, arrange, sampleTitle };
})();
/* Groups: the samples of every prompt of one training step, in order of reward. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { Problem, PromptText, Texts, Viewer, fmt, useKeys, useLoaded } = parts;
  const { Group, SampleFigures, arrange, sampleTitle } = gallery.groupSamples;
  const { useMemo } = preactHooks;

  function Groups({ params }) {
    const steps = gallery.run.chunks.flatMap((chunk) => chunk.steps);
    if (!steps.length) {
      return html`<h2>Groups</h2>
        <p>
          No training step is recorded yet. After the first one this page shows its prompts, each
          with its group of samples in order of reward. Reload the page to see it.
        </p>`;
    }
    const step = params.step === undefined ? steps[steps.length - 1] : Number(params.step);
    return html`<h2>Groups</h2>
      <p class="lead">
        The samples of one training step, prompt by prompt, best reward first. The coloured bar adds
        up the weighted parts of the reward; the advantage says how much a sample is better than the
        others of its prompt.
      </p>
      <${StepChoice} steps=${steps} step=${step} params=${params} />
      ${
        steps.includes(step)
          ? html`<${Step} key=${step} step=${step} params=${params} />`
          : html`<${UnknownStep} steps=${steps} params=${params} />`
      }`;
  }

  function UnknownStep({ steps, params }) {
    const step = parts.nearest(Number(params.step), steps);
    const message = `this run has no training step "${params.step}".`;
    return html`<${Problem} where="Address" message=${message}>
      <p>The nearest is <a href=${link("groups", { ...params, step })}>step ${step}</a>.</p>
    </${Problem}>`;
  }

  function StepChoice({ steps, step, params }) {
    const index = steps.indexOf(step);
    /* Prompts of one step are not those of another: only the way of looking stays. */
    const show = (next) => {
      if (next !== undefined) gallery.go("groups", { diff: params.diff, step: next });
    };
    const before = steps[index - 1];
    const after = index < 0 ? undefined : steps[index + 1];
    const toggle = () =>
      gallery.replace("groups", { ...params, step, diff: params.diff ? null : 1 });
    useKeys({ ArrowLeft: () => show(before), ArrowRight: () => show(after), d: toggle });
    return html`<div class="toolbar">
      <label>Training step
        <select value=${index < 0 ? "" : String(step)}
          onChange=${(event) => show(event.currentTarget.value || undefined)}>
          ${index < 0 && html`<option value="">unknown</option>`}
          ${steps.map((each) => html`<option key=${each} value=${String(each)}>${each}</option>`)}
        </select>
      </label>
      <span class="buttons">
        <button type="button" disabled=${before === undefined} onClick=${() => show(before)}>
          Previous step
        </button>
        <button type="button" disabled=${after === undefined} onClick=${() => show(after)}>
          Next step
        </button>
      </span>
      <label>
        <input type="checkbox" checked=${Boolean(params.diff)} onChange=${toggle} />
        Difference to the target, brightened
      </label>
    </div>`;
  }

  function Step({ step, params }) {
    const { key } = gallery.run.chunks.find((chunk) => chunk.steps.includes(step));
    const { data, error } = useLoaded(() => gallery.load(key), [key]);
    const where = `Step ${step}`;
    if (error) return html`<${Problem} where=${where} message=${error.message} />`;
    if (!data) return html`<p role="status">Loading step ${step}</p>`;
    const found = data.steps.find((entry) => entry.step === step);
    if (!found) {
      const message = "has metrics, but no table of its samples is stored.";
      return html`<${Problem} where=${where} message=${message} />`;
    }
    if (found.problem) return html`<${Problem} where=${where} message=${found.problem} />`;
    return html`<${StepGroups} step=${step} groups=${found.groups} params=${params} />`;
  }

  function StepGroups({ step, groups, params }) {
    const advantages = groups.flatMap((group) => group.advantage);
    const reach = Math.max(...advantages.map(Math.abs));
    const shown = useMemo(() => groups.map(arrange), [groups]);
    const isChosen = (group) => group.prompt_id === params.prompt;
    const message = `step ${step} has no prompt "${params.prompt}".`;
    useKeys({ j: () => move(1), k: () => move(-1) });
    return html`<p role="status">${describe(step, groups)}</p>
      ${
        params.prompt !== undefined &&
        !groups.some(isChosen) &&
        html`<${Problem} where="Address" message=${message} />`
      }
      ${shown.map(
        (arranged) =>
          html`<${Group} key=${arranged.group.prompt_id} arranged=${arranged} step=${step}
            reach=${reach} isDiff=${Boolean(params.diff)}
            chosen=${isChosen(arranged.group) ? (params.sample ?? "") : null} />`,
      )}
      ${
        params.large &&
        html`<${GroupViewer} shown=${shown} step=${step} reach=${reach} params=${params} />`
      }`;
  }

  function describe(step, groups) {
    const totals = groups.flatMap((group) => group.total);
    const flat = groups.filter((group) => group.is_flat).length;
    return (
      `Step ${step}: ${groups.length} prompts, ${totals.length} samples, ` +
      `mean total ${fmt(parts.mean(totals))}, ${flat} flat ${flat === 1 ? "group" : "groups"}.`
    );
  }

  /* The focus to the heading of the next or previous prompt. */
  function move(by) {
    const headings = [...document.querySelectorAll(".group h3")];
    const at = headings.indexOf(document.activeElement.closest(".group")?.querySelector("h3"));
    const next = headings[at < 0 ? 0 : at + by];
    if (next) next.focus();
  }

  /* Pages through all samples of the step, in the order in which they stand. */
  function GroupViewer({ shown, step, reach, params }) {
    const places = shown.flatMap((arranged) =>
      arranged.order.map((sample) => ({ arranged, sample })),
    );
    const index = places.findIndex(
      ({ arranged, sample }) =>
        arranged.group.prompt_id === params.prompt && String(sample) === params.sample,
    );
    if (index < 0) return null;
    const items = places.map(({ arranged, sample }) => ({
      image: arranged.group.images[sample],
      target: arranged.group.target,
      alt: sampleTitle(arranged, sample),
      title: `Step ${step}: ${sampleTitle(arranged, sample)}`,
      body: () => html`<${ViewerBody} arranged=${arranged} sample=${sample} reach=${reach} />`,
    }));
    const set = (change) => gallery.replace("groups", { ...params, step, ...change });
    const show = (next) => {
      const { arranged, sample } = places[next];
      set({ prompt: arranged.group.prompt_id, sample });
    };
    return html`<${Viewer} items=${items} index=${index} onIndex=${show}
      onClose=${() => set({ large: null })} />`;
  }

  function ViewerBody({ arranged, sample, reach }) {
    const { group } = arranged;
    return html`<p><${PromptText} text=${group.prompt} /></p>
      <${Texts} texts=${group.texts} />
      <${SampleFigures} arranged=${arranged} sample=${sample} reach=${reach} />
      <p class="soft">
        Noise seed ${group.decode_seed}. <a href=${parts.fullUrl(group.images[sample])}>
          Open the stored picture</a>
      </p>`;
  }

  Groups.keyHelp = [
    ["\u2190 \u2192", "Previous and next training step; in the large view, picture"],
    ["j k", "Next and previous prompt"],
    ["d", "Difference to the target"],
  ];
  gallery.views.groups = Groups;
})();
