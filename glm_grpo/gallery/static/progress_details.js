/* Every score of one picture of the Progress view: beside the table, and below it when large. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { Notes, PromptText, Viewer, changeClass, clip, fmt, signed } = parts;
  const { MarkButtons } = gallery.marks;
  const { AskedRead } = gallery.readings;
  const { baseOf, changeOf } = gallery.progressTable;

  const LABEL = "Scores of the picture";

  /* A place is {row, step, sample}. */
  function describe({ row, step, sample }) {
    return `${clip(row.id)}: step ${step}, sample ${sample}`;
  }

  const imageOf = ({ row, step, sample }) => row.bySteps[step].images[sample];

  /* Every term of one picture, with its change since the first evaluation. */
  function Figures({ place: { row, step, sample } }) {
    const group = row.bySteps[step];
    const base = baseOf(row);
    const before = step === base ? null : row.bySteps[base];
    const line = (name, values, older) =>
      html`<${Line} key=${name} name=${name} value=${values && values[sample]}
        change=${before && changeOf(values, older, sample)} hasChange=${before !== null} />`;
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
      <${Notes} notes=${group.notes} sample=${sample} />`;
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

  /** The panel beside the table; `place` is null before anything was pointed at. */
  function Details({ place, onLarge, onClose }) {
    if (!place) {
      return html`<aside class="details is-empty panel" aria-label=${LABEL}>
        <p class="soft">
          Point at a picture, tap it, or move to it with the arrow keys to see every score with its
          change since the first evaluation.
        </p>
      </aside>`;
    }
    return html`<aside class="details panel" aria-label=${LABEL}>
      <h3 dir="auto">${describe(place)}</h3>
      <div class="buttons">
        <button type="button" aria-haspopup="dialog" onClick=${onLarge}>Enlarge</button>
        <button type="button" onClick=${onClose}>Close</button>
      </div>
      <${MarkButtons} key=${imageOf(place)} image=${imageOf(place)} />
      <${Figures} place=${place} />
    </aside>`;
  }

  /** Pages through the evaluations of a prompt, sample by sample the same. */
  function RowViewer({ place, onStep, onClose }) {
    const { row, sample } = place;
    const steps = Object.keys(row.bySteps).map(Number);
    const shown = steps.filter((step) => row.bySteps[step].images[sample] !== undefined);
    shown.sort((a, b) => a - b);
    const items = shown.map((step) => ({
      image: row.bySteps[step].images[sample],
      target: row.bySteps[step].target,
      sources: row.bySteps[step].sources,
      alt: describe({ ...place, step }),
      title: describe({ ...place, step }),
      body: () => html`<${ViewerBody} place=${{ ...place, step }} />`,
    }));
    return html`<${Viewer} items=${items} index=${shown.indexOf(place.step)}
      onIndex=${(next) => onStep(shown[next])} onClose=${onClose} />`;
  }

  function ViewerBody({ place }) {
    const group = place.row.bySteps[place.step];
    return html`<${MarkButtons} key=${imageOf(place)} image=${imageOf(place)} areKeysOn isInDialog />
      <p><${PromptText} text=${group.prompt} /></p>
      <${Figures} place=${place} />
      <p class="soft">
        Noise seed ${group.decode_seed}. <a href=${parts.fullUrl(group.images[place.sample])}>
          Open the stored picture</a>
      </p>`;
  }

  gallery.progressDetails = { Details, RowViewer };
})();
