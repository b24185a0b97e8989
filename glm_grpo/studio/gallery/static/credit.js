/* Credit by place, laid over images: which places earned more than those of the group's other
   images, and what terms found in boxes, such as letters. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { signed, useLoaded } = parts;
  const { useLayoutEffect, useRef, useState } = preactHooks;

  /* Blue-green and orange-red: also for readers who do not tell red from green one is bluish and
     dark, the other yellowish and bright. The same as in credit.css. */
  const MORE = [0, 128, 138];
  const LESS = [232, 89, 12];
  /* Of the scale of a group; the image is still seen through it. */
  const STRONGEST = 0.85;
  /* So many places at most have their numbers written in them. */
  const MOST_NUMBERS = 100;
  /* Of the image's height: what a text needs above its box. */
  const EDGE = 0.1;

  /**
   * Hook: [isOn, toggle]: whether credit is shown; kept in the address. In Groups it is unless the
   * reader turned it off, elsewhere only if they turned it on.
   */
  function useCredit() {
    const { view, params } = gallery.useRoute();
    const isUsual = view === "groups";
    const isOn = params.credit === undefined ? isUsual : params.credit !== "0";
    const other = isOn ? "0" : "1";
    const toggle = () => gallery.replace(view, { ...params, credit: isOn === isUsual ? other : null });
    return [isOn, toggle];
  }

  /**
   * Hook: what places of the images of a step earned, once it is loaded: {data, error}, both empty
   * where `isOn` is false or there is none.
   *
   * @param key Of its data file, `credit` of any group; undefined for a run by image.
   */
  function useCreditOf(key, isOn) {
    const wanted = isOn && key ? key : null;
    return useLoaded(() => (wanted ? gallery.load(wanted) : Promise.resolve(null)), [wanted]);
  }

  /** The button that lays credit over images. */
  function CreditButton({ isOn, toggle, attributes }) {
    return html`<button type="button" aria-pressed=${isOn} onClick=${toggle}
      title="Where in the image the total was earned" ...${attributes}>Credit</button>`;
  }

  /** Largest |credit| of a group, in units. */
  function largestOf({ places }) {
    return Math.max(0, ...places.flat(2).map(Math.abs));
  }

  /** A credit in reward units; the largest of the group has three digits. */
  function say(units, { unit }) {
    return signed(units * unit, Math.max(0, Math.round(-Math.log10(unit))));
  }

  /** What the colours mean; of one group with their scale. */
  function Legend({ credit }) {
    const scale = credit?.scale;
    return html`<p class="credit-legend">
      <span class="credit-scale">${scale ? say(-scale, credit) : "less"}<span class="credit-ramp" aria-hidden="true"></span>${
        scale ? say(scale, credit) : "more"}</span>
      <span><b class="is-more">Blue-green</b> places earned more of the total than the same places do
        in the group's samples on average, ${" "}<b class="is-less">orange</b> places earned less.
        Boxes are what terms found, such as letters that OCR read, and those that name their kind are
        compared with their like, wherever it stands. Boxes that do not raise the term's score are
        dashed.</span>
    </p>`;
  }

  /** The scale of a group's colours, in words. */
  function Scale({ credit }) {
    return html`<span class="soft">${
      largestOf(credit) ? `strongest colour: ${say(credit.scale, credit).replace("+", "\u00b1")}` : "no place differs"
    }</span>`;
  }

  /**
   * The credit of one sample, over its image.
   *
   * @param credit Of its group, as the data file gives it.
   * @param isLarge Write the numbers into the places, where they are few and wide.
   */
  function CreditOver({ credit, sample, isLarge }) {
    const places = credit.places[sample];
    const [rows, columns] = [places.length, places[0].length];
    const canvas = useRef(null);
    const [at, setAt] = useState(null);
    useLayoutEffect(() => paint(canvas.current, places, credit.scale), [places, credit.scale]);
    const look = (event) => {
      const { left, top, width, height } = event.currentTarget.getBoundingClientRect();
      const within = (share, count) => Math.min(Math.max(Math.floor(share * count), 0), count - 1);
      setAt([
        within((event.clientY - top) / height, rows),
        within((event.clientX - left) / width, columns),
      ]);
    };
    const grid = { "--rows": rows, "--columns": columns };
    return html`<span class="credit" style=${grid} onPointerMove=${look} onPointerLeave=${() => setAt(null)}>
      <canvas ref=${canvas} width=${columns} height=${rows} role="img"
        aria-label=${describe(places, credit)}></canvas>
      ${
        isLarge && rows * columns <= MOST_NUMBERS &&
        html`<span class="credit-numbers" aria-hidden="true">${places.flat().map(
          (units, place) => html`<span key=${place}>${say(units, credit)}</span>`,
        )}</span>`
      }
      <${Pieces} pieces=${credit.pieces} sample=${sample} />
      ${
        at &&
        html`<span class="credit-place" style=${{ "--row": at[0], "--column": at[1] }}></span>
          <span class="credit-here">${say(places[at[0]]?.[at[1]] ?? 0, credit)} of the total</span>`
      }
    </span>`;
  }

  function paint(canvas, places, scale) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    places.flat().forEach((units, place) => {
      const alpha = scale ? (Math.abs(units) / scale) * STRONGEST * 255 : 0;
      image.data.set([...(units < 0 ? LESS : MORE), alpha], 4 * place);
    });
    context.putImageData(image, 0, 0);
  }

  /* The most and the least of one image, for those who do not see it. */
  function describe(places, credit) {
    const all = places.flat();
    const where = (units) => {
      const place = all.indexOf(units);
      const columns = places[0].length;
      return `${say(units, credit)} in row ${Math.floor(place / columns) + 1}, column ${(place % columns) + 1}`;
    };
    return `Credit by place: most ${where(Math.max(...all))}; least ${where(Math.min(...all))}`;
  }

  /* A text stands above its box, or at the image's edge in it. */
  function Pieces({ pieces, sample }) {
    const { image_size: size } = gallery.run;
    if (!size) return null;
    const across = (x) => `${(100 * x) / size.width}%`;
    const down = (y) => `${(100 * y) / size.height}%`;
    return Object.values(pieces)
      .flatMap((images) => images[sample])
      .map(([text, isGain, left, top, right, bottom], index) => {
        const place = { left: across(left), top: down(top), width: across(right - left), height: down(bottom - top) };
        const kinds = [...(isGain ? [] : ["is-dashed"]), ...(top < EDGE * size.height ? ["is-at-edge"] : [])];
        return html`<span key=${index} class=${["credit-piece", ...kinds].join(" ")} style=${place}
          aria-hidden="true"><span>${text}</span></span>`;
      });
  }

  gallery.credit = { CreditButton, CreditOver, Legend, Scale, useCredit, useCreditOf };
})();
