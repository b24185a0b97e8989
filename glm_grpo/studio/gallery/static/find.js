/* Find: every image of the run as a grid that is filtered, sorted and looked through. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, useShown } = gallery;
  const { addressOf, filterImages, listColumns, loadImages, nameOf, sortImages } = gallery.imageTable;
  const { AskedRead } = gallery.readings;
  const { Filters, SOURCES, countFilters, withoutFilters } = gallery.findFilters;
  const { FoundLarge, ImageButton, Loading, Problem, SizeControls, Terms, Title, clip, fmt, memo } = gallery.parts;
  const { useKeys, useLoaded, useScrolled, useSizes } = gallery.parts;
  const { useEffect, useLayoutEffect, useMemo, useRef } = preactHooks;

  const USUAL_SIZE = 144;
  /* CSS pixels around an image, and of one line below it; rows out of sight are not made. */
  const [PADDING, LINE] = [6, 18];
  const SPARE_ROWS = 3;
  /* Narrower windows begin without the filters. */
  const WIDE = "(min-width: 48rem)";

  const ABOUT = html`
    <p>Every image that the run sampled. Filter the images by typing, or by dragging over a histogram. Click on an
      image to enlarge it.</p>
    <dl>
      <dt>Best of its group</dt><dd>The image has the highest total among the samples of its prompt. Ties count.</dd>
      <dt>Zero-std group</dt><dd>All totals of the group are equal, so the policy learns nothing from it.</dd>
      <dt>Terms that do not apply</dt><dd>At least one term gives no score for the prompt.</dd>
      <dt>Canary</dt><dd>A measure of the images, such as their brightness, that has left the range of the base
        model: a hint that the policy may be gaming its reward.</dd>
    </dl>`;

  function Find({ params }) {
    const source = Object.hasOwn(SOURCES, params.of) ? params.of : "training";
    const { data, error, progress } = useLoaded((onProgress) => loadImages(source, onProgress), [source]);
    const columns = useMemo(() => listColumns(gallery.run.reward.terms), []);
    const set = (change) => gallery.replace("find", { ...params, ...change });
    if (data) return html`<${Images} data=${data} source=${source} columns=${columns} params=${params} set=${set} />`;
    return html`<${Title} name="Find" about=${ABOUT} /><${Loading} what="Images" error=${error} progress=${progress} />`;
  }

  function Images({ data, source, columns, params, set }) {
    const { at, sort, order, large, ...filters } = params;
    const [areFiltersShown, toggleFilters] = useShown("find.filters", matchMedia(WIDE).matches);
    const sizes = useSizes("find", { size: USUAL_SIZE, density: "captions" });
    const found = useMemo(
      () => filterImages(data.images, params, columns),
      [data, columns, JSON.stringify(filters)],
    );
    const column = columns.find(({ id }) => id === sort);
    const isDescending = column && (order ?? firstOrder(column)) === "desc";
    const sorted = useMemo(
      () => (column ? sortImages(found, column, isDescending) : found),
      [found, column, isDescending],
    );
    const place = useMemo(() => sorted.findIndex(({ image }) => image === at), [sorted, at]);
    const rows = useMemo(() => sorted.map(({ shared, sample }) => [{ ...shared, sample }]), [sorted]);
    const chosen = sorted[place];
    const open = () => chosen && gallery.go(...addressOf(chosen));
    function move(by) {
      const next = Math.min(Math.max(place < 0 && by < 0 ? 0 : place + by, 0), sorted.length - 1);
      if (sorted[next]) set({ at: sorted[next].image });
    }
    useKeys({ n: () => move(1), p: () => move(-1), o: open, v: () => chosen && set({ large: 1 }) });
    const active = countFilters(params);
    return html`<${Title} name="Find" about=${ABOUT}>
        <button type="button" aria-expanded=${areFiltersShown} aria-controls="find-filters" onClick=${toggleFilters}>
          Filters${active > 0 && ` (${active})`}
        </button>
        <p role="status" class="find-count">
          <strong>${sorted.length.toLocaleString("en")}</strong> of ${gallery.parts.counted(data.images.length, "image")}
        </p>
        <${Sorting} columns=${columns} column=${column} isDescending=${isDescending} set=${set} />
        <${SizeControls} sizes=${sizes} shown=${USUAL_SIZE} />
        ${chosen && html`<p role="status" class="find-chosen">
          Image ${place + 1}: <a href=${link(...addressOf(chosen))}>${nameOf(chosen)}</a>
        </p>`}
      </${Title}>
      ${data.problems.map(({ kind, step, problem }) => html`<${Problem} key=${`${kind} ${step}`}
        where=${`${kind === "training" ? "Step" : "Evaluation at step"} ${step} is left out`} message=${problem} />`)}
      <div class="find ${areFiltersShown ? "has-filters" : ""}">
        ${areFiltersShown && html`<${Filters} source=${source} images=${data.images} columns=${columns} params=${params} set=${set} />`}
        ${sorted.length === 0
          ? html`<${Nothing} count=${data.images.length} params=${params} />`
          : html`<${Grid} images=${sorted} place=${place} column=${column} sizes=${sizes} set=${set}
              move=${move} open=${open} />`}
      </div>
      ${large && html`<${FoundLarge} rows=${rows} at=${at} onShow=${(image) => set({ at: image })}
        onClose=${() => set({ large: null })} />`}`;
  }

  /* Highest numbers first; texts from A, and steps as they came. */
  const firstOrder = ({ id, isText }) => (isText || id === "step" ? "asc" : "desc");

  function Sorting({ columns, column, isDescending, set }) {
    const ends = column?.isText ? ["A to Z", "Z to A"] : ["Lowest first", "Highest first"];
    return html`<label>Sort by <select value=${column?.id ?? ""}
        onChange=${(event) => set({ sort: event.currentTarget.value, order: null })}>
        <option value="">order of the run</option>
        ${columns.map(({ id, title }) => html`<option key=${id} value=${id}>${title}</option>`)}
      </select></label>
      ${column && html`<button type="button" onClick=${() => set({ order: isDescending ? "asc" : "desc" })}>
        ${ends[Number(isDescending)]}
      </button>`}`;
  }

  function Nothing({ count, params }) {
    if (count === 0) {
      return html`<p class="panel">
        No images yet. They appear here after the first training step. For held-out images, choose
        “evaluations” among the filters.
      </p>`;
    }
    return html`<div class="panel">
      <p>None of the ${count.toLocaleString("en")} images matches all filters.</p>
      <button type="button" onClick=${() => gallery.replace("find", withoutFilters(params))}>Show all images</button>
    </div>`;
  }

  /* Lines below an image: value and step, prompt, asked, read, of prompts that ask for objects, too,
     asked and found; with all figures a line for each term. */
  function countLines(density, images) {
    if (density === "images") return 0;
    const areBoth = images.some(({ shared: { group } }) => group.asked && group.texts.length);
    const lines = areBoth ? 6 : 4;
    return density === "captions" ? lines : lines + gallery.run.reward.terms.length;
  }

  /**
   * The images near the screen out of all of them.
   *
   * @param place Index of the chosen one, -1 for none.
   * @param column That they are sorted by, if any.
   * @param move Chooses the image so many further.
   * @param open Opens the chosen image in its group.
   */
  function Grid({ images, place, column, sizes, set, move, open }) {
    const region = useRef(null);
    const { width, height } = gallery.run.image_size ?? { width: 1, height: 1 };
    const lines = useMemo(() => countLines(sizes.density, images), [sizes.density, images]);
    const cellHeight = Math.ceil((sizes.size * height) / width) + 2 * PADDING + LINE * lines;
    const view = useScrolled(region, cellHeight);
    const columns = Math.max(1, Math.floor(view.width / (sizes.size + 2 * PADDING)));
    const rows = Math.ceil(images.length / columns);
    const first = Math.max(0, Math.floor(view.top / cellHeight) - SPARE_ROWS);
    const last = Math.min(rows, Math.ceil((view.top + view.height) / cellHeight) + SPARE_ROWS);
    useLayoutEffect(() => {
      region.current.scrollTop = 0;
    }, [images]);
    useEffect(() => {
      if (place < 0 || !view.width) return;
      const top = Math.floor(place / columns) * cellHeight;
      const { scrollTop, clientHeight } = region.current;
      if (top < scrollTop) region.current.scrollTop = top;
      else if (top + cellHeight > scrollTop + clientHeight) region.current.scrollTop = top + cellHeight - clientHeight;
    }, [images, place, columns, cellHeight]);
    const keys = {
      ArrowLeft: () => move(-1),
      ArrowRight: () => move(1),
      ArrowUp: () => move(-columns),
      ArrowDown: () => move(columns),
      Enter: open,
    };
    function onKeyDown(event) {
      /* Buttons inside have their own use of these keys. */
      if (event.target !== event.currentTarget || !Object.hasOwn(keys, event.key)) return;
      event.preventDefault();
      keys[event.key]();
    }
    const style = {
      gridTemplateColumns: `repeat(${columns}, minmax(0, 1fr))`,
      gridAutoRows: `${cellHeight}px`,
      paddingTop: `${first * cellHeight}px`,
      paddingBottom: `${Math.max(0, rows - last) * cellHeight}px`,
    };
    return html`<div class="find-region panel" ref=${region} tabindex="0" role="region" aria-label="Images found"
        onKeyDown=${onKeyDown}>
      <ul class="find-grid" style=${style}>
        ${images.slice(first * columns, last * columns).map((image, index) => html`<${Cell} key=${image.image}
          image=${image} column=${column} size=${sizes.size} density=${sizes.density}
          index=${first * columns + index} count=${images.length} set=${set}
          isChosen=${first * columns + index === place} />`)}
      </ul>
    </div>`;
  }

  /* While the grid scrolls the cells that stay are not made again. */
  const Cell = memo(({ image, column, size, density, index, count, isChosen, set }) => {
    const { shared, sample, isBest } = image;
    const { group, step } = shared;
    const value = column?.value(image);
    const isNamed = column && !column.isText && !["step", "total"].includes(column.id);
    function enlarge(event) {
      /* What the cell does on a click would come after it. */
      event.stopPropagation();
      set({ at: image.image, large: 1 });
    }
    return html`<li aria-setsize=${count} aria-posinset=${index + 1} aria-current=${isChosen ? "true" : undefined}
        title=${clip(group.prompt)} onClick=${() => set({ at: image.image })}>
      <${ImageButton} image=${image.image} alt=${nameOf(image)} size=${size} onOpen=${enlarge}
        attributes=${{ "aria-haspopup": "dialog", tabIndex: -1 }} />
      ${density !== "images" && html`
        <span><strong>${isNamed ? `${column.title} ${value == null ? "none" : column.show(value)}` : fmt(group.total[sample])}</strong>${
          isBest && " best"} <span class="soft">step ${step}</span></span>
        <span class="soft" dir="auto">${clip(group.prompt)}</span>
        <${AskedRead} group=${group} sample=${sample} isShort />`}
      ${density === "figures" && html`<${Terms} raw=${group.raw} sample=${sample} />`}
    </li>`;
  });

  Find.keyHelp = [
    ["n p", "Next and previous image"],
    ["v", "Enlarge the chosen image"],
    ["o", "Open the chosen image in its group"],
    ["Arrows, Enter", "In the grid: choose an image, and open it in its group"],
  ];
  gallery.views.find = Find;
})();
