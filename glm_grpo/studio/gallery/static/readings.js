/* What was asked of an image and what OCR read there: below it, in words, and letter by letter. */
(function () {
  "use strict";

  const { html, parts } = window.glmGallery;
  const { Note, clip } = parts;

  /* Characters of a reading in words: what OCR makes of noise can be long. */
  const SAID_LIMIT = 40;

  const isReading = (note) => note !== null && typeof note === "object";

  /** Names of the OCR terms of the run. */
  function listReaders() {
    const { terms } = window.glmGallery.run.reward;
    return terms.filter(({ kind }) => kind === "ocr").map(({ name }) => name);
  }

  /** What OCR terms read in one sample of a group: [[term, {read, marks, missing}]]. */
  function readingsOf(group, sample) {
    return Object.entries(group.notes)
      .map(([name, notes]) => [name, notes[sample]])
      .filter(([, note]) => isReading(note));
  }

  /** All that was read in one sample, as one text. */
  function textRead(group, sample) {
    return readingsOf(group, sample).map(([, { read }]) => read).join(" ");
  }

  /** "asked OPEN, read OPNN" for one sample of a group; "" where neither is known. */
  function sayReading(group, sample) {
    const asked = group.texts.length ? [`asked ${clip(group.texts.join(" "), SAID_LIMIT)}`] : [];
    const read = readingsOf(group, sample).map(([, note]) => `read ${clip(note.read, SAID_LIMIT) || "nothing"}`);
    return [...asked, ...read].join(", ");
  }

  /**
   * What was asked of one sample and what was read there, wrong letters marked.
   *
   * @param isShort For narrow places: one line each, cut where it ends.
   * @param attributes Of the element.
   */
  function AskedRead({ group, sample, isShort, attributes }) {
    const readings = readingsOf(group, sample);
    if (!group.texts.length && !readings.length) return null;
    return html`<p class=${isShort ? "asked-read is-short" : "asked-read"} ...${attributes}>
      ${group.texts.length > 0 && html`<span class="part"><span class="soft">asked</span>${
        group.texts.map((text) => html`${" "}<span class="asked" dir="auto">${clip(text)}</span>`)}${
        readings.length > 0 && !isShort && ","}</span>`}
      ${readings.map(([name, note]) => html`${" "}<span class="part" key=${name}><span class="soft">${
        readings.length > 1 ? `${name} read` : "read"}</span>${" "}<${Note} note=${note} /></span>`)}
    </p>`;
  }

  /** What was read in one sample, wrong letters marked, where what was asked stands elsewhere. */
  function Read({ group, sample }) {
    const readings = readingsOf(group, sample);
    if (!readings.length) return null;
    return html`<span class="read">
      ${readings.map(([name, note]) => html`<span class="part" key=${name}>${
        readings.length > 1 && html`<span class="soft">${name}</span>${" "}`}<${Note} note=${note} /></span>${" "}`)}
    </span>`;
  }

  window.glmGallery.readings = { AskedRead, Read, listReaders, sayReading, textRead };
})();
