/* Other runs beside this one: the held-out pictures of their newest evaluations, same prompts and
   same seeds.

   A place of the Progress view is {row, step, sample}; in a column of another run `step` is the key
   of that run. A row has its groups of other runs in `beside`, by the same key. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { PromptText, clip, fmt } = parts;
  const { AskedRead } = gallery.readings;

  /* Characters of a run's name in the head of a column. */
  const NAME_LIMIT = 40;

  /** The other runs, in the order of their columns: {key, name, step, alike, is_weighed_alike}. */
  function others() {
    return gallery.run.beside ?? [];
  }

  /** The other run whose key `step` is; undefined for a step of this run. */
  function otherOf(step) {
    return others().find(({ key }) => key === step);
  }

  /** "NAME, step 8": an evaluation of another run in words. */
  function titleOf({ name, step }) {
    return `${clip(name, NAME_LIMIT)}, step ${step}`;
  }

  /** The step of this run's newest evaluation of a prompt. */
  function newestOf(row) {
    return Math.max(...Object.keys(row.bySteps).map(Number));
  }

  /** The group at a place, of whichever run; undefined where there is none. */
  function groupAt({ row, step }) {
    return row.bySteps[step] ?? row.beside[step];
  }

  /** What the large view opens with for a place, as arguments: a picture of another run is what this
     run's newest is held against, and seen first. */
  function opening(place) {
    if (!otherOf(place.step)) return [place];
    return [{ ...place, step: newestOf(place.row) }, place.step];
  }

  /** Pictures of other runs for the large view, of the prompt and sample of a place. */
  function platesOf({ row, sample }) {
    return others()
      .filter(({ key }) => row.beside?.[key]?.images[sample] !== undefined)
      .map((other) => {
        const title = titleOf(other);
        return { key: other.key, title, alt: title, image: row.beside[other.key].images[sample] };
      });
  }

  /** Totals and readings of other runs for the prompt and sample of a place. */
  function BesideFigures({ place: { row, sample } }) {
    const shown = others().filter(({ key }) => row.beside?.[key]?.images[sample] !== undefined);
    if (!shown.length) return null;
    return html`<h3>Other runs</h3>
      ${shown.map((other) => {
        const group = row.beside[other.key];
        return html`<div key=${other.key}>
          <p><${PromptText} text=${other.name} />, step ${other.step}: ${totalWord(other)}${" "}
            ${fmt(group.total[sample])}</p>
          <${AskedRead} group=${group} sample=${sample} />
        </div>`;
      })}`;
  }

  /** What the total of another run is called. */
  function totalWord({ is_weighed_alike: isAlike }) {
    return isAlike ? "total" : "total by its own weights";
  }

  gallery.beside = {
    BesideFigures,
    groupAt,
    newestOf,
    opening,
    otherOf,
    others,
    platesOf,
    titleOf,
    totalWord,
  };
})();
