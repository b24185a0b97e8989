/* Every score of one image of the Progress view: beside the table, and below it when large. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { ImageButton, LargeView, Notes, PromptText, changeClass, clip, fmt, movesIn, signed } = parts;
  const { AskedRead } = gallery.readings;
  const { changeOf, listReferences, referenceOf } = gallery.progressTable;

  const LABEL = "Scores of the image";

  /* A place is {row, step, sample}. */
  function describe({ row, step, sample }) {
    return `${clip(row.id)}: step ${step}, sample ${sample}`;
  }

  const imageOf = ({ row, step, sample }) => row.bySteps[step].images[sample];

  /* Every term of one image, with its change since the first evaluation. */
  function Figures({ place }) {
    const { sample } = place;
    const group = place.row.bySteps[place.step];
    const { base, before } = referenceOf(place);
    const line = (name, values, older) =>
      html`<${Line} key=${name} name=${name} value=${values && (values[sample] ?? NaN)}
        change=${before ? changeOf(values, older, sample) : null}
        hasChange=${before !== null} />`;
    return html`<${AskedRead} group=${group} sample=${sample} />
      <table class="scores">
        <thead>
          <tr>
            <th scope="col">Term</th>
            <th scope="col">Score</th>
            ${before && html`<th scope="col">Since step ${base}</th>`}
          </tr>
        </thead>
        <tbody>
          ${Object.keys(group.raw).map((name) => line(name, group.raw[name], before?.raw[name]))}
        </tbody>
        <tfoot>
          ${line("Total", group.total, before?.total)}
        </tfoot>
      </table>
      <${Notes} group=${group} sample=${sample} />`;
  }

  function Line({ name, value, change, hasChange }) {
    return html`<tr>
      <th scope="row" title=${name}>${name}</th>
      ${value === null ? html`<td class="soft">does not apply</td>` : html`<td>${fmt(value)}</td>`}
      ${
        hasChange &&
        html`<td class=${changeClass(change)}>${change === null ? "" : signed(change)}</td>`
      }
    </tr>`;
  }

  /* An image above what it is compared with: its source, its target, and the first evaluation. */
  function Images({ place, onLarge }) {
    const { row, sample } = place;
    const { base, before } = referenceOf(place);
    const plates = [
      { image: imageOf(place), title: null },
      ...listReferences(row.group).map(({ name, title, image }) => ({ title, image, first: name })),
      ...(before?.images[sample] ? [{ title: `Step ${base}`, image: before.images[sample], step: base }] : []),
    ];
    const open = ({ first, step = place.step }) => onLarge({ ...place, step }, first);
    return html`<div class="details-images">
      ${plates.map((plate) => html`<figure key=${plate.title}>
        <${ImageButton} image=${plate.image} alt=${plate.title ?? describe(place)} onOpen=${() => open(plate)}
          attributes=${{ "aria-haspopup": "dialog" }} />
        ${plate.title && html`<figcaption class="soft" aria-hidden="true">${plate.title}</figcaption>`}
      </figure>`)}
    </div>`;
  }

  /**
   * The panel beside the table.
   *
   * @param isChosen Whether the reader chose the place, or it is shown before any was.
   * @param onLarge Called with what to open, as the table's `onOpen`.
   */
  function Details({ place, isChosen, onLarge, onClose }) {
    return html`<aside class=${isChosen ? "details panel" : "details is-empty panel"} aria-label=${LABEL}>
      <h3 dir="auto">${describe(place)}</h3>
      <${Images} place=${place} onLarge=${onLarge} />
      <${Figures} place=${place} />
      ${isChosen && html`<button type="button" onClick=${onClose}>Close</button>`}
    </aside>`;
  }

  /**
   * Prompts below one another, their samples side by side, evaluations one behind the other.
   *
   * @param rows All prompts, in the order in which they stand.
   * @param onShow Called with the place to show.
   */
  function RowViewer({ place, rows, first, onShow, onClose }) {
    const { row, step, sample } = place;
    const there = rows.filter((each) => each.bySteps[step]);
    const steps = stepsOf(place);
    const at = steps.indexOf(step);
    const toStep = (next) => next !== undefined && (() => onShow({ row, sample, step: next }));
    const moves = movesIn(
      there.map((each) => each.bySteps[step].images.length),
      [there.indexOf(row), sample],
      ([index, next]) => onShow({ row: there[index], step, sample: next }),
    );
    const item = largeItem(place, steps.slice(0, at));
    const near = [steps[at - 1], steps[at + 1]].filter((each) => each !== undefined);
    return html`<${LargeView} item=${item} first=${first} onClose=${onClose}
      moves=${{ ...moves, before: toStep(steps[at - 1]), after: toStep(steps[at + 1]) }}
      near=${near.map((each) => row.bySteps[each].images[sample])} />`;
  }

  /** What the large view needs of a place; `earlier` are steps before it, null where none is known. */
  function largeItem(place, earlier) {
    const { row, step, sample } = place;
    const group = row.bySteps[step];
    const findEarlier = async () =>
      earlier.map((before) => ({
        step: before,
        image: row.bySteps[before].images[sample],
        title: `Step ${before}`,
      }));
    return {
      id: group.images[sample],
      image: group.images[sample],
      target: group.target,
      sources: group.sources,
      alt: describe(place),
      title: describe(place),
      earlier: earlier?.length ? findEarlier : null,
      body: () => html`<p><${PromptText} text=${group.prompt} /></p>
        <${Figures} place=${place} />
        <p class="soft">Noise seed ${group.decode_seed}.</p>`,
    };
  }

  /* The evaluations that have a sample of a prompt, in order. */
  function stepsOf({ row, sample }) {
    const steps = Object.keys(row.bySteps).map(Number);
    return steps
      .filter((step) => row.bySteps[step].images[sample] !== undefined)
      .sort((one, other) => one - other);
  }

  gallery.progressDetails = { Details, RowViewer, largeItem };
})();
