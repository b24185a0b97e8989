/* Groups: the samples of every prompt of one training step, in order of reward. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { Problem, PromptText, Viewer, fmt, useKeys, useLoaded } = parts;
  const { Group, SampleFigures, arrange, sampleTitle } = gallery.groupSamples;
  const { MarkButtons } = gallery.marks;
  const { useMemo } = preactHooks;

  function Groups({ params }) {
    const steps = gallery.run.chunks.flatMap((chunk) => chunk.steps);
    if (gallery.run.is_sampled === false) {
      return html`<h2>Groups</h2>
        <p>
          This run learns from target pictures (train.method=sft), and samples images in evaluations
          alone: see <a href=${link("progress")}>Progress</a>.
        </p>`;
    }
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
      sources: arranged.group.sources,
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
    return html`<${MarkButtons} key=${group.images[sample]} image=${group.images[sample]} areKeysOn isInDialog />
      <p><${PromptText} text=${group.prompt} /></p>
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
