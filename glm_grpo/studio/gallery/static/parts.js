/* Components that the views share, and how numbers are written. Prompts and notes are data: they
   reach the page as text nodes only. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html } = gallery;
  const { useId, useState } = preactHooks;

  const MINUS = "\u2212";
  const PROMPT_LIMIT = 160;
  /* Characters of an identifier in headings and names of images. */
  const CLIP_LIMIT = 80;
  /* Images narrower than this (pixels) keep their pixels sharp when they are enlarged. */
  const SMALL_WIDTH = 256;
  const TERM_COLOURS = 8;
  const LAZY = { loading: "lazy", decoding: "async" };

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  /* An image that a term refused has no score, null in the data and NaN in what is computed. */
  const isKnown = (value) => value !== null && !Number.isNaN(value);
  /** The mean of what is known; NaN where nothing is. */
  function mean(values) {
    const known = values.filter(isKnown);
    return sum(known) / known.length;
  }

  /** The number of `numbers` (not empty) that is nearest to `wanted`; the first for no number. */
  function nearest(wanted, numbers) {
    const distance = (number) => Math.abs(number - wanted);
    return numbers.reduce((best, number) => (distance(number) < distance(best) ? number : best));
  }

  /** A number with three decimals and a true minus sign; "none" for what is not finite. */
  function fmt(value, digits = 3) {
    if (typeof value !== "number" || !Number.isFinite(value)) return "none";
    const text = Math.abs(value).toFixed(digits);
    return value < 0 && Number(text) !== 0 ? MINUS + text : text;
  }

  /** As fmt, with a plus sign above zero. */
  function signed(value, digits = 3) {
    const text = fmt(value, digits);
    return value > 0 && Number(text) !== 0 ? `+${text}` : text;
  }

  /** A number with its noun, such as "1 step" and "1,200 steps". */
  const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

  /** A fraction as "12.5 %". */
  function percent(fraction, digits = 1) {
    const text = fmt(fraction * 100, digits);
    return text === "none" ? text : `${text} %`;
  }

  /** Class of a change: "better", "worse" or none where it rounds to zero. */
  function changeClass(change) {
    const text = signed(change);
    return text.startsWith("+") ? "better" : text.startsWith(MINUS) ? "worse" : "";
  }

  /** The colour of a term, the same in every view, as a CSS value. */
  function termColour(name) {
    const index = gallery.run.reward.terms.findIndex((term) => term.name === name);
    return `var(--term-${Math.max(index, 0) % TERM_COLOURS})`;
  }

  const encodePath = (path) => path.split("/").map(encodeURIComponent).join("/");
  /** Addresses of an image that is given relative to images/. */
  const fullUrl = (image) => `../images/${encodePath(image)}`;
  const thumbUrl = (image) => `thumbs/${encodePath(image.replace(/\.[^./]*$/, ""))}.webp`;

  /**
   * A button that is an image: its thumbnail, or the stored image where that is missing;
   * "image missing" where both are.
   *
   * @param image Path relative to images/, or null.
   * @param target Path of the target relative to images/; needed with isDiff.
   * @param alt What the image is, for those who do not see it.
   * @param size Width in CSS pixels; without it the image fills its place.
   * @param isDiff Show the brightened difference to the target instead.
   * @param over What is laid over the image.
   * @param onOpen Called by a click.
   * @param attributes Of the button, for instance tabIndex.
   */
  function ImageButton({ image, target, alt, size, isDiff, over, onOpen, attributes }) {
    const { width, height } = gallery.run.image_size ?? { width: SMALL_WIDTH, height: SMALL_WIDTH };
    const style = {
      "--image-width": size ? `${size}px` : "100%",
      aspectRatio: `${width} / ${height}`,
    };
    const kind = width < SMALL_WIDTH ? "image is-pixelated" : "image";
    const absence = !image
      ? "image missing"
      : isDiff && !target
        ? "no target to compare with"
        : null;
    if (absence) {
      return html`<span class=${kind} style=${style} ...${attributes}>
        <span class="is-missing">${absence}</span>
      </span>`;
    }
    const layer = (path, text) =>
      html`<${Layer} key=${path} path=${path} alt=${text} attributes=${LAZY} />`;
    const layers = isDiff
      ? html`<span class="difference">
          ${layer(target, "")}${layer(image, `Difference to the target: ${alt}`)}
        </span>`
      : layer(image, alt);
    const shared = { class: kind, style, ...attributes };
    return html`<button type="button" onClick=${onOpen} ...${shared}>${layers}${over}</button>`;
  }

  /** An image in its place: with `isFull` the stored one, else its thumbnail; each stands in for the
      other, and a text for both. */
  function Layer({ path, alt, isFull, attributes }) {
    const [failures, setFailures] = useState(0);
    const sources = isFull ? [fullUrl(path), thumbUrl(path)] : [thumbUrl(path), fullUrl(path)];
    if (failures >= sources.length) {
      return html`<span class="is-missing">
        image missing<span class="visually-hidden">: ${alt}</span>
      </span>`;
    }
    return html`<img key=${failures} src=${sources[failures]} alt=${alt}
      onError=${() => setFailures(failures + 1)} ...${attributes} />`;
  }

  /**
   * The range that bars of a group need: lowest and highest end of any sample's stack.
   *
   * @param parts As scoring.contributions gives them: {name: [G numbers] | null}.
   */
  function stackExtent(parts) {
    const columns = Object.values(parts).filter(Boolean);
    const count = columns.length ? columns[0].length : 0;
    const extent = { low: 0, high: 0 };
    for (let sample = 0; sample < count; sample++) {
      const values = columns.map((column) => column[sample]);
      extent.low = Math.min(extent.low, sum(values.filter((value) => value < 0)));
      extent.high = Math.max(extent.high, sum(values.filter((value) => value > 0)));
    }
    return extent;
  }

  /**
   * One image's scores: a bar of the parts that add up to the total, and a row for each term.
   *
   * @param parts {name: number | null}: what each term adds; null where it does not apply.
   * @param raw {name: number | null}: the score as the term gave it; NaN where it refused the image.
   * @param total Of the parts.
   * @param extent As stackExtent gives it, so that bars of a group share one scale.
   * @param hasParts Show the parts as numbers, too.
   */
  function Scores({ parts, raw, total, extent, hasParts }) {
    const known = gallery.run.reward.terms.map((term) => term.name).filter((name) => name in raw);
    const terms = [...known, ...Object.keys(raw).filter((name) => !known.includes(name))];
    return html`
      <${StackedBar} parts=${parts} terms=${terms} extent=${extent} />
      <table class="scores">
        <thead>
          <tr><th scope="col">Term</th><th scope="col">Score</th>${hasParts && html`<th scope="col">Part</th>`}</tr>
        </thead>
        <tbody>
          ${terms.map(
            (name) =>
              html`<${ScoreRow} key=${name} name=${name} raw=${raw[name]} part=${parts[name]} hasPart=${hasParts} />`,
          )}
        </tbody>
        <tfoot>
          <tr><th scope="row">Total</th>${hasParts && html`<td></td>`}<td>${fmt(total)}</td></tr>
        </tfoot>
      </table>`;
  }

  function ScoreRow({ name, raw, part, hasPart }) {
    const swatch = html`<span class="swatch" style=${{ background: termColour(name) }}></span>`;
    const isMasked = raw === null || raw === undefined;
    return html`<tr class=${isMasked ? "is-masked" : ""}>
      <th scope="row">${swatch}${name}</th>
      <td>${isMasked ? html`<span aria-label="does not apply" role="img">–</span>` : fmt(raw)}</td>
      ${hasPart && html`<td>${isMasked || part === undefined ? "" : fmt(part)}</td>`}
    </tr>`;
  }

  function StackedBar({ parts, terms, extent }) {
    const range = extent.high - extent.low || 1;
    const ends = { below: 0, above: 0 };
    const place = (value) => `${((value - extent.low) / range) * 100}%`;
    const pieces = terms
      .filter((name) => parts[name])
      .map((name) => {
        const side = parts[name] < 0 ? "below" : "above";
        const start = Math.min(ends[side], ends[side] + parts[name]);
        ends[side] += parts[name];
        const style = {
          left: place(start),
          width: `${(Math.abs(parts[name]) / range) * 100}%`,
          background: termColour(name),
        };
        const title = `${name} ${signed(parts[name])}`;
        return html`<span key=${name} class="piece" style=${style} title=${title}></span>`;
      });
    return html`<div class="bar" aria-hidden="true">
      ${pieces}<span class="zero" style=${{ left: place(0) }}></span>
    </div>`;
  }

  /** What a term found in an image: text, or an OCR reading with its wrong letters marked. */
  function Note({ note }) {
    if (note === null || note === undefined) return null;
    const text = typeof note === "string" ? note : note.read;
    if (!text) return html`<span class="note soft">nothing</span>`;
    if (typeof note === "string") return html`<span class="note" dir="auto">${text}</span>`;
    const wrong = note.marks.filter(([, isRight]) => !isRight).map(([piece]) => piece);
    const missing = [...note.missing];
    const faults = [
      ...(wrong.length ? [`wrong: ${wrong.join(", ")}`] : []),
      ...(missing.length ? [`missing: ${missing.join(", ")}`] : []),
    ];
    return html`<span class="note" dir="auto">
      ${note.marks.map(([piece, isRight]) =>
        isRight ? piece : html`<mark class="wrong">${piece}</mark>`,
      )}
      ${
        missing.length > 0 &&
        html`${" "}<mark class="wrong" aria-hidden="true">no ${missing.join(", ")}</mark>`
      }
      <span class="visually-hidden"> (${faults.join("; ") || "all right"})</span>
    </span>`;
  }

  /** Notes of the terms on one sample of a group. Readings and objects that were found stand below
      the image itself; a term that found objects says here what is wrong with them. */
  function Notes({ group: { notes, found: objects = {} }, sample }) {
    const found = Object.entries(notes).filter(
      ([name, texts]) => typeof texts[sample] === "string" && (texts[sample] || !objects[name]),
    );
    return (
      found.length > 0 &&
      html`<dl class="notes">
      ${found.map(
        ([name, texts]) => html`<div key=${name}>
        <dt>${objects[name] ? name : `${name} found`}</dt>
        <dd><${Note} note=${texts[sample]} /></dd>
      </div>`,
      )}
    </dl>`
    );
  }

  /** Something that is wrong with the run's data, shown where that data would have been. */
  function Problem({ where, message, children }) {
    return html`<div class="problem" role="note">
      <p><strong>${where || "Problem"}:</strong> ${message}</p>
      ${children}
    </div>`;
  }

  /** What stands in the place of data that useLoaded has not brought: `what` they are. */
  function Loading({ what, error, progress }) {
    if (error) return html`<${Problem} where=${what} message=${error.message} />`;
    const files = progress ? ` (${progress.done} of ${progress.total} files)` : "";
    return html`<p role="status">Loading ${what.toLowerCase()}${files}</p>`;
  }

  /** The beginning of a text; by code points, so that no emoji is cut in two. */
  function clip(text, limit = CLIP_LIMIT) {
    const start = Array.from(text.slice(0, 2 * limit))
      .slice(0, limit)
      .join("");
    return start.length < text.length ? `${start}\u2026` : text;
  }

  /** A prompt as text, whatever it holds; long ones are cut until their button is pressed. */
  function PromptText({ text, limit = PROMPT_LIMIT }) {
    const [isOpen, setIsOpen] = useState(false);
    const start = clip(text, limit);
    const isLong = start !== text;
    return html`<span class="prompt-text">
      <span dir="auto">${isOpen ? text : start}</span>
      ${isLong && " "}
      ${
        isLong &&
        html`<button type="button" class="more" aria-expanded=${isOpen}
        onClick=${() => setIsOpen(!isOpen)}>
        ${isOpen ? "less" : `more (${text.length.toLocaleString("en")} characters)`}
      </button>`
      }
    </span>`;
  }

  /** The score of every term of one sample, as a list. */
  function Terms({ raw, sample }) {
    return html`<dl class="cell-terms">
      ${Object.entries(raw).map(
        ([name, values]) => html`<div key=${name}>
          <dt title=${name}>${name}</dt>
          <dd>${values === null ? "none" : fmt(values[sample])}</dd>
        </div>`,
      )}
    </dl>`;
  }

  /**
   * The first line of a view: its heading, an explanation behind an "i", and its controls.
   *
   * @param about What the "i" opens.
   */
  function Title({ name, about, children }) {
    const id = useId();
    return html`<div class="view-head">
      <h2>${name}</h2>
      ${about && html`<button type="button" class="info" popovertarget=${id} aria-label=${`About ${name}`}>i</button>
        <div id=${id} popover="auto" class="about panel">${about}</div>`}
      ${children}
    </div>`;
  }

  Object.assign(gallery.parts, {
    ImageButton,
    Layer,
    Loading,
    Notes,
    Note,
    Problem,
    PromptText,
    Scores,
    Terms,
    Title,
    changeClass,
    clip,
    counted,
    fmt,
    fullUrl,
    isKnown,
    mean,
    nearest,
    percent,
    signed,
    stackExtent,
    sum,
    termColour,
  });
})();
