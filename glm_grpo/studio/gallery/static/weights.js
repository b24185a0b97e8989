/* The Weights view: other weights on everything the run sampled, ranked again at every move. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, scoring } = gallery;
  const { useEffect, useId, useMemo, useRef, useState } = preactHooks;
  const { Loading, Problem, Title, counted, fmt, percent, termColour, useLoaded } = gallery.parts;

  const PREFIX = "w.";
  /* Largest weights that a slider reaches, to choose from. */
  const REACHES = [1, 2, 5, 10, 100];
  const SLIDER_STEPS = 100;
  const ANNOUNCE_DELAY_MS = 600;
  const COMBINATIONS = {
    weighted_sum: "scores times weights",
    normalize_then_sum: "scores are standardised in each group first",
  };

  /** The run's reward with what the address sets to something else. */
  function readReward(params, own) {
    const terms = own.terms.map((term) => {
      const text = params[PREFIX + term.name];
      return text === undefined || term.is_for_evaluations ? term : { ...term, weight: Number(text) };
    });
    const combine = Object.hasOwn(COMBINATIONS, params.combine) ? params.combine : own.combine;
    return { ...own, combine, terms };
  }

  /** What differs from the run, as the address holds it; null takes a value out of it. */
  function changeParams(params, reward, own) {
    const changed = { ...params, page: null };
    changed.combine = reward.combine === own.combine ? null : reward.combine;
    reward.terms.forEach((term, index) => {
      const isOwn = term.weight === own.terms[index].weight;
      changed[PREFIX + term.name] = isOwn ? null : String(term.weight);
    });
    return changed;
  }

  /** A number as YAML and Hydra read it as one: 1e-7 would be a string without its point. */
  function writeNumber(value) {
    return String(value).replace(/^(-?\d+)e/, "$1.0e");
  }

  /* The terms that have a weight to set. */
  function settable(reward) {
    return reward.terms.filter((term) => !term.is_for_evaluations);
  }

  /* The terms that may only be watched: null where they are those of the run. */
  function watchOf(reward) {
    const watch = reward.watch.filter((name) => !(reward.terms.find((term) => term.name === name)?.weight));
    return watch.length === reward.watch.length ? null : watch;
  }

  /** The part of a config that these weights stand for. */
  function writeYaml(reward) {
    const terms = settable(reward).map(
      (term) => `    ${term.name}:\n      weight: ${writeNumber(term.weight)}\n`,
    );
    const watch = watchOf(reward);
    const watched = watch === null ? "" : `  watch: [${watch.join(", ")}]\n`;
    return `reward:\n  combine: ${reward.combine}\n${watched}  terms:\n${terms.join("")}`;
  }

  /** The command that trains with this reward, whatever the config says. */
  function writeTraining(reward) {
    const changes = settable(reward).map(
      ({ name, weight }) => `reward.terms.${name}.weight=${writeNumber(weight)}`,
    );
    const watch = watchOf(reward);
    if (watch !== null) changes.push(`reward.watch=[${watch.join(",")}]`);
    const start = "glm-grpo train --config-dir RUN run_dir=NEW";
    return [start, `reward.combine=${reward.combine}`, ...changes].join(" ");
  }

  /** The command that computes the same from the stored tables. */
  function writeCommand(reward, own) {
    const changes = reward.terms
      .filter((term, index) => term.weight !== own.terms[index].weight)
      .filter((term) => !term.is_for_evaluations)
      .map((term) => `reward.terms.${term.name}.weight=${writeNumber(term.weight)}`);
    if (reward.combine !== own.combine) changes.push(`reward.combine=${reward.combine}`);
    return ["glm-grpo rescore RUN", ...changes].join(" ");
  }

  /* {scored} as scoring.score gives it, or {error} where the weights give no total. */
  function score(steps, reward) {
    try {
      return { scored: scoring.score(steps, reward, gallery.run.advantage) };
    } catch (error) {
      if (!(error instanceof scoring.WeighingError)) throw error;
      return { error };
    }
  }

  const ABOUT = html`
    <p>Ranks all sampled images again with other weights: which images would have won, how much the order in each
      group changes, and how much each term counts. Nothing is sampled or trained.</p>
    <p>A term's share is its part in the differences between the images of a group. Shares add up to 100 %.</p>
    <p>Below each image stand its new rank, its advantage before and now, and its new total. Equal totals share a rank.
      The best images have a frame, except in zero-std groups.</p>`;

  function Weights({ params }) {
    const { data: steps, error, progress } = useLoaded(gallery.loadSteps, []);
    return html`<section class="weights" aria-label="Weights">
      <${Title} name="Weights" about=${ABOUT} />
      ${steps
        ? html`<${Weighing} steps=${steps} params=${params} />`
        : html`<${Loading} what="Training steps" error=${error} progress=${progress} />`}
    </section>`;
  }

  function Weighing({ steps, params }) {
    const own = gallery.run.reward;
    const key = JSON.stringify(params);
    const reward = useMemo(() => readReward(params, own), [key]);
    const before = useMemo(() => score(steps, own), [steps, own]);
    const after = useMemo(() => score(steps, reward), [steps, reward]);
    const unused = useMemo(() => findUnused(steps, own), [steps, own]);
    const error = before.error ?? after.error;
    const comparison = useMemo(() => (error ? null : scoring.compare(before.scored, after.scored)), [before, after]);
    const set = (changed) => gallery.replace("weights", changeParams(params, changed, own));
    const broken = steps.filter((step) => step.problem !== undefined);
    if (broken.length === steps.length) {
      const none =
        gallery.run.is_sampled === false
          ? "the run learns from target images (train.method=sft) and samples no images in training"
          : "the run has not stored a training step yet";
      const message = steps.length ? broken[0].problem : none;
      return html`<${Problem} where="Training steps" message=${message} />`;
    }
    return html`
      ${broken.map(({ step, problem }) => html`<${Problem} key=${step}
        where=${`Step ${step} is left out`} message=${problem} />`)}
      <div class="weights-board">
        <${Settings} own=${own} reward=${reward} set=${set} comparison=${comparison}
          params=${params} unused=${unused} />
        <div class="weights-results">
          ${error
            ? html`<div role="alert">
                <${Problem} where="No reward with these weights" message=${error.message} />
              </div>`
            : html`<${Results} comparison=${comparison} params=${params} />
                <${Snippets} own=${own} reward=${reward} />`}
        </div>
      </div>`;
  }

  /* Names of the terms that apply to no prompt of these steps. */
  function findUnused(steps, reward) {
    const groups = steps.flatMap((step) => step.groups ?? []);
    const isUnused = ({ name }) => groups.length > 0 && groups.every(({ raw }) => raw[name] == null);
    return settable(reward).filter(isUnused).map(({ name }) => name);
  }

  function Settings({ own, reward, set, comparison, params, unused }) {
    const sizes = [...own.terms, ...reward.terms].map((term) => term.weight);
    const largest = Math.max(...sizes.map((size) => Math.abs(size) || 0));
    const least = REACHES.find((reach) => reach >= largest) ?? Math.ceil(largest);
    const reach = Math.max(REACHES.includes(Number(params.reach)) ? Number(params.reach) : 0, least);
    const limits = { low: sizes.some((size) => size < 0) ? -reach : 0, high: reach };
    const isOwn =
      own.combine === reward.combine &&
      own.terms.every((term, index) => term.weight === reward.terms[index].weight);
    const hasOneTerm = settable(own).length - unused.length === 1;
    function setWeight(name, weight) {
      const terms = reward.terms.map((term) => (term.name === name ? { ...term, weight } : term));
      set({ ...reward, terms });
    }
    return html`<form class="weights-settings" onSubmit=${(event) => event.preventDefault()}>
      <fieldset>
        <legend>Combination</legend>
        ${Object.entries(COMBINATIONS).map(([combine, meaning]) => html`<label key=${combine} class="weights-choice">
          <input type="radio" name="combine" value=${combine} checked=${reward.combine === combine}
            onChange=${() => set({ ...reward, combine })} />
          <span><code>${combine}</code> <span class="soft">${meaning}</span></span>
        </label>`)}
      </fieldset>
      <fieldset class="weights-sliders">
        <legend>Weights and shares</legend>
        <label class="weights-reach">Sliders up to <select value=${String(reach)}
            onChange=${(event) => gallery.replace("weights", { ...params, reach: event.currentTarget.value })}>
          ${[...new Set([...REACHES.filter((each) => each >= least), reach])].map((each) => html`<option key=${each}
            value=${String(each)}>${each}</option>`)}
        </select></label>
        <ul class="weights-terms">
          ${reward.terms.map((term, index) => !unused.includes(term.name) && html`<${WeightRow} key=${term.name}
            term=${term} own=${own.terms[index]} limits=${limits} shares=${comparison && comparison.terms[index]}
            onChange=${(weight) => setWeight(term.name, weight)} />`)}
        </ul>
        ${hasOneTerm && html`<p class="soft">With one term, no weight above 0 changes the order of images.</p>`}
        ${unused.length > 0 && html`<p class="soft">Left out, because they apply to no sampled prompt: ${unused.join(", ")}.</p>`}
      </fieldset>
      <button type="button" disabled=${isOwn} onClick=${() => set(own)}>Reset to the run's own weights</button>
    </form>`;
  }

  function WeightRow({ term, own, limits, shares, onChange }) {
    const id = useId();
    const note = term.is_for_evaluations
      ? "scored only in evaluations"
      : term.weight === own.weight ? "as in the run" : `${own.weight} in the run`;
    return html`<li class="weights-term">
      <label for=${id}>
        <span class="swatch" style=${{ background: termColour(term.name) }}></span>${term.name}
      </label>
      <input type="range" id=${id} min=${limits.low} max=${limits.high} step=${limits.high / SLIDER_STEPS}
        disabled=${term.is_for_evaluations} value=${term.weight} aria-valuetext=${`${term.weight}, ${note}`}
        onInput=${(event) => onChange(Number(event.currentTarget.value))} />
      <${WeightField} name=${term.name} weight=${term.weight} onChange=${onChange}
        disabled=${term.is_for_evaluations} />
      <span class="weights-own soft">${note}</span>
      ${shares && html`<${ShareBars} shares=${shares} />`}
    </li>`;
  }

  /** A field that keeps what is being typed until it is a number. */
  function WeightField({ name, weight, onChange, disabled }) {
    const [draft, setDraft] = useState(null);
    function read(event) {
      const { value } = event.currentTarget;
      setDraft(value);
      if (value !== "" && Number.isFinite(Number(value))) onChange(Number(value));
    }
    return html`<input type="number" step="any" aria-label=${`Weight of ${name}, as a number`}
      disabled=${disabled} value=${draft ?? weight} onInput=${read} onBlur=${() => setDraft(null)} />`;
  }

  function ShareBars({ shares }) {
    const rows = [
      ["in the run", shares.shareBefore, "is-before"],
      ["now", shares.shareAfter, "is-after"],
    ];
    const styleOf = (share) => ({
      width: `${Math.min(Math.abs(share), 1) * 100}%`,
      background: termColour(shares.name),
    });
    return html`<dl class="weights-shares">
      ${rows.map(([label, share, kind]) => html`<div key=${kind} class=${kind}>
        <dt>${label}</dt>
        <dd>
          <span class="weights-track" aria-hidden="true">
            <span class=${share < 0 ? "is-negative" : ""} style=${styleOf(share)}></span>
          </span>
          <data value=${share}>${percent(share)}</data>
        </dd>
      </div>`)}
    </dl>`;
  }

  function Results({ comparison, params }) {
    return html`
      <${Summary} comparison=${comparison} />
      <${gallery.RankedGroups} comparison=${comparison} params=${params} />`;
  }

  function Summary({ comparison }) {
    const { perGroup, changedWinners, rankCorrelation, rankedGroups, zeroStdBefore, zeroStdAfter } = comparison;
    const groups = perGroup.length;
    const said = useSettled(
      `${changedWinners} of ${counted(groups, "group")} change their winner. ` +
        `Mean of Kendall's tau ${fmt(rankCorrelation)}. Zero-std groups ${zeroStdBefore} before, ${zeroStdAfter} after.`,
    );
    return html`<section class="weights-summary" aria-labelledby="weights-summary-title">
      <h3 id="weights-summary-title">What changes</h3>
      <p class="visually-hidden" role="status">${said}</p>
      ${comparison.differingGroups > 0 && html`<${Problem} where="Totals" message=${
        `in ${comparison.differingGroups} of ${counted(groups, "group")} the stored totals do not follow from the scores and the ` +
        "run's weights. The tables or config.yaml were changed; restore the originals."} />`}
      <dl class="weights-figures">
        <div data-figure="winners">
          <dt>groups whose winner changes</dt>
          <dd>
            <data value=${changedWinners}>${changedWinners}</data> of ${groups}
            <span class="soft"> (${percent(changedWinners / groups)})</span>
          </dd>
        </div>
        <div data-figure="tau">
          <dt>mean Kendall's tau: 1 if no order changes</dt>
          <dd>
            <data value=${rankCorrelation ?? ""}>${fmt(rankCorrelation)}</data>
            <span class="soft"> over ${counted(rankedGroups, "group")} that ${rankedGroups === 1 ? "is" : "are"} not zero-std</span>
          </dd>
        </div>
        <div data-figure="zero-std">
          <dt>zero-std groups: nothing to learn</dt>
          <dd>
            <data value=${zeroStdBefore}>${zeroStdBefore}</data> in the run,${" "}
            <data value=${zeroStdAfter}>${zeroStdAfter}</data> now
          </dd>
        </div>
        <div data-figure="images">
          <dt>compared</dt>
          <dd>
            <data value=${comparison.images}>${comparison.images.toLocaleString("en")}</data>
            ${` images of ${counted(comparison.steps, "step")}`}
          </dd>
        </div>
      </dl>
    </section>`;
  }

  /** A text once it has stopped changing, so that a slider does not talk all the way. */
  function useSettled(text) {
    const [settled, setSettled] = useState("");
    useEffect(() => {
      const timer = setTimeout(() => setSettled(text), ANNOUNCE_DELAY_MS);
      return () => clearTimeout(timer);
    }, [text]);
    return settled;
  }

  function Snippets({ own, reward }) {
    return html`<section aria-labelledby="weights-yaml-title">
      <h3 id="weights-yaml-title">Use these weights</h3>
      <${Snippet} name="YAML" text=${writeYaml(reward)} />
      <p>Compute these figures from the stored tables of the run in folder RUN:</p>
      <${Snippet} name="command" text=${writeCommand(reward, own)} />
      <p>Train a new run in folder NEW with these weights, and all other settings as in RUN:</p>
      <${Snippet} name="training line" text=${writeTraining(reward)} />
    </section>`;
  }

  function Snippet({ name, text }) {
    const shown = useRef(null);
    const [said, setSaid] = useState("");
    useEffect(() => setSaid(""), [text]);
    async function copy() {
      /* A page from disk may be refused the clipboard: then the text is selected instead. */
      const isCopied = navigator.clipboard
        ? await navigator.clipboard.writeText(text).then(() => true, () => false)
        : false;
      if (!isCopied) getSelection().selectAllChildren(shown.current);
      setSaid(isCopied ? "Copied." : "Selected. Press Ctrl+C or Command+C to copy.");
    }
    return html`<div class="weights-snippet">
      <pre tabindex="0" role="region" aria-label=${`The ${name}`}><code ref=${shown}>${text}</code></pre>
      <button type="button" onClick=${copy}>Copy ${name}</button>
      <span role="status">${said}</span>
    </div>`;
  }

  gallery.views.weights = Weights;
})();
