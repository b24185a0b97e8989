/* What was asked of an image and what OCR read or a detector found there: below it, in words. */
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

  /** What terms found in one sample of a group that looks for objects, in the same form. */
  function foundIn(group, sample) {
    return Object.entries(group.found ?? {}).map(([name, found]) => [name, found[sample]]);
  }

  /* Texts and what was read of them, objects and what was found of them; neither where unknown. */
  function comparisonsOf(group, sample) {
    return [
      { asked: group.texts, between: " ", verb: "read", readings: readingsOf(group, sample) },
      { asked: group.asked ?? [], between: ", ", verb: "found", readings: foundIn(group, sample) },
    ].filter(({ asked, readings }) => asked.length || readings.length);
  }

  /** All that was read in one sample, as one text. */
  function textRead(group, sample) {
    return readingsOf(group, sample).map(([, { read }]) => read).join(" ");
  }

  /** "asked OPEN, read OPNN" for one sample of a group; "" where neither is known. */
  function sayReading(group, sample) {
    return comparisonsOf(group, sample)
      .flatMap(({ asked, between, verb, readings }) => [
        ...(asked.length ? [`asked ${clip(asked.join(between), SAID_LIMIT)}`] : []),
        ...readings.map(([, note]) => `${verb} ${clip(note.read, SAID_LIMIT) || "nothing"}`),
      ])
      .join(", ");
  }

  /**
   * What was asked of one sample, and what was read or found there, with what is wrong marked.
   *
   * @param isShort For narrow places: one line each, cut where it ends.
   * @param attributes Of the element.
   */
  function AskedRead({ group, sample, isShort, attributes }) {
    return comparisonsOf(group, sample).map(
      ({ asked, between, verb, readings }) => html`<p key=${verb}
        class=${isShort ? "asked-read is-short" : "asked-read"} ...${attributes}>
      ${asked.length > 0 && html`<span class="part"><span class="soft">asked</span>${
        asked.map((each, index) => html`${index ? between : " "}<span class="asked" dir="auto">${clip(each)}</span>`)}${
        readings.length > 0 && !isShort && ","}</span>`}
      ${readings.map(([name, note]) => html`${" "}<span class="part" key=${name} title=${isShort ? note.read : null}><span class="soft">${
        readings.length > 1 ? `${name} ${verb}` : verb}</span>${" "}<${Note} note=${note} /></span>`)}
    </p>`,
    );
  }

  /** What was read or found in one sample, where what was asked stands elsewhere. */
  function Read({ group, sample }) {
    return comparisonsOf(group, sample).map(
      ({ verb, readings }) =>
        readings.length > 0 &&
        html`<span key=${verb} class=${verb}>
      ${readings.map(([name, note]) => html`<span class="part" key=${name}>${
        readings.length > 1 && html`<span class="soft">${name}</span>${" "}`}<${Note} note=${note} /></span>${" "}`)}
    </span>`,
    );
  }

  window.glmGallery.readings = { AskedRead, Read, listReaders, sayReading, textRead };
})();
