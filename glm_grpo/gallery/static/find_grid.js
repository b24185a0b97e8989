/* The images that Find found as a grid of pictures: those near the screen alone are made. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html } = gallery;
  const { nameOf } = gallery.imageTable;
  const { MarkSigns } = gallery.marks;
  const { AskedRead } = gallery.readings;
  const { Picture, fmt, memo, useScrolled } = gallery.parts;
  const { useEffect, useLayoutEffect, useRef } = preactHooks;

  /* CSS pixels: the least width of a cell, the longest side of a picture, and what stands below. */
  const CELL_WIDTH = 144;
  const PICTURE_SIDE = 132;
  const TEXT_HEIGHT = 76;
  const SPARE_ROWS = 3;

  /**
   * @param images In the order to show.
   * @param place Index of the chosen one, -1 for none.
   * @param set Changes params of the address.
   * @param version Of the marks, which are drawn again with it.
   * @param move Chooses the image so many further.
   * @param open Opens the chosen image in its group.
   */
  function Grid({ images, place, set, version, move, open }) {
    const region = useRef(null);
    const { width, height } = gallery.run.picture ?? { width: 1, height: 1 };
    const side = PICTURE_SIDE * Math.min(1, width / height);
    const cellHeight = Math.ceil((side * height) / width) + TEXT_HEIGHT;
    const view = useScrolled(region, cellHeight);
    const columns = Math.max(1, Math.floor(view.width / CELL_WIDTH));
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
    }, [images, place, columns]);
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
    const shown = images.slice(first * columns, last * columns);
    return html`<div class="find-region" ref=${region} tabindex="0" role="region" aria-label="Images found"
        onKeyDown=${onKeyDown}>
      <ul class="find-grid" style=${style}>
        ${shown.map((image, index) => html`<${Cell} key=${image.image} image=${image} side=${side}
          index=${first * columns + index} count=${images.length} set=${set} version=${version}
          isChosen=${first * columns + index === place} />`)}
      </ul>
    </div>`;
  }

  /* While the grid scrolls the cells that stay are not made again. */
  const Cell = memo(({ image, side, index, count, isChosen, set }) => {
    const { shared, sample, isBest } = image;
    const choose = () => set({ at: image.image });
    function open(event) {
      /* What the cell does on a click would come after it. */
      event.stopPropagation();
      set({ at: image.image, large: 1 });
    }
    return html`<li aria-setsize=${count} aria-posinset=${index + 1} aria-current=${isChosen ? "true" : undefined}
        onClick=${choose}>
      <${Picture} image=${image.image} alt=${nameOf(image)} size=${side} onOpen=${open}
        attributes=${{ "aria-haspopup": "dialog", tabIndex: -1 }} />
      <span><strong>${fmt(shared.group.total[sample])}</strong>${isBest && " best"}${" "}
        <span class="soft">step ${shared.step}</span> <${MarkSigns} image=${image.image} /></span>
      <${AskedRead} group=${shared.group} sample=${sample} isShort />
    </li>`;
  });

  gallery.FindGrid = Grid;
})();
