/* Groups: the samples of every prompt of one training step, in order of reward. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { LargeView, Problem, SizeControls, Title, fmt, movesIn, useKeys, useLoaded, useSizes } = parts;
  const { Group, arrange, largeItem } = gallery.groupSamples;
  const { CreditButton, Legend, useCredit, useCreditOf } = gallery.credit;
  const { useMemo, useRef } = preactHooks;

  /* Widths of images in CSS pixels: eight samples of a group stand in one row of a window of 1,440
     pixels, with the target beside them. */
  const USUAL_SIZE = 132;
  /* More samples than this in a group are shown smaller, and without figures. */
  const MANY_SAMPLES = 16;
  const MANY_SIZE = 96;

  const ABOUT = html`
    <p>The samples of one training step, prompt by prompt, best total first. Equal totals share a rank.</p>
    <dl>
      <dt>Advantage</dt><dd>How much better a sample is than the others of its prompt. Training makes samples with a
        positive advantage more likely, and the others less.</dd>
      <dt>Coloured bar</dt><dd>The total, split into what each term adds to it. Enlarge an image for the numbers.</dd>
      <dt>Zero-std group</dt><dd>All totals are equal, so every advantage is 0 and the policy learns nothing from it.</dd>
    </dl>`;

  function Groups({ params }) {
    const steps = gallery.run.chunks.flatMap((chunk) => chunk.steps);
    if (gallery.run.is_sampled === false) {
      return html`<${Title} name="Groups" />
        <p>
          This run learns from target images (train.method=sft). It samples images only in evaluations: see
          ${" "}<a href=${link("progress")}>Progress</a>.
        </p>`;
    }
    if (!steps.length) {
      return html`<${Title} name="Groups" about=${ABOUT} />
        <p>No training step is stored yet. After the first one this page shows its samples. It updates by itself.</p>`;
    }
    const step = params.step === undefined ? steps[steps.length - 1] : Number(params.step);
    return html`<${StepOfRun} steps=${steps} step=${step} params=${params} />`;
  }

  function StepOfRun({ steps, step, params }) {
    const isMany = gallery.run.group_size > MANY_SAMPLES;
    const usual = isMany
      ? { size: MANY_SIZE, density: "images" }
      : { size: USUAL_SIZE, density: "figures" };
    const sizes = useSizes("groups", usual);
    return html`<${Title} name="Groups" about=${ABOUT}>
        <${StepChoice} steps=${steps} step=${step} sizes=${sizes} params=${params} />
      </${Title}>
      ${
        steps.includes(step)
          ? html`<div class=${`groups is-${sizes.density}`} style=${sizes.style}>
              <${Step} key=${step} step=${step} density=${sizes.density} params=${params} />
            </div>`
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

  function StepChoice({ steps, step, sizes, params }) {
    const index = steps.indexOf(step);
    /* Prompts of one step are not those of another: only the way of looking stays. */
    const show = (next) => {
      if (next !== undefined) gallery.go("groups", { diff: params.diff, credit: params.credit, step: next });
    };
    const before = steps[index - 1];
    const after = index < 0 ? undefined : steps[index + 1];
    const hasTargets = useTargets(step);
    const toggle = () =>
      gallery.replace("groups", { ...params, step, diff: params.diff ? null : 1 });
    useKeys({
      ArrowLeft: () => show(before),
      ArrowRight: () => show(after),
      ...(hasTargets && { d: toggle }),
    });
    return html`<label>Training step
        <select value=${index < 0 ? "" : String(step)}
          onChange=${(event) => show(event.currentTarget.value || undefined)}>
          ${index < 0 && html`<option value="">unknown</option>`}
          ${steps.map((each) => html`<option key=${each} value=${String(each)}>${each}</option>`)}
        </select>
      </label>
      <span class="buttons">
        <button type="button" disabled=${before === undefined} aria-label="Previous step"
          onClick=${() => show(before)}>\u2190</button>
        <button type="button" disabled=${after === undefined} aria-label="Next step"
          onClick=${() => show(after)}>\u2192</button>
      </span>
      ${
        hasTargets &&
        html`<label>
          <input type="checkbox" checked=${Boolean(params.diff)} onChange=${toggle} />
          Difference from target
        </label>`
      }
      <${SizeControls} sizes=${sizes} shown=${USUAL_SIZE} />`;
  }

  /* Hook: whether a group of a step has a target; while the step loads, as at the one before. */
  function useTargets(step) {
    const key = gallery.run.chunks.find((chunk) => chunk.steps.includes(step))?.key;
    const { data } = useLoaded(() => (key ? gallery.load(key) : Promise.resolve(null)), [key]);
    const known = useRef(false);
    if (data) {
      const groups = data.steps.find((entry) => entry.step === step)?.groups ?? [];
      known.current = groups.some((group) => group.target);
    }
    return known.current;
  }

  function Step({ step, density, params }) {
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
    return html`<${StepGroups} step=${step} groups=${found.groups} density=${density}
      params=${params} />`;
  }

  function StepGroups({ step, groups, density, params }) {
    const advantages = groups.flatMap((group) => group.advantage);
    const reach = Math.max(...advantages.map(Math.abs));
    const shown = useMemo(() => groups.map(arrange), [groups]);
    const isChosen = (group) => group.prompt_id === params.prompt;
    const message = `step ${step} has no prompt "${params.prompt}".`;
    const key = groups.find((group) => group.credit)?.credit;
    const [isCredit, toggleCredit] = useCredit();
    const credit = useCreditOf(key, isCredit);
    useKeys({ j: () => move(1), k: () => move(-1), ...(key && { c: toggleCredit }) });
    return html`<p role="status">${describe(step, groups)}</p>
      ${
        key &&
        html`<div class="credit-bar">
          <${CreditButton} isOn=${isCredit} toggle=${toggleCredit} />
          ${isCredit && html`<${Legend} />`}
        </div>`
      }
      ${credit.error && html`<${Problem} where="Credit" message=${credit.error.message} />`}
      ${
        params.prompt !== undefined &&
        !groups.some(isChosen) &&
        html`<${Problem} where="Address" message=${message} />`
      }
      ${shown.map(
        (arranged) =>
          html`<${Group} key=${arranged.group.prompt_id} arranged=${arranged} step=${step}
            reach=${reach} isDiff=${Boolean(params.diff)} density=${density}
            credit=${credit.data?.[arranged.group.images[0]]}
            chosen=${isChosen(arranged.group) ? (params.sample ?? "") : null} />`,
      )}
      ${
        params.large &&
        html`<${GroupViewer} shown=${shown} step=${step} reach=${reach} params=${params} />`
      }`;
  }

  function describe(step, groups) {
    const totals = groups.flatMap((group) => group.total);
    const zeroStd = groups.filter((group) => group.is_zero_std).length;
    return (
      `Step ${step}: ${parts.counted(groups.length, "prompt")}, ${totals.length} samples, ` +
      `mean total ${fmt(parts.mean(totals))}, ${parts.counted(zeroStd, "zero-std group")}.`
    );
  }

  /* The focus to the heading of the next or previous prompt. */
  function move(by) {
    const headings = [...document.querySelectorAll(".group h3")];
    const at = headings.indexOf(document.activeElement.closest(".group")?.querySelector("h3"));
    const next = headings[at < 0 ? 0 : at + by];
    if (next) next.focus();
  }

  /* Prompts below one another, samples side by side, in the order in which they stand. */
  function GroupViewer({ shown, step, reach, params }) {
    const row = shown.findIndex(({ group }) => group.prompt_id === params.prompt);
    const column = row < 0 ? -1 : shown[row].order.findIndex((each) => String(each) === params.sample);
    if (column < 0) return null;
    const set = (change) => gallery.replace("groups", { ...params, step, ...change });
    const show = ([nextRow, nextColumn]) => {
      const { group, order } = shown[nextRow];
      set({ prompt: group.prompt_id, sample: order[nextColumn], first: null });
    };
    const arranged = shown[row];
    const neighbours = [arranged.order[column - 1], arranged.order[column + 1]];
    return html`<${LargeView} item=${largeItem(arranged, arranged.order[column], step, reach)}
      moves=${movesIn(
        shown.map(({ order }) => order.length),
        [row, column],
        show,
      )}
      near=${neighbours.filter((sample) => sample !== undefined).map((sample) => arranged.group.images[sample])}
      first=${params.first} onClose=${() => set({ large: null, first: null })} />`;
  }

  Groups.keyHelp = [
    ["\u2190 \u2192", "Previous and next training step"],
    ["j k", "Next and previous prompt"],
    ["d", "Difference from the target"],
    ["c", "Credit by place, if the run trains with it"],
  ];
  gallery.views.groups = Groups;
})();
