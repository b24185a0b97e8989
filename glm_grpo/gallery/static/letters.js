/* Letters: which letters OCR reads as others, step by step, with the way to their pictures. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { Loading, Problem, Title, percent, useLoaded } = parts;
  const { NO_LETTER, loadImages } = gallery.imageTable;
  const { listReaders } = gallery.readings;
  const { useMemo } = preactHooks;

  /* Columns of steps, letters of the table, and readings named beside a letter, at most. */
  const COLUMNS = 12;
  const MOST_LETTERS = 60;
  const MOST_READINGS = 3;
  /* Percent of the colour of what is worse, in the cell with the largest share of wrong letters. */
  const TINT = 45;
  const SOURCES = { training: "training steps", evaluations: "evaluations" };
  const SORTS = {
    count: ["most mistakes", (one, other) => other.wrong - one.wrong],
    rate: ["most mistakes per letter asked for", (one, other) => other.wrong / other.asked - one.wrong / one.asked],
    letter: ["letter", (one, other) => compareTexts(one.letter, other.letter)],
  };
  const compareTexts = new Intl.Collator("en", { numeric: true }).compare;

  const ABOUT = html`
    <p>How often OCR reads a letter as another one, or misses it, step by step. Click on a figure to see its images.
      The darkest cell has the most mistakes.</p>
    <p>The letter may be drawn wrong, or drawn right and misread: look at the images before you blame the model.</p>`;

  function Letters({ params }) {
    const readers = listReaders();
    const source = Object.hasOwn(SOURCES, params.of) ? params.of : "training";
    const { data, error, progress } = useLoaded((onProgress) => loadImages(source, onProgress), [source]);
    if (!readers.length) {
      return html`<${Title} name="Letters" />
        <p>This run has no term of the kind <code>ocr</code>, so nothing reads the text in its images.</p>`;
    }
    const reader = readers.includes(params.term) ? params.term : readers[0];
    const set = (change) => gallery.replace("letters", { ...params, ...change });
    return html`<${Title} name="Letters" about=${ABOUT}>
        <${Controls} params=${params} source=${source} readers=${readers} reader=${reader} set=${set} />
      </${Title}>
      ${data
        ? html`<${Results} key=${source} data=${data} reader=${reader} source=${source} params=${params} />`
        : html`<${Loading} what="Images" error=${error} progress=${progress} />`}`;
  }

  function Controls({ params, source, readers, reader, set }) {
    const choice = (label, name, value, options) => html`<label>${label}
      <select value=${value} onChange=${(event) => set({ [name]: event.currentTarget.value })}>
        ${options.map(([option, title]) => html`<option key=${option} value=${option}>${title}</option>`)}
      </select>
    </label>`;
    const sort = Object.hasOwn(SORTS, params.sort ?? "") ? params.sort : "count";
    return html`${choice("Images of", "of", source, Object.entries(SOURCES))}
      ${readers.length > 1 && choice("Read by", "term", reader, readers.map((name) => [name, name]))}
      ${choice("Sort by", "sort", sort, Object.entries(SORTS).map(([name, [title]]) => [name, title]))}`;
  }

  /* {ranges: [{from, to}], rows: [{letter, asked, wrong, cells: [{asked, wrong}], readings}], extra}:
     `readings` of [letter read, times], most frequent first; `extra` the letters too many. */
  function countLetters(images, reader) {
    const steps = [...new Set(images.map(({ shared }) => shared.step))].sort((one, other) => one - other);
    const size = Math.ceil(steps.length / COLUMNS) || 1;
    const columnOf = new Map(steps.map((step, index) => [step, Math.floor(index / size)]));
    const count = Math.ceil(steps.length / size);
    const ranges = Array.from({ length: count }, (_, column) => {
      const own = steps.slice(column * size, (column + 1) * size);
      return { from: own[0], to: own[own.length - 1] };
    });
    const rows = new Map();
    const rowOf = (letter) => {
      if (!rows.has(letter)) {
        const cells = ranges.map(() => ({ asked: 0, wrong: 0 }));
        rows.set(letter, { letter, asked: 0, wrong: 0, cells, readings: new Map() });
      }
      return rows.get(letter);
    };
    images.forEach(({ shared: { group, step }, sample }) => {
      const note = group.notes[reader]?.[sample];
      if (!note?.errors) return;
      const column = columnOf.get(step);
      for (const letter of group.asked?.[reader] ?? "") {
        const row = rowOf(letter);
        row.asked += 1;
        row.cells[column].asked += 1;
      }
      note.errors.forEach(([letter, read]) => {
        const row = rowOf(letter);
        row.wrong += 1;
        row.cells[column].wrong += 1;
        row.readings.set(read, (row.readings.get(read) ?? 0) + 1);
      });
    });
    const sorted = [...rows.values()].map((row) => ({
      ...row,
      readings: [...row.readings].sort((one, other) => other[1] - one[1]),
    }));
    return {
      ranges,
      rows: sorted.filter(({ letter }) => letter !== ""),
      extra: sorted.find(({ letter }) => letter === ""),
    };
  }

  function Results({ data, reader, source, params }) {
    const { ranges, rows, extra } = useMemo(() => countLetters(data.images, reader), [data, reader]);
    const [, order] = Object.hasOwn(SORTS, params.sort ?? "") ? SORTS[params.sort] : SORTS.count;
    const sorted = useMemo(() => [...rows].sort((one, other) => order(one, other) || compareTexts(one.letter, other.letter)), [rows, order]);
    const problems = data.problems.map(({ kind, step, problem }) => html`<${Problem} key=${`${kind} ${step}`}
      where=${`${kind === "training" ? "Step" : "Evaluation at step"} ${step} is left out`} message=${problem} />`);
    if (!rows.length) {
      return html`${problems}<p class="panel">
        No prompt of the stored ${SOURCES[source]} asks for text.
      </p>`;
    }
    const [asked, wrong] = ["asked", "wrong"].map((name) => rows.reduce((sum, row) => sum + row[name], 0));
    const find = (change) => link("find", { of: source, ...change });
    const shareOf = ({ asked, wrong }) => (asked ? wrong / asked : 0);
    const most = Math.max(...rows.flatMap(({ cells }) => cells.map(shareOf))) || 1;
    const shown = extra ? [...sorted.slice(0, MOST_LETTERS), extra] : sorted.slice(0, MOST_LETTERS);
    return html`${problems}
      <p role="status">
        <strong>${percent(wrong / asked)}</strong> of ${asked.toLocaleString("en")} letters are misread or missed.${sorted.length > MOST_LETTERS && ` The first ${MOST_LETTERS} of ${sorted.length} letters are shown.`}
      </p>
      <div class="scroll-region letters-region" tabindex="0" role="region" aria-label="Letters by step">
        <table>
          <thead><tr>
            <th scope="col">Letter</th><th scope="col">Wrong</th><th scope="col">Read as</th>
            ${ranges.map(({ from, to }, index) => html`<th scope="col" key=${from}>
              ${index === 0 && (from === to ? "Step " : "Steps ")}${from === to ? from : `${from}\u2013${to}`}
            </th>`)}
          </tr></thead>
          <tbody>${shown.map((row) => html`<${Row} key=${row.letter} row=${row} ranges=${ranges} most=${most} find=${find} />`)}</tbody>
        </table>
      </div>`;
  }

  function Row({ row, ranges, most, find }) {
    const isExtra = row.letter === "";
    const name = isExtra ? NO_LETTER : row.letter;
    const rate = ({ asked, wrong }) => (isExtra ? String(wrong) : percent(wrong / asked, 0));
    const said = ({ asked, wrong }) => (isExtra ? `${wrong} too many` : `${wrong} of ${asked}`);
    return html`<tr>
      <th scope="row">${isExtra ? "too many" : html`<span class="letter" dir="auto">${row.letter}</span>`}</th>
      <td>${row.wrong > 0 ? html`<a href=${find({ wrong: name })} title=${said(row)}>${rate(row)}</a>` : rate(row)}</td>
      <td class="letters-readings">
        ${row.readings.slice(0, MOST_READINGS).map(([read, times]) => html`<span key=${read}>
          <a href=${find({ wrong: name, as: read || NO_LETTER })}>${
            read === "" ? "missing" : html`<span class="letter" dir="auto">${read}</span>`}</a>${" "}
          <span class="soft">${times}</span>
        </span>`)}
      </td>
      ${row.cells.map((cell, column) => html`<${Cell} key=${column} cell=${cell} text=${rate(cell)} said=${said(cell)}
        tint=${isExtra ? 0 : (TINT * cell.wrong) / cell.asked / most} href=${find({ wrong: name, ...ranges[column] })} />`)}
    </tr>`;
  }

  function Cell({ cell, text, said, tint, href }) {
    if (cell.asked + cell.wrong === 0) return html`<td></td>`;
    if (cell.wrong === 0) return html`<td class="soft" title=${said}>${text}</td>`;
    const style = { background: `color-mix(in srgb, var(--worse) ${tint}%, transparent)` };
    return html`<td style=${style}><a href=${href} title=${said}>${text}</a></td>`;
  }

  gallery.views.letters = Letters;
})();
