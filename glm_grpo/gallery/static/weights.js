/* The Weights view: other weights on everything the run sampled, ranked again at every move. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, scoring } = gallery;
  const { useEffect, useId, useMemo, useRef, useState } = preactHooks;
  const { Problem, fmt, percent, termColour, useLoaded } = gallery.parts;

  const PREFIX = "w.";
  const ANNOUNCE_DELAY_MS = 600;
  const COMBINATIONS = {
    weighted_sum: "scores times weights",
    normalize_then_sum: "scores standardised inside each group first",
    shares: "weights move from step to step, so that each term keeps the share asked for",
  };

  /** The run's reward with what the address sets to something else. */
  function readReward(params, own) {
    const terms = own.terms.map((term) => {
      const text = params[PREFIX + term.name];
      return text === undefined ? term : { ...term, weight: Number(text) };
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

  /** What a term's number is called in a config. */
  function keyOf(reward) {
    return reward.combine === "shares" ? "share" : "weight";
  }

  /** The part of a config that these weights stand for. */
  function writeYaml(reward) {
    const terms = reward.terms.map((term) => {
      const bound = term.at_least == null ? "" : `      at_least: ${writeNumber(term.at_least)}\n`;
      return `    ${term.name}:\n      ${keyOf(reward)}: ${writeNumber(term.weight)}\n${bound}`;
    });
    return `reward:\n  combine: ${reward.combine}\n  terms:\n${terms.join("")}`;
  }

  /** The command that computes the same from the stored tables. */
  function writeCommand(reward, own) {
    /* What is a share there is no weight here. */
    const areAllOthers = keyOf(reward) !== keyOf(own);
    const changes = reward.terms
      .filter((term, index) => areAllOthers || term.weight !== own.terms[index].weight)
      .map((term) => `reward.terms.${term.name}.${keyOf(reward)}=${writeNumber(term.weight)}`);
    if (reward.combine !== own.combine) changes.push(`reward.combine=${reward.combine}`);
    return ["glm-grpo rescore RUN", ...changes].join(" ");
  }

  function compare(steps, own, reward) {
    try {
      return { comparison: scoring.compare(steps, own, reward, gallery.run.advantage), error: null };
    } catch (error) {
      if (!(error instanceof scoring.WeighingError)) throw error;
      return { comparison: null, error };
    }
  }

  function Weights({ params }) {
    const { data: steps, error, progress } = useLoaded(gallery.loadSteps, []);
    if (error) return html`<${Problem} where="Training steps" message=${error.message} />`;
    return html`<section class="weights" aria-labelledby="weights-title">
      <h2 id="weights-title">Weights</h2>
      <p class="weights-lead">
        What other weights would have made of the pictures that this run sampled: which win, which
        teach, and what each term counts for.
      </p>
      ${steps
        ? html`<${Weighing} steps=${steps} params=${params} />`
        : html`<p role="status">
            Loading steps${progress ? ` (${progress.done} of ${progress.total} files)` : ""}
          </p>`}
    </section>`;
  }

  function Weighing({ steps, params }) {
    const own = gallery.run.reward;
    const key = JSON.stringify(params);
    const reward = useMemo(() => readReward(params, own), [key]);
    const { comparison, error } = useMemo(() => compare(steps, own, reward), [steps, reward]);
    const set = (changed) => gallery.replace("weights", changeParams(params, changed, own));
    const broken = steps.filter((step) => step.problem !== undefined);
    if (broken.length === steps.length) {
      const none =
        gallery.run.is_sampled === false
          ? "the run learns from target pictures (train.method=sft) and samples none"
          : "the run has not stored a training step yet; reload when it has";
      const message = steps.length ? broken[0].problem : none;
      return html`<${Problem} where="Training steps" message=${message} />`;
    }
    return html`
      ${broken.map(({ step, problem }) => html`<${Problem} key=${step}
        where=${`Step ${step} is left out`} message=${problem} />`)}
      <${Settings} own=${own} reward=${reward} set=${set} comparison=${comparison} />
      ${error
        ? html`<div role="alert">
            <${Problem} where="These weights give no reward" message=${error.message} />
          </div>`
        : html`<${Results} comparison=${comparison} params=${params} />
            <${Snippets} own=${own} reward=${reward} />`}`;
  }

  function Settings({ own, reward, set, comparison }) {
    const sizes = own.terms.map((term) => term.weight);
    const limits = { low: Math.min(0, ...sizes), high: Math.max(1, ...sizes) };
    const isOwn =
      own.combine === reward.combine &&
      own.terms.every((term, index) => term.weight === reward.terms[index].weight);
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
      <fieldset>
        <legend>Weights and shares</legend>
        <p class="soft">
          A share is a term's part of what tells the images of a group apart; shares add up to 100 %.
          ${reward.combine === "shares" &&
          html` Here the number of a term is the share asked for, beside those of the others.`}
        </p>
        <ul class="weights-terms">
          ${reward.terms.map((term, index) => html`<${TermRow} key=${term.name} term=${term}
            own=${own.terms[index]} limits=${limits} shares=${comparison && comparison.terms[index]}
            onChange=${(weight) => setWeight(term.name, weight)} />`)}
        </ul>
      </fieldset>
      <button type="button" disabled=${isOwn} onClick=${() => set(own)}>Reset to the run's own weights</button>
    </form>`;
  }

  function TermRow({ term, own, limits, shares, onChange }) {
    const id = useId();
    const note = term.weight === own.weight ? "as in the run" : `${own.weight} in the run`;
    return html`<li class="weights-term">
      <label for=${id}>
        <span class="swatch" style=${{ background: termColour(term.name) }}></span>${term.name}
      </label>
      <input type="range" id=${id} min=${limits.low} max=${limits.high} step="0.01"
        value=${term.weight} aria-valuetext=${`${term.weight}, ${note}`}
        onInput=${(event) => onChange(Number(event.currentTarget.value))} />
      <${WeightField} name=${term.name} weight=${term.weight} onChange=${onChange} />
      <span class="weights-own soft">${note}</span>
      ${shares && html`<${ShareBars} shares=${shares} />`}
    </li>`;
  }

  /** A field that keeps what is being typed until it is a number. */
  function WeightField({ name, weight, onChange }) {
    const [draft, setDraft] = useState(null);
    function read(event) {
      const { value } = event.currentTarget;
      setDraft(value);
      if (value !== "" && Number.isFinite(Number(value))) onChange(Number(value));
    }
    return html`<input type="number" step="any" aria-label=${`Weight of ${name}, as a number`}
      value=${draft ?? weight} onInput=${read} onBlur=${() => setDraft(null)} />`;
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
    const { groups, changedWinners, rankCorrelation, rankedGroups, flatBefore, flatAfter } = comparison;
    const said = useSettled(
      `${changedWinners} of ${groups} groups change their winner. ` +
        `Mean of Kendall's tau ${fmt(rankCorrelation)}. Flat groups ${flatBefore} before, ${flatAfter} after.`,
    );
    return html`<section class="weights-summary" aria-labelledby="weights-summary-title">
      <h3 id="weights-summary-title">What changes</h3>
      <p class="visually-hidden" role="status">${said}</p>
      ${comparison.differingGroups > 0 && html`<${Problem} where="Totals" message=${
        `in ${comparison.differingGroups} of ${groups} groups the stored totals do not follow from the raw scores and ` +
        "the run's weights: tables or config.yaml were changed. Restore what the run wrote."} />`}
      <dl class="weights-figures">
        <div data-figure="winners">
          <dt>groups whose winner changes</dt>
          <dd>
            <data value=${changedWinners}>${changedWinners}</data> of ${groups}
            <span class="soft"> (${percent(changedWinners / groups)})</span>
          </dd>
        </div>
        <div data-figure="tau">
          <dt>Kendall's tau inside groups, mean</dt>
          <dd>
            <data value=${rankCorrelation ?? ""}>${fmt(rankCorrelation)}</data>
            <span class="soft"> over ${rankedGroups} groups that are not flat</span>
          </dd>
        </div>
        <div data-figure="flat">
          <dt>flat groups, which teach nothing</dt>
          <dd>
            <data value=${flatBefore}>${flatBefore}</data> in the run,${" "}
            <data value=${flatAfter}>${flatAfter}</data> now
          </dd>
        </div>
        <div data-figure="images">
          <dt>compared</dt>
          <dd>
            <data value=${comparison.images}>${comparison.images.toLocaleString("en")}</data>
            ${` images of ${comparison.steps} steps`}
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
      <h3 id="weights-yaml-title">To train with these weights</h3>
      <${Snippet} name="YAML" text=${writeYaml(reward)} />
      <p>The same figures from the stored tables, where RUN is the run's folder:</p>
      <${Snippet} name="command" text=${writeCommand(reward, own)} />
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
      setSaid(isCopied ? "Copied." : "Selected; press Ctrl+C or Command+C to copy.");
    }
    return html`<div class="weights-snippet">
      <pre tabindex="0" role="region" aria-label=${`The ${name}`}><code ref=${shown}>${text}</code></pre>
      <button type="button" onClick=${copy}>Copy ${name}</button>
      <span role="status">${said}</span>
    </div>`;
  }

  gallery.views.weights = Weights;
})();
