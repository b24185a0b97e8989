/* The table of the Progress view: a grid with one tab stop, in which arrow keys move. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { ImageButton, PromptText, Terms, changeClass, clip, fmt, mean, memo, signed, useNear } = parts;
  const { AskedRead, sayReading } = gallery.readings;
  const { useEffect, useRef, useState } = preactHooks;

  const PROMPT_LIMIT = 120;
  const PAGE_ROWS = 5;

  /* The evaluation that changes are counted from: the first that has the prompt. */
  function baseOf(row) {
    return Math.min(...Object.keys(row.bySteps).map(Number));
  }

  /** The step of the newest evaluation of a prompt. */
  function newestOf(row) {
    return Math.max(...Object.keys(row.bySteps).map(Number));
  }

  /** {base, before}: the step that an image's numbers are held against and its group there; null for
     the first evaluation itself. */
  function referenceOf({ row, step }) {
    const base = baseOf(row);
    return { base, before: step === base ? null : row.bySteps[base] };
  }

  /** What a sample's number changed by; null where either is not there. */
  function changeOf(values, older, sample) {
    const [value, before] = [values?.[sample], older?.[sample]];
    return value == null || before == null ? null : value - before;
  }

  /**
   * @param rows In the order to show.
   * @param loaded {step: {groups} | {problem}} of the evaluations that are there so far.
   * @param samples Which samples of a prompt stand below one another.
   * @param isDiff Show differences to the target.
   * @param pinned {row, step, sample} or null.
   * @param onHover Called with what is pointed at or has the focus, as `pinned`.
   * @param onOpen Called with what was chosen, and "target" or "source" where that was.
   * @param sizes As useSizes gives it.
   */
  function Table({ rows, loaded, samples, isDiff, pinned, onHover, onOpen, sizes }) {
    const steps = gallery.run.evaluations.map(({ step }) => step);
    /* Images that a prompt comes with, side by side: sources and target. */
    const references = Math.max(...rows.map(({ group }) => listReferences(group).length));
    const region = useRef(null);
    const size = { lines: rows.length * samples.length, first: references ? 0 : 1, columns: steps.length + 1 };
    const [active, setActive, onKeyDown] = useActive(region, size, samples.length);
    const pick = (event) => {
      const cell = event.target.closest("[data-place]");
      if (!cell) return;
      const [line, column] = cell.dataset.place.split(",").map(Number);
      if (event.type === "focusin") setActive({ line, column });
      const place = {
        row: rows[Math.floor(line / samples.length)],
        step: steps[column - 1],
        sample: samples[line % samples.length],
      };
      /* Not below a finger: what then opens would lie over the image, and take the tap. */
      const isPointedAt =
        event.type === "focusin"
          ? event.target.matches(":focus-visible")
          : event.pointerType !== "touch";
      if (isPointedAt && hasImage(place)) onHover(place);
    };
    const isOfRow = (index) => Math.floor(active.line / samples.length) === index;
    const style = {
      "--columns": steps.length + references,
      "--lines": samples.length,
      "--ratio": imageRatio(),
      "--references": references,
      ...sizes.style,
    };
    return html`<div class="scroll-region" ref=${region} tabindex="-1">
      <table role="grid" class=${references ? "progress-table has-references" : "progress-table"} aria-label="Held-out prompts by evaluation"
        style=${style} onPointerOver=${pick} onFocusIn=${pick} onKeyDown=${onKeyDown}>
        <${Head} steps=${steps} loaded=${loaded} rows=${rows} />
        <tbody role="rowgroup">
          ${rows.map(
            (row, index) =>
              html`<${Row} key=${row.id} row=${row} first=${index * samples.length}
                samples=${samples} hasReferences=${references > 0} isDiff=${isDiff} density=${sizes.density} active=${isOfRow(index) ? active : null}
                pinned=${pinned?.row.id === row.id ? pinned : null} onOpen=${onOpen} />`,
          )}
        </tbody>
      </table>
    </div>`;
  }

  function hasImage({ row, step, sample }) {
    return row.bySteps[step]?.images[sample] !== undefined;
  }

  function imageRatio() {
    const { width, height } = gallery.run.image_size ?? { width: 1, height: 1 };
    return height / width;
  }

  /* [active, setActive, onKeyDown]: the one cell that Tab leads to, {line, column}, a line being
     one sample of one row and column 0 what its prompt comes with; `first` is 1 where none has any. */
  function useActive(region, { lines, first, columns }, linesOfRow) {
    const [active, setActive] = useState({ line: 0, column: 1 });
    const onKeyDown = (event) => {
      const move = moveOf(event, { lines, columns, page: PAGE_ROWS * linesOfRow });
      if (!move) return;
      event.preventDefault();
      const next = {
        line: clamp(active.line + move[0], 0, lines),
        column: clamp(active.column + move[1], first, columns),
      };
      setActive(next);
      /* A row far away is drawn once it holds the active cell. */
      requestAnimationFrame(() =>
        region.current.querySelector(`[data-place="${next.line},${next.column}"]`).focus(),
      );
    };
    return [active, setActive, onKeyDown];
  }

  const clamp = (value, first, end) => Math.min(Math.max(value, first), end - 1);

  /* How many [lines, columns] a key leads on, or null. */
  function moveOf(event, { lines, columns, page }) {
    if (event.metaKey || event.altKey) return null;
    const jump = event.ctrlKey ? lines : 0;
    const moves = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      PageUp: [-page, 0],
      PageDown: [page, 0],
      Home: [-jump, -columns],
      End: [jump, columns],
    };
    return Object.hasOwn(moves, event.key) ? moves[event.key] : null;
  }

  /* What a prompt comes with: [{name, title, image}]. */
  function listReferences({ sources, target }) {
    const shown = (sources ?? []).map((image, index) => ({
      name: index ? `source-${index + 1}` : "source",
      title: sources.length > 1 ? `Source ${index + 1}` : "Source",
      image,
    }));
    return target ? [...shown, { name: "target", title: "Target", image: target }] : shown;
  }

  function Head({ steps, loaded, rows }) {
    const titles = new Set(rows.flatMap(({ group }) => listReferences(group)).map(({ title }) => title));
    return html`<thead role="rowgroup">
      <tr role="row">
        <th role="columnheader" scope="col" class="prompt-column">Prompt</th>
        ${titles.size > 0 && html`<th role="columnheader" scope="col" class="references">
          ${[...titles].map((title) => html`<span key=${title}>${title}</span> `)}
        </th>`}
        ${steps.map(
          (step) =>
            html`<th role="columnheader" scope="col" key=${step}>
              Step ${step}${" "}
              <span class="soft">${describe(loaded[step])}</span>
            </th>`,
        )}
      </tr>
    </thead>`;
  }

  function describe(entry) {
    if (!entry) return "loading";
    if (entry.problem) return "not readable";
    return `mean ${fmt(mean(entry.groups.flatMap((group) => group.total)))}`;
  }

  const Row = memo(({ row, first, samples, hasReferences, isDiff, density, active, pinned, onOpen }) => {
    const [near, isNear] = useNear();
    const place = (line, column) => ({
      "data-place": `${first + line},${column}`,
      tabIndex: active?.line === first + line && active.column === column ? 0 : -1,
    });
    const cell = (step, at) => (sample, line) =>
      html`<${Cell} key=${sample} row=${row} step=${step} sample=${sample} isDiff=${isDiff} density=${density}
        isPinned=${pinned?.step === step && pinned.sample === sample}
        attributes=${place(line, at + 1)} onOpen=${onOpen} />`;
    return html`<tr role="row" ref=${near}>
      <${RowHead} row=${row} />
      ${
        (isNear || active || pinned) &&
        html`${hasReferences && html`<td role="gridcell" class="references">
          <${References} row=${row} sample=${samples[0]} density=${density} onOpen=${onOpen}
            attributes=${place(active ? active.line - first : 0, 0)} />
        </td>`}
        ${gallery.run.evaluations.map(
          ({ step }, at) =>
            html`<td role="gridcell" key=${step}>
              ${samples.map(cell(step, at))}
            </td>`,
        )}`
      }
    </tr>`;
  });

  function RowHead({ row }) {
    const { prompt } = row.group;
    return html`<th role="rowheader" scope="row">
      <div class="row-head">
        ${prompt !== clip(row.id) && html`<${PromptText} text=${prompt} limit=${PROMPT_LIMIT} />`}
        <span class="row-id" dir="auto">${clip(row.id)}</span>
        ${
          row.change !== null &&
          html`<span class="row-change">
          ${row.count === 1 ? "total" : `mean of ${row.count} samples`} ${fmt(row.total)}${" "}
          <${Change} value=${row.change} />
        </span>`
        }
      </div>
    </th>`;
  }

  function Change({ value }) {
    return html`<span class=${changeClass(value)}>${signed(value)}</span>`;
  }

  /* Once for all samples of a row: the last of them goes with whichever sample is active. */
  function References({ row, sample, density, attributes, onOpen }) {
    const references = listReferences(row.group);
    if (!row.group.target) references.push(null);
    return references.map((reference, index) => {
      const own = index + 1 === references.length ? attributes : {};
      if (!reference) return html`<span class="soft" ...${own}>no target</span>`;
      const { name, title, image } = reference;
      return html`<figure key=${name}>
        <${ImageButton} image=${image} alt=${`${title} of ${clip(row.id)}`} attributes=${{ ...own, "aria-haspopup": "dialog" }}
          onOpen=${() => onOpen({ row, step: newestOf(row), sample }, name)} />
        ${density !== "images" && html`<figcaption class="soft" aria-hidden="true">${title}</figcaption>`}
      </figure>`;
    });
  }

  function Cell({ row, step, sample, isDiff, density, isPinned, attributes, onOpen }) {
    const cell = useRef(null);
    useEffect(() => {
      if (isPinned) cell.current.scrollIntoView({ block: "nearest", inline: "nearest" });
    }, [isPinned]);
    const place = { row, step, sample };
    if (!hasImage(place)) {
      return html`<span class="cell soft" ref=${cell} ...${attributes}>none</span>`;
    }
    const group = row.bySteps[step];
    const { before } = referenceOf(place);
    const total = fmt(group.total[sample]);
    const change = before ? changeOf(group.total, before.total, sample) : null;
    const name = `${clip(row.id)}, step ${step}, sample ${sample}: total ${total}`;
    const said = change === null ? name : `${name}, change ${signed(change)}`;
    const reading = sayReading(group, sample);
    return html`<div class=${isPinned ? "cell is-pinned" : "cell"} ref=${cell}>
      <${ImageButton} image=${group.images[sample]} target=${group.target} isDiff=${isDiff}
        alt=${reading ? `${said}, ${reading}` : said}
        onOpen=${() => onOpen(place)}
        attributes=${{ ...attributes, "aria-haspopup": "dialog" }} />
      ${
        density !== "images" &&
        html`<span class="cell-figures" aria-hidden="true">
          <span>${total}</span> ${change !== null && html`<${Change} value=${change} />`}
        </span>`
      }
      ${
        density !== "images" &&
        html`<${AskedRead} group=${group} sample=${sample} isShort
          attributes=${{ "aria-hidden": "true" }} />`
      }
      ${density === "figures" && html`<${Terms} raw=${group.raw} sample=${sample} />`}
    </div>`;
  }

  gallery.progressTable = { Table, changeOf, listReferences, newestOf, referenceOf };
})();
