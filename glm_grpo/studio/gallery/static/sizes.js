/* How large images are in a view and how much is said below them: remembered for each view. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, useSetting } = gallery;

  const DENSITIES = { images: "Images", captions: "Captions", figures: "All figures" };
  /* CSS pixels; thumbnails have 384. */
  const [SMALLEST, LARGEST, STEP] = [48, 384, 8];

  /**
   * Hook: {size, density, setSize, setDensity, style} of a view. `size` is null until the reader
   * chose one; `style` then sets --thumb.
   *
   * @param view Name under which it is remembered.
   * @param usual {size, density} where the reader chose none; a size of null is that of the style
   *     sheet.
   */
  function useSizes(view, usual) {
    const [storedSize, setSize] = useSetting(`${view}.size`);
    const [storedDensity, setDensity] = useSetting(`${view}.density`);
    const chosen = Number(storedSize);
    const size = chosen >= SMALLEST && chosen <= LARGEST ? chosen : usual.size;
    const density = Object.hasOwn(DENSITIES, storedDensity ?? "") ? storedDensity : usual.density;
    const isOwn = storedSize !== null || storedDensity !== null;
    const reset = () => {
      setSize(null);
      setDensity(null);
    };
    const style = size === null ? {} : { "--thumb": `${size}px` };
    return { size, density, setSize, setDensity, reset: isOwn ? reset : null, style };
  }

  /** Controls for what useSizes gave; `shown` is the size to begin with where that is null. */
  function SizeControls({ sizes, shown }) {
    const { size, density, setSize, setDensity, reset } = sizes;
    return html`<span class="sizes" role="group" aria-label="Images">
      <label>Size
        <input type="range" min=${SMALLEST} max=${LARGEST} step=${STEP} value=${size ?? shown}
          aria-valuetext=${`${size ?? shown} pixels`}
          onInput=${(event) => setSize(event.currentTarget.value)} />
      </label>
      <label>Show
        <select value=${density} onChange=${(event) => setDensity(event.currentTarget.value)}>
          ${Object.entries(DENSITIES).map(
            ([name, title]) => html`<option key=${name} value=${name}>${title}</option>`,
          )}
        </select>
      </label>
      ${reset && html`<button type="button" onClick=${reset}>Usual size</button>`}
    </span>`;
  }

  Object.assign(gallery.parts, { SizeControls, useSizes });
})();
