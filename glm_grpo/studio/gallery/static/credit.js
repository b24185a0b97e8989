/* Credit by place, laid over images: which places earned more than those of the group's other
   images, and what terms found in boxes, such as letters. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { signed, useLoaded } = parts;
  const { useLayoutEffect, useMemo, useRef, useState } = preactHooks;

  /* Blue-green and orange-red: also for readers who do not tell red from green one is bluish and
     dark, the other yellowish and bright. The same as in credit.css. */
  const MORE = [0, 128, 138];
  const LESS = [232, 89, 12];
  /* Of the scale of a group; the image is still seen through it. */
  const STRONGEST = 0.85;
  /* So many places at most have their numbers written in them. */
  const MOST_NUMBERS = 100;
  /* Lines that a caption may be away from its box, where others stand beside it. */
  const MOST_LINES = 3;

  /**
   * Hook: [isOn, toggle]: whether credit is shown. The browser remembers it; an address may say it for
   * whoever opens it.
   */
  function useCredit() {
    const { view, params } = gallery.useRoute();
    const [remembered, remember] = gallery.useSetting("credit");
    const isOn = (params.credit ?? remembered) === "1";
    const toggle = () => {
      remember(isOn ? null : "1");
      gallery.replace(view, { ...params, credit: isOn ? null : "1" });
    };
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
        Boxes are what terms found, such as letters or objects. Those of a kind are compared with
        their like, wherever it stands. Dashed boxes earned nothing, or less than their like.</span>
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
    const pieces = useMemo(
      () => Object.values(credit.pieces).flatMap((images) => images[sample]),
      [credit, sample],
    );
    const findAt = (x, y) =>
      Object.entries(credit.pieces).flatMap(([term, images]) =>
        images[sample]
          .filter((piece) => isIn(piece, x, y))
          .map(([text, , , , , , parts]) => `${term}: ${[text, ...sayParts(parts)].join(" ")}`),
      );
    useLayoutEffect(() => paint(canvas.current, places, credit.scale), [places, credit.scale]);
    const look = (event) => {
      const { left, top, width, height } = event.currentTarget.getBoundingClientRect();
      const within = (share, count) => Math.min(Math.max(Math.floor(share * count), 0), count - 1);
      const [x, y] = [(event.clientX - left) / width, (event.clientY - top) / height];
      setAt({ row: within(y, rows), column: within(x, columns), found: findAt(x, y) });
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
      <${Pieces} pieces=${pieces} isLarge=${isLarge} />
      ${
        at &&
        html`<span class="credit-place" style=${{ "--row": at.row, "--column": at.column }}></span>
          <span class="credit-here">${say(places[at.row]?.[at.column] ?? 0, credit)} of the total${
            at.found.map((text) => html`<br />${text}`)}</span>`
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

  /* Whether a box has a point of the image, 0 to 1. */
  function isIn([, , left, top, right, bottom], x, y) {
    const { width, height } = gallery.run.image_size ?? {};
    return left <= x * width && x * width <= right && top <= y * height && y * height <= bottom;
  }

  /* What the parts of a piece earned more than their like, where they did; the one part of a letter
     needs no word. */
  function sayParts(parts = []) {
    const said = parts.map(([word, value]) => [parts.length > 1 ? `${word} ` : "", signed(value)]);
    return said.filter(([, value]) => Number(value) !== 0).map(([word, value]) => word + value);
  }

  /* What terms found. A caption stands as near to its box as the others let it; where there is no
     room, as in small images, pointing at the box says it. */
  function Pieces({ pieces, isLarge }) {
    const { image_size: size } = gallery.run;
    const layer = useRef(null);
    useLayoutEffect(() => {
      if (!layer.current) return undefined;
      /* It also calls when it begins. */
      const observer = new ResizeObserver(() => placeCaptions(layer.current));
      observer.observe(layer.current);
      return () => observer.disconnect();
    }, [pieces, isLarge]);
    if (!size) return null;
    const across = (x) => `${(100 * x) / size.width}%`;
    const down = (y) => `${(100 * y) / size.height}%`;
    return html`<span class="credit-pieces" ref=${layer} aria-hidden="true">
      ${pieces.map(([text, isGain, left, top, right, bottom, parts = []], index) => {
        const place = { left: across(left), top: down(top), width: across(right - left), height: down(bottom - top) };
        const earned = isLarge && parts.length > 1 ? sayParts(parts).join(", ") : "";
        return html`<span key=${index} class=${isGain ? "credit-piece" : "credit-piece is-dashed"} style=${place}>
          <span class=${text.length > 2 ? "credit-caption is-long" : "credit-caption"}>${text}${
            earned && html`<br /><small>${earned}</small>`}</span></span>`;
      })}
    </span>`;
  }

  /* Above its box, in it or below it: the nearest place in the image where no other caption is.
     What was lost comes first. Numbers of places are covered only if there is no other place. */
  function placeCaptions(layer) {
    const { left: x, top: y, width, height } = layer.getBoundingClientRect();
    const rectOf = (element) => {
      const { left, top, right, bottom } = element.getBoundingClientRect();
      return [left - x, top - y, right - x, bottom - y];
    };
    const numbers = [...layer.parentElement.querySelectorAll(".credit-numbers span")].map(rectOf);
    const captions = [...layer.querySelectorAll(".credit-caption")].map((caption) => ({
      style: caption.style,
      isLoss: caption.parentElement.matches(".is-dashed"),
      box: rectOf(caption.parentElement),
      size: { wide: caption.offsetWidth, high: caption.offsetHeight },
    }));
    const taken = [];
    for (const { style, box, size } of captions.sort((one, other) => other.isLoss - one.isLoss)) {
      const free = placesOf(box, size, width)
        .filter(([, top, , bottom]) => top >= 0 && bottom <= height)
        .filter((rect) => !taken.some((other) => isOver(rect, other)));
      const place = free.find((rect) => !numbers.some((other) => isOver(rect, other))) ?? free[0];
      style.visibility = place ? "" : "hidden";
      if (!place) continue;
      taken.push(place);
      style.left = `${place[0] - box[0]}px`;
      style.top = `${place[1] - box[1]}px`;
    }
  }

  /* Where a caption may stand, best first. */
  function placesOf([left, top, right, bottom], { wide, high }, width) {
    const x = Math.max(Math.min((left + right - wide) / 2, width - wide), 0);
    const [above, below, ...others] = [...Array(MOST_LINES).keys()].flatMap((line) => [
      top - (line + 1) * high,
      bottom + line * high,
    ]);
    return [above, top, below, bottom - high, ...others].map((y) => [x, y, x + wide, y + high]);
  }

  function isOver([left, top, right, bottom], [otherLeft, otherTop, otherRight, otherBottom]) {
    return left < otherRight && otherLeft < right && top < otherBottom && otherTop < bottom;
  }

  gallery.credit = { CreditButton, CreditOver, Legend, Scale, useCredit, useCreditOf };
})();
