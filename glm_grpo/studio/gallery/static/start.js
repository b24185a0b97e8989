/* Start: what a run gained, its most changed, best and worst images, and its canaries. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { ImageButton, Problem, Title, changeClass, clip, fmt, mean, signed, useLoaded } = parts;
  const { AskedRead, Read } = gallery.readings;
  const { judgeCanary, listCanaries } = gallery.imageTable;
  const { changeOf } = gallery.progressTable;
  const { Chart } = gallery.curveChart;
  const { EVALUATION_STYLE, lineStyle } = gallery.curveLayout;
  const { useScheme } = gallery.curvePlot;
  const { useMemo } = preactHooks;

  /* Images in each row. */
  const SHOWN = 4;
  const TOTAL = "total";
  const TOO_FEW = "too few prompts for an interval";
  const ABOUT = html`
    <p>What the run gained on held-out prompts, and the images behind the figures. Each row of images shows one
      sample a prompt, chosen by its total alone. Find lists all images.</p>
    <p>The 95 % interval is a paired bootstrap over prompts. <a href="report.html">Before and after</a> explains what
      each term measures.</p>`;

  function Start() {
    const { chunks, evaluations, overview } = gallery.run;
    if (!evaluations.length && !chunks.length) {
      return html`<${Title} name="Start" />
        <p>
          No data yet. After the first evaluation this page shows the gain on held-out prompts, the reward, images
          and canaries. It updates by itself.
        </p>`;
    }
    return html`<${Title} name="Start" about=${ABOUT} />
      <div class="start-cards">
        <${Gain} />
        ${overview && html`<${Reward} overview=${overview} />`}
        <${Canaries} />
      </div>
      <${Images} />`;
  }

  /** {step, problem} or {step, groups} of the first and the last evaluation; one may be both. */
  function useEnds() {
    const { evaluations } = gallery.run;
    const ends = evaluations.filter((_, index) => index === 0 || index === evaluations.length - 1);
    return useLoaded(() => Promise.all(ends.map(gallery.loadEvaluation)), [ends.map(({ key }) => key).join()]);
  }

  /* The difference of the rounded figures, so that it agrees with them. */
  const shownChange = ({ before, after }) => signed(after.toFixed(3) - before.toFixed(3));

  const extent = ({ low, high }) => `${signed(low)} to ${signed(high)}`;

  /* Better or worse by the sign of the term's weight, unless the interval includes 0. */
  function judge({ name, low, high }) {
    if (low === null) return [TOO_FEW, ""];
    if (low <= 0 && high >= 0) return ["no clear change", ""];
    const weight = gallery.run.reward.terms.find((term) => term.name === name)?.weight ?? 1;
    if (weight === 0) return [low > 0 ? "rose" : "fell", ""];
    const word = low > 0 === weight > 0 ? "better" : "worse";
    return [word, word];
  }

  function Gain() {
    const { evaluations, summary } = gallery.run;
    const total = summary?.find(({ name }) => name === TOTAL);
    const [first, last] = [evaluations[0]?.step, evaluations[evaluations.length - 1]?.step];
    return html`<section class="panel" aria-labelledby="start-gain">
      <h3 id="start-gain">Gain on held-out prompts</h3>
      ${total
        ? html`<${Summary} total=${total} summary=${summary} first=${first} last=${last} />`
        : evaluations.length > 1
          ? html`<${GainSoFar} />`
          : html`<p class="soft">Not known yet: ${evaluations.length ? "the first" : "no"} evaluation is stored, two are needed.</p>`}
    </section>`;
  }

  function Summary({ total, summary, first, last }) {
    const [verdict, kind] = judge(total);
    return html`<p class="start-gain">
        <strong class=${kind}>${shownChange(total)}</strong>${" "}
        <span>${total.low === null ? TOO_FEW : `95 % interval ${extent(total)}: ${verdict}`}</span>
      </p>
      <p class="soft">Mean total ${fmt(total.before)} at step ${first}, ${fmt(total.after)} at step ${last}${
        gallery.run.reward.combine === "weighted_sum" ? "" : ", in standard deviations of the base model's scores"}</p>
      <ul class="start-terms">
        ${summary.filter((row) => row !== total).map((row) => html`<li key=${row.name}>
          ${row.name} <span class=${judge(row)[1]}>${shownChange(row)}</span>
        </li>`)}
      </ul>
      <details>
        <summary>Before and after, by term</summary>
        <div class="scroll-region" tabindex="0" role="region" aria-label="Before and after, by term">
          <table>
            <thead><tr><th scope="col">Term</th><th scope="col">Before</th><th scope="col">After</th>
              <th scope="col">Change</th><th scope="col">95 % interval</th></tr></thead>
            <tbody>
              ${summary.map((row) => html`<tr key=${row.name}>
                <th scope="row">${row.name}</th>
                <td>${fmt(row.before)}</td><td>${fmt(row.after)}</td>
                <td class=${judge(row)[1]}>${shownChange(row)}</td>
                <td>${row.low === null ? TOO_FEW : extent(row)}</td>
              </tr>`)}
            </tbody>
          </table>
        </div>
      </details>`;
  }

  /* While a run goes on there is no interval: neither here nor in Before and after. */
  function GainSoFar() {
    const { data } = useEnds();
    const [before, after] = data ?? [];
    if (!data) return html`<p role="status">Loading evaluations</p>`;
    if (!before.groups || !after.groups) return html`<p class="soft">An evaluation cannot be read.</p>`;
    const changes = pairs(before, after).map(({ change }) => change);
    if (!changes.length) return html`<p class="soft">The two evaluations have no prompt in common.</p>`;
    const change = mean(changes);
    return html`<p class="start-gain">
        <strong>${signed(change)}</strong>${" "}
        <span>from step ${before.step} to step ${after.step}</span>
      </p>
      <p class="soft">
        The interval is computed at the end of the run, or by <code>glm-grpo gallery RUN</code>.
      </p>`;
  }

  function Reward({ overview }) {
    const scheme = useScheme();
    const chart = useMemo(() => makeChart(overview), [overview]);
    const open = (step, isEvaluation) => gallery.go(isEvaluation ? "progress" : "groups", isEvaluation ? {} : { step });
    return html`<section class="start-curve" aria-label="Reward">
      <${Chart} chart=${chart} steps=${overview.steps} smoothing=${0} range=${{ from: null, to: null }}
        scheme=${scheme} onOpen=${open} onRange=${(range) => gallery.go("curves", range)}
        set=${({ large }) => gallery.go("curves", { large })} />
    </section>`;
  }

  function makeChart({ values }) {
    /* What a step does not have is no value that was not finite. */
    const column = (name) => values[name]?.map((value) => value ?? undefined);
    const has = (name) => values[name] !== undefined;
    const line = { name: "reward/mean", values: column("reward/mean") };
    /* Otherwise held-out totals have another unit. */
    const isSum = gallery.run.reward.combine === "weighted_sum";
    return {
      id: "reward/mean",
      title: isSum ? "Reward" : "Held-out total, standard deviations",
      unit: "",
      lines: isSum && has("reward/mean") ? [{ ...line, style: lineStyle(0) }] : [],
      evaluations: has("eval/total") ? [{ name: "eval/total", values: column("eval/total"), style: EVALUATION_STYLE }] : [],
      band: null,
    };
  }

  function Canaries() {
    return html`<section class="panel" aria-labelledby="start-canaries">
      <h3 id="start-canaries">Canaries</h3>
      ${listCanaries().length
        ? html`<${CanaryTable} />`
        : html`<p class="soft">
            This run has no canaries, so nothing warns when the policy games its reward.
          </p>`}
    </section>`;
  }

  function CanaryTable() {
    const { chunks } = gallery.run;
    const { key } = chunks[chunks.length - 1] ?? {};
    const { data, error } = useLoaded(() => (key ? gallery.load(key) : Promise.resolve({ metrics: [], steps: [] })), [key]);
    if (error) return html`<${Problem} where="Canaries" message=${error.message} />`;
    if (!data) return html`<p role="status">Loading canaries</p>`;
    const judged = data.metrics.flatMap((row) => {
      const groups = data.steps.find(({ step }) => step === row.step)?.groups;
      const found = groups ? listCanaries().map((name) => [name, judgeCanary(name, row, groups)]) : [];
      return found.some(([, canary]) => canary) ? [{ step: row.step, canaries: found }] : [];
    });
    const last = judged[judged.length - 1];
    if (!last) return html`<p class="soft">No step with canaries is recorded yet.</p>`;
    const { bands } = gallery.run;
    const { groups } = data.steps.find(({ step }) => step === last.step);
    /* Between evaluations the last one stands; the overview has it. */
    const newest = (metric) => gallery.run.overview?.values[metric]?.findLast((value) => value !== null);
    const canaries = last.canaries.map(([name, canary]) => [
      name,
      bands[name].is_of_evaluations
        ? judgeCanary(name, { [`canary/${name}`]: newest(`canary/${name}`) }, groups)
        : canary,
    ]);
    const outside = canaries.filter(([, canary]) => canary && !canary.isInside);
    const history = (gallery.run.overview?.values["canary/departures"] ?? []).filter((count) => count > 0).length;
    return html`<p>
        <strong class=${outside.length ? "worse" : "better"}>
          ${outside.length ? `${outside.length} of ${canaries.length} outside their band` : `All ${canaries.length} inside their bands`}
        </strong> at step ${last.step}, over ${parts.counted(groups.length, "prompt")}.${" "}
        ${history > 0 &&
        html`<a href=${link("find", { canary: "any" })}>${parts.counted(history, "step")} had one outside.</a>`}
      </p>
      <ul class="start-terms">
        ${canaries.map(([name, canary]) => html`<li key=${name}>
          ${name} <span class=${canary && (canary.isInside ? "soft" : "worse")}>${fmt(canary?.value)}</span>
        </li>`)}
      </ul>
      <details>
        <summary>Values and bands</summary>
        <div class="scroll-region" tabindex="0" role="region" aria-label="Values and bands">
          <table>
            <thead><tr><th scope="col">Canary</th><th scope="col">Value</th><th scope="col">Band</th></tr></thead>
            <tbody>
              ${canaries.map(([name, canary]) => html`<tr key=${name}>
                <th scope="row"><a href=${link("curves", { metric: `canary/${name}` })}>${name}</a></th>
                ${canary
                  ? html`<td>${fmt(canary.value)}${!canary.isInside && html` <strong class="worse">outside</strong>`}</td>
                      <td>${canary.high === null ? `from ${fmt(canary.low)} up` : `${fmt(canary.low)} to ${fmt(canary.high)}`}</td>`
                  : html`<td colspan="2" class="soft">not known at this step</td>`}
              </tr>`)}
            </tbody>
          </table>
        </div>
      </details>`;
  }

  /** Each prompt that both evaluations have: its sample of the largest change, and the mean change. */
  function pairs(before, after) {
    const earlier = new Map(before.groups.map((group) => [group.prompt_id, group]));
    return after.groups.flatMap((group) => {
      const old = earlier.get(group.prompt_id);
      return old ? [{ old, group, change: mean(group.total) - mean(old.total) }] : [];
    });
  }

  function Images() {
    const { data, error } = useEnds();
    if (!gallery.run.evaluations.length) return html`<${LastStep} />`;
    if (error) return html`<${Problem} where="Evaluations" message=${error.message} />`;
    if (!data) return html`<p role="status">Loading evaluations</p>`;
    const broken = data.filter(({ problem }) => problem);
    const [before, after] = [data[0], data[data.length - 1]];
    return html`
      ${broken.map(({ step, problem }) => html`<${Problem} key=${step}
        where=${`Evaluation of step ${step}`} message=${problem} />`)}
      ${before !== after && before.groups && after.groups && html`<${Changed} before=${before} after=${after} />`}
      ${after.groups && html`<${Extremes} view="progress" step=${after.step} groups=${after.groups}
        of=${`step ${after.step}`} />`}`;
  }

  /* Without held-out prompts. */
  function LastStep() {
    const { chunks } = gallery.run;
    const chunk = chunks[chunks.length - 1];
    const { data } = useLoaded(() => gallery.load(chunk.key), [chunk.key]);
    const whole = data?.steps.filter(({ groups }) => groups) ?? [];
    if (!whole.length) return null;
    const { step, groups } = whole[whole.length - 1];
    return html`<${Extremes} view="groups" step=${step} groups=${groups} of=${`training step ${step}`} />`;
  }

  function Changed({ before, after }) {
    const all = pairs(before, after).map(({ old, group }) => {
      const samples = group.total.map((total, sample) => ({ sample, change: changeOf(group.total, old.total, sample) }));
      const known = samples.filter(({ change }) => change !== null);
      return { old, group, known };
    });
    const rows = [
      ["Largest gains", (one, other) => other.change - one.change, ({ change }) => change > 0],
      ["Largest losses", (one, other) => one.change - other.change, ({ change }) => change < 0],
    ];
    return rows.map(([title, order, isMeant]) => {
      const chosen = all
        .flatMap(({ old, group, known }) => known.sort(order).slice(0, 1).map((one) => ({ old, group, ...one })))
        .filter(isMeant)
        .sort(order)
        .slice(0, SHOWN);
      return html`<${Row} key=${title} title=${title} empty="None.">
        ${chosen.map(({ old, group, sample, change }) => html`<${Item} key=${group.prompt_id} group=${group}
          view="progress" place=${{ prompt: group.prompt_id, step: after.step, sample }}
          figures=${html`total ${fmt(old.total[sample])} to ${fmt(group.total[sample])}${" "}
            <span class=${changeClass(change)}>${signed(change)}</span>`}
          samples=${[
            [`step ${before.step}`, old, before.step, sample],
            [`step ${after.step}`, group, after.step, sample],
          ]} />`)}
      </${Row}>`;
    });
  }

  function Extremes({ view, step, groups, of }) {
    const rows = [
      [`Highest totals at ${of}`, (one, other) => other.total - one.total],
      [`Lowest totals at ${of}`, (one, other) => one.total - other.total],
    ];
    return rows.map(([title, order]) => {
      const chosen = groups
        .flatMap((group) =>
          group.total
            .map((total, sample) => ({ group, sample, total }))
            .filter(({ total }) => total !== null)
            .sort(order)
            .slice(0, 1),
        )
        .sort(order)
        .slice(0, SHOWN);
      return html`<${Row} key=${title} title=${title}>
        ${chosen.map(({ group, sample, total }) => html`<${Item} key=${group.prompt_id} group=${group}
          view=${view} place=${{ prompt: group.prompt_id, step, sample }} figures=${`total ${fmt(total)}`}
          target=${group.target} samples=${[["sample", group, step, sample]]} />`)}
      </${Row}>`;
    });
  }

  function Row({ title, empty, children }) {
    const id = `start-${title.split(" ", 2).join("-").toLowerCase()}`;
    return html`<section aria-labelledby=${id}>
      <h3 id=${id}>${title}</h3>
      ${children.length === 0 ? html`<p class="soft">${empty}</p>` : html`<ul class="start-images">${children}</ul>`}
    </section>`;
  }

  /* `view` and `place` of the page on which the image stands; before it stands `target`, if any. */
  function Item({ group, view, place, figures, target, samples }) {
    const name = clip(group.prompt_id);
    const open = (step, first) => () => gallery.go(view, { ...place, step, first, large: 1 });
    const attributes = { "aria-haspopup": "dialog" };
    /* Texts are named once for both images, in the prompt if it has them. */
    const isPair = samples.length > 1;
    const asked = isPair ? group.texts.filter((text) => !group.prompt.includes(text)) : [];
    return html`<li class="panel">
      <a href=${link(view, place)} class="start-prompt" dir="auto" title=${clip(group.prompt, 400)}>${clip(group.prompt, 160) || name}</a>
      <p class="soft">sample ${place.sample}: ${figures}${
        asked.map((text) => html`, asked <span class="asked" dir="auto">${clip(text)}</span>`)}</p>
      <div class=${target || isPair ? "start-pair" : ""}>
        ${target && html`<figure>
          <${ImageButton} image=${target} alt=${`Target of ${name}`} onOpen=${open(place.step, "target")} attributes=${attributes} />
          <figcaption class="soft">target</figcaption>
        </figure>`}
        ${samples.map(([caption, shown, step, sample]) => html`<figure key=${step}>
          <${ImageButton} image=${shown.images[sample]} alt=${`${name}, step ${step}, sample ${sample}`} onOpen=${open(step)}
            attributes=${attributes} />
          <figcaption><span class="soft">${caption}</span>${" "}
            ${isPair
              ? html`<${Read} group=${shown} sample=${sample} />`
              : html`<${AskedRead} group=${shown} sample=${sample} isShort />`}
          </figcaption>
        </figure>`)}
      </div>
    </li>`;
  }

  gallery.views.start = Start;
})();
