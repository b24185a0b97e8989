/* The Find view: every image of the run in one table that is filtered and sorted. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html } = gallery;
  const {
    BOUNDS, NO_LETTER, addressOf, filterImages, isRanged, listCanaries, listColumns, loadImages, nameOf, sortImages,
  } = gallery.imageTable;
  const { MarkSigns, VERDICTS, toggle, useMarks } = gallery.marks;
  const { AskedRead, listReaders } = gallery.readings;
  const { useEffect, useLayoutEffect, useMemo, useRef, useState } = preactHooks;
  const { FoundLarge, Picture, Problem, clip, memo, useKeys, useLoaded, useScrolled } = gallery.parts;

  /* Height of a row in CSS pixels, as in find.css: rows that are not on the screen are not made. */
  const ROW_HEIGHT = 68;
  const PICTURE_SIDE = 60;
  const SPARE_ROWS = 8;
  const PROMPT_LIMIT = 200;
  const DIRECTIONS = { asc: "ascending", desc: "descending" };
  const ARROWS = { ascending: "\u25b2", descending: "\u25bc" };
  const SOURCES = { training: "training steps", evaluations: "evaluations", both: "both" };

  function Find({ params }) {
    const source = Object.hasOwn(SOURCES, params.of) ? params.of : "training";
    const { data, error, progress } = useLoaded((onProgress) => loadImages(source, onProgress), [source]);
    const columns = useMemo(() => listColumns(gallery.run.reward.terms), []);
    const set = (change) => gallery.replace("find", { ...params, ...change });
    return html`<section class="find" aria-labelledby="find-title">
      <h2 id="find-title">Find</h2>
      <p class="lead">
        Every sampled image, as a table or a grid: filter them, sort them by a column's name, and open one in its group.
        Best: of the highest total in its group, ties included. Flat: all totals of its group are equal, so nothing is
        trained on it and none is best. Masked: a term does not apply to its prompt. Canary: in its step a measure of
        the pictures, such as their brightness, left the band of the untrained model, a hint that the policy games its
        reward.
      </p>
      <${Filters} params=${params} source=${source} columns=${columns} set=${set} />
      ${error && html`<${Problem} where="Images" message=${error.message} />`}
      ${data
        ? html`<${Results} data=${data} params=${params} columns=${columns} set=${set} />`
        : !error && html`<p role="status">
            Loading images${progress ? ` (${progress.done} of ${progress.total} files)` : ""}
          </p>`}
    </section>`;
  }

  function Filters({ params, source, columns, set }) {
    const canaries = listCanaries();
    const ranged = columns.filter(isRanged);
    const areRangesSet = ranged.some(({ id }) => BOUNDS.some((bound) => params[`${bound}.${id}`]));
    const [areRangesOpen, setAreRangesOpen] = useState(areRangesSet);
    const hasReaders = listReaders().length > 0;
    const field = (name, type, label, title) => html`<label title=${title}>${label}
      <input type=${type} step="any" value=${params[name] ?? ""}
        onInput=${(event) => set({ [name]: event.currentTarget.value })} />
    </label>`;
    const box = (name, label) => html`<label><input type="checkbox" checked=${Boolean(params[name])}
      onChange=${(event) => set({ [name]: event.currentTarget.checked ? 1 : null })} /> ${label}</label>`;
    const clear = () =>
      gallery.replace("find", clearedParams(params));
    return html`<form role="search" aria-label="Images" class="find-filters"
        onSubmit=${(event) => event.preventDefault()}>
      <div class="toolbar">
        <label>Images of <select value=${source}
            onChange=${(event) => set({ of: event.currentTarget.value, at: null })}>
          ${Object.entries(SOURCES).map(([name, label]) => html`<option key=${name} value=${name}>${label}</option>`)}
        </select></label>
        ${field("text", "search", "Prompt contains")}
        ${hasReaders && field("read", "search", "Reading contains")}
        ${field("id", "search", "Prompt id is")}
        <span class="find-steps">${field("from", "number", "Steps from")} ${field("to", "number", "to")}</span>
      </div>
      <div class="toolbar">
        ${box("best", "best of their group only")}
        ${box("flat", "flat groups only")}
        ${box("masked", "with masked terms only")}
        <label>Canaries <select value=${canaries.length ? (params.canary ?? "") : ""} disabled=${canaries.length === 0}
            onChange=${(event) => set({ canary: event.currentTarget.value })}>
          <option value="">any step</option>
          <option value="any">steps where one left its band</option>
          ${canaries.map((name) => html`<option key=${name} value=${name}>
            steps where ${name} left its band
          </option>`)}
        </select>${canaries.length === 0 && html`<span class="soft">no band to judge by</span>`}</label>
        ${hasReaders && html`<span class="find-letters">
          ${field("wrong", "text", "Letter read wrong", `a letter; ${NO_LETTER}: where none was asked for`)}
          ${field("as", "text", "read as", `a letter; ${NO_LETTER}: where it is missing`)}
        </span>`}
        <label>Marks <select value=${params.mark ?? ""} onChange=${(event) => set({ mark: event.currentTarget.value })}>
          <option value="">any</option>
          ${[...Object.entries(VERDICTS), ["note", "with a note"]].map(([name, label]) => html`<option key=${name}
            value=${name}>${label}</option>`)}
        </select></label>
        <button type="button" onClick=${clear}>Clear filters</button>
      </div>
      <details open=${areRangesOpen} onToggle=${(event) => setAreRangesOpen(event.currentTarget.open)}>
        <summary>Ranges of scores${areRangesSet ? " (set)" : ""}</summary>
        <div class="find-ranges">
          ${ranged.map(({ id, title }) => html`<fieldset key=${id}>
            <legend>${title}</legend>
            ${field(`min.${id}`, "number", "at least")}
            ${field(`max.${id}`, "number", "at most")}
          </fieldset>`)}
        </div>
      </details>
    </form>`;
  }

  /* The way of looking stays. */
  const clearedParams = ({ of, sort, order, show }) => ({ of, sort, order, show });

  function Results({ data, params, columns, set }) {
    const { at, sort, order, show, large, ...filters } = params;
    const filterKey = JSON.stringify(filters);
    const { version, problem } = useMarks();
    const found = useMemo(
      () => filterImages(data.images, params, columns),
      [data, columns, filterKey, params.mark && version],
    );
    const column = columns.find(({ id }) => id === sort);
    const sorted = useMemo(
      () => (column ? sortImages(found, column, order === "desc") : found),
      [found, column, order],
    );
    const place = useMemo(() => sorted.findIndex(({ image }) => image === at), [sorted, at]);
    const open = () => place >= 0 && gallery.go(...addressOf(sorted[place]));
    function move(by) {
      const next = Math.min(Math.max(place < 0 && by < 0 ? 0 : place + by, 0), sorted.length - 1);
      if (sorted[next]) set({ at: sorted[next].image });
    }
    const rows = useMemo(() => sorted.map(({ shared, sample }) => [{ ...shared, sample }]), [sorted]);
    const enlarge = () => place >= 0 && set({ large: 1 });
    const mark = (verdict) => () => place >= 0 && toggle(sorted[place].image, verdict);
    useKeys({ n: () => move(1), p: () => move(-1), o: open, v: enlarge, t: mark("star"), x: mark("reject") });
    return html`
      ${problem && html`<div role="alert"><${Problem} where="Marks" message=${problem} /></div>`}
      ${data.problems.map(({ kind, step, problem }) => html`<${Problem} key=${`${kind} ${step}`}
        where=${`${kind === "training" ? "Step" : "Evaluation at step"} ${step} is left out`} message=${problem} />`)}
      <div class="toolbar">
        <p role="status" class="find-count">
          <strong>${sorted.length.toLocaleString("en")}</strong> of ${data.images.length.toLocaleString("en")} images
        </p>
        <fieldset class="find-show">
          <legend class="visually-hidden">Show as</legend>
          ${["table", "grid"].map((way) => html`<label key=${way}>
            <input type="radio" name="show" checked=${(show === "grid") === (way === "grid")}
              onChange=${() => set({ show: way === "grid" ? way : null })} />${` ${way}`}
          </label>`)}
        </fieldset>
        <div class="buttons">
          <button type="button" disabled=${place <= 0} onClick=${() => move(-1)}>
            Previous <kbd>p</kbd>
          </button>
          <button type="button" disabled=${place >= sorted.length - 1} onClick=${() => move(1)}>
            Next <kbd>n</kbd>
          </button>
        </div>
        <p role="status" class="find-chosen">
          ${place >= 0 && html`${place + 1}: <a href=${gallery.link(...addressOf(sorted[place]))}>
            ${nameOf(sorted[place])}
          </a> <${MarkSigns} image=${sorted[place].image} />`}
        </p>
      </div>
      ${sorted.length === 0
        ? html`<${Nothing} count=${data.images.length} params=${params} />`
        : show === "grid"
          ? html`<${gallery.FindGrid} images=${sorted} place=${place} set=${set} version=${version} move=${move} open=${open} />`
          : html`<${Table} images=${sorted} place=${place} columns=${columns} column=${column} order=${order} set=${set}
              version=${version} keys=${{ ArrowDown: () => move(1), ArrowUp: () => move(-1), Enter: open }} />`}
      ${large && html`<${FoundLarge} rows=${rows} at=${at} onShow=${(image) => set({ at: image })}
        onClose=${() => set({ large: null })} />`}`;
  }

  function Nothing({ count, params }) {
    if (count === 0) {
      return html`<p class="panel">
        No image is stored here yet. After the first training step this page shows them; evaluations have a choice of
        their own, above.
      </p>`;
    }
    return html`<div class="panel">
      <p>Nothing found: none of the ${count.toLocaleString("en")} images passes all filters above.</p>
      <button type="button" onClick=${() => gallery.replace("find", clearedParams(params))}>Show all images</button>
    </div>`;
  }

  /** The rows on the screen out of all of them, between two rows as high as the others. */
  function Table({ images, place, columns, column, order, set, version, keys }) {
    const region = useRef(null);
    const view = useScrolled(region, ROW_HEIGHT);
    useLayoutEffect(() => {
      region.current.scrollTop = 0;
    }, [images]);
    useEffect(() => {
      if (place >= 0) showRow(region.current, place);
    }, [images, place]);
    useEffect(() => {
      /* Not when the images change: who types in a filter stays there. */
      if (place >= 0) region.current.scrollIntoView({ block: "nearest" });
    }, [images[place]]);
    const first = Math.max(0, Math.floor(view.top / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(images.length, Math.ceil((view.top + view.height) / ROW_HEIGHT) + 1 + SPARE_ROWS);
    function onKeyDown(event) {
      /* Links and buttons inside have their own use of these keys. */
      if (event.target !== event.currentTarget || !Object.hasOwn(keys, event.key)) return;
      event.preventDefault();
      keys[event.key]();
    }
    return html`<div class="find-region" ref=${region} tabindex="0" role="region" aria-label="Images found"
        onKeyDown=${onKeyDown}>
      <table aria-rowcount=${images.length + 1}>
        <thead>
          <tr aria-rowindex="1">
            <th scope="col" class="find-picture">Picture</th>
            ${columns.map((each) => html`<${Head} key=${each.id} column=${each}
              isSorted=${each === column} order=${order} set=${set} />`)}
            <th scope="col" class="find-marks">Marks</th>
          </tr>
        </thead>
        <tbody>
          <${Spacer} rows=${first} columns=${columns} />
          ${images.slice(first, last).map((image, index) => html`<${MemoRow} key=${image.image}
            image=${image} columns=${columns} index=${first + index}
            isChosen=${first + index === place} version=${version} set=${set} />`)}
          <${Spacer} rows=${images.length - last} columns=${columns} />
        </tbody>
      </table>
    </div>`;
  }

  function showRow(region, index) {
    const head = region.querySelector("thead").offsetHeight;
    const [top, bottom] = [index * ROW_HEIGHT, (index + 1) * ROW_HEIGHT];
    const lowest = bottom + head - region.clientHeight;
    if (top < region.scrollTop) region.scrollTop = top;
    else if (lowest > region.scrollTop) region.scrollTop = lowest;
  }

  function Spacer({ rows, columns }) {
    if (rows <= 0) return null;
    const style = { height: `${rows * ROW_HEIGHT}px` };
    return html`<tr aria-hidden="true" class="find-spacer">
      <td colspan=${columns.length + 2} style=${style}></td>
    </tr>`;
  }

  /* Terms may have any name, those of other classes too. */
  function classOf({ id, isText }) {
    if (isText) return `find-${id}`;
    return id.startsWith("raw.") ? "find-number" : `find-number find-${id}`;
  }

  function Head({ column, isSorted, order, set }) {
    const { id, title, isText } = column;
    /* The first click brings the highest numbers, or texts from A. */
    const first = isText || id === "step" ? "asc" : "desc";
    const other = order === "asc" ? "desc" : "asc";
    const next = isSorted ? other : first;
    /* The arrow of a column that is not sorted shows what a click would make of it. */
    const direction = DIRECTIONS[isSorted ? order : first] ?? "ascending";
    const sort = () => set({ sort: id, order: next });
    return html`<th scope="col" class=${classOf(column)} aria-sort=${isSorted ? direction : undefined}>
      <button type="button" title=${title} onClick=${sort}>
        ${title}<span aria-hidden="true" class="find-arrow">${ARROWS[direction]}</span>
      </button>
    </th>`;
  }

  function Row({ image, columns, index, isChosen, set }) {
    const { shared, isBest } = image;
    const href = gallery.link(...addressOf(image));
    const { width, height } = gallery.run.picture ?? { width: 1, height: 1 };
    const side = PICTURE_SIDE * Math.min(1, width / height);
    const marks = [
      shared.kind === "evaluation" && "evaluation",
      isBest && "best",
      shared.isFlat && "flat",
      shared.isMasked && "masked",
      shared.departures.length > 0 && "canary",
    ];
    function choose(event) {
      set({ at: image.image });
      const isPlain = !event.ctrlKey && !event.metaKey && !event.shiftKey;
      if (!isPlain || !event.target.closest("a")) return;
      /* The address of this view first gets its choice, for the way back. */
      event.preventDefault();
      gallery.go(...addressOf(image));
    }
    function enlarge(event) {
      /* What the row does on a click would come after it. */
      event.stopPropagation();
      set({ at: image.image, large: 1 });
    }
    return html`<tr aria-rowindex=${index + 2} aria-current=${isChosen ? "true" : undefined} onClick=${choose}>
      <td class="find-picture">
        <${Picture} image=${image.image} alt=${nameOf(image)} size=${side} onOpen=${enlarge}
          attributes=${{ "aria-haspopup": "dialog", tabIndex: -1 }} />
      </td>
      ${columns.map((column) => html`<${Cell} key=${column.id} column=${column} image=${image}
        href=${href} />`)}
      <td class="find-marks">${marks.filter(Boolean).join(", ")}${" "}<${MarkSigns} image=${image.image} /></td>
    </tr>`;
  }

  /* While the table scrolls the rows that stay are not made again. */
  const MemoRow = memo(Row);

  function Cell({ column, image, href }) {
    const value = column.value(image);
    if (column.id === "prompt") {
      return html`<td class=${classOf(column)}><a href=${href} dir="auto">${clip(value, PROMPT_LIMIT)}</a></td>`;
    }
    if (column.id === "reading") {
      return html`<td class=${classOf(column)}><${AskedRead} group=${image.shared.group} sample=${image.sample} isShort /></td>`;
    }
    if (column.isText) return html`<td class=${classOf(column)}><span dir="auto">${clip(value)}</span></td>`;
    return html`<td class=${classOf(column)}>
      ${value == null ? html`<span class="soft">none</span>` : column.show(value)}
    </td>`;
  }

  Find.keyHelp = [
    ["n", "The next image found"],
    ["p", "The previous image found"],
    ["o", "Open the chosen image in its group"],
    ["v", "The chosen image large"],
    ["Arrows, Enter", "The same, while the table or the grid has the focus"],
  ];
  gallery.views.find = Find;
})();
