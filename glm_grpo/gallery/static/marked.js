/* Marks: all pictures that were starred, rejected or noted, and their files to download. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { Picture, Problem, fmt, useLoaded } = parts;
  const { addressOf, loadImages, nameOf } = gallery.imageTable;
  const { MarkButtons, isServed, list, useMarks } = gallery.marks;
  const { save, toCsv, toPrompts } = gallery.markFiles;
  const { AskedRead } = gallery.readings;
  const { useMemo } = preactHooks;

  const SECTIONS = [
    ["Starred", ({ verdict }) => verdict === "star"],
    ["Rejected", ({ verdict }) => verdict === "reject"],
    ["Noted", ({ verdict }) => verdict === null],
  ];
  /* Pictures of a section: who marks more looks through them in Find. */
  const SHOWN = 120;

  function Marks() {
    const { version, problem } = useMarks();
    const { data, error } = useLoaded((onProgress) => loadImages("both", onProgress), []);
    const items = useMemo(() => (data ? join(data.images) : []), [data, version]);
    const lost = data ? list().length - items.length : 0;
    return html`<h2>Marks</h2>
      <p class="lead">
        Star, reject or note a picture with the buttons below it in Groups and in the large view, or with the keys t, x
        and m; in Find, t and x mark the chosen one. ${isServed
          ? "Marks are stored beside the run, in marks.json."
          : html`Opened from disk, this browser keeps them. To store them beside the run, open the gallery
              with${" "}<code>glm-grpo gallery RUN --serve</code>.`}
      </p>
      ${problem && html`<div role="alert"><${Problem} where="Marks" message=${problem} /></div>`}
      ${error && html`<${Problem} where="Images" message=${error.message} />`}
      ${!data && !error && html`<p role="status">Loading images</p>`}
      ${data && html`<${Marked} items=${items} lost=${lost} />`}`;
  }

  /* In the order of the run. */
  function join(images) {
    const marked = new Map(list());
    return images.filter(({ image }) => marked.has(image)).map((image) => ({ ...image, ...marked.get(image.image) }));
  }

  function Marked({ items, lost }) {
    const counts = SECTIONS.map(([title, isOf]) => `${items.filter(isOf).length} ${title.toLowerCase()}`);
    return html`<p role="status">
        ${items.length} marked: ${counts.join(", ")}.
        ${lost > 0 && ` ${lost} more ${lost === 1 ? "is" : "are"} of pictures that this gallery does not have.`}
      </p>
      ${items.length > 0 && html`<${Downloads} items=${items} />`}
      ${SECTIONS.map(([title, isOf]) => html`<${Section} key=${title} title=${title} items=${items.filter(isOf)} />`)}`;
  }

  function Downloads({ items }) {
    const terms = gallery.run.reward.terms.map(({ name }) => name);
    const prompts = (verdict) => items.filter((item) => item.verdict === verdict);
    const download = (verdict, name) => html`<button type="button" disabled=${prompts(verdict).length === 0}
      onClick=${() => save(name, toPrompts(prompts(verdict)), "application/jsonl")}>
      ${name === "starred.jsonl" ? "Prompts of starred pictures" : "Prompts of rejected pictures"}
    </button>`;
    return html`<div class="buttons">
        <button type="button" onClick=${() => save("marks.csv", toCsv(items, terms), "text/csv")}>
          All marks as CSV
        </button>
        ${download("star", "starred.jsonl")} ${download("reject", "rejected.jsonl")}
      </div>
      <p class="soft">
        A prompt file names target images by their place in the run: save it in the run's folder, and train on it
        with <code>data.path=RUN/starred.jsonl</code>.
      </p>`;
  }

  function open(item) {
    const [view, place] = addressOf(item);
    gallery.go(view, { ...place, large: 1 });
  }

  function Section({ title, items }) {
    if (!items.length) return null;
    return html`<section aria-label=${title}>
      <h3>${title}</h3>
      <ul class="marked">
        ${items.slice(0, SHOWN).map((item) => html`<li key=${item.image} class="panel">
          <${Picture} image=${item.image} alt=${nameOf(item)} onOpen=${() => open(item)}
            attributes=${{ "aria-haspopup": "dialog" }} />
          <p><strong>${fmt(item.shared.group.total[item.sample])}</strong>${" "}
            <span class="soft">${item.shared.kind === "evaluation" && "evaluation, "}step ${item.shared.step}</span></p>
          <${AskedRead} group=${item.shared.group} sample=${item.sample} isShort />
          <${MarkButtons} image=${item.image} name=${nameOf(item)} />
        </li>`)}
      </ul>
      ${items.length > SHOWN && html`<p class="soft">The first ${SHOWN} of ${items.length}.</p>`}
    </section>`;
  }

  gallery.views.marks = Marks;
})();
