/* Marks: all pictures that were starred, rejected or noted, and their files to download. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { Picture, Problem, Title, fmt, useLoaded } = parts;
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
    const about = html`
      <p>Star, reject or note an image with the buttons below it in Groups and in the large view, or press t, x or m. In
        Find, t and x mark the chosen image.</p>
      <p>${isServed
        ? "Marks are stored with the run, in marks.json."
        : html`This browser keeps your marks. To store them with the run, open the gallery with${" "}
            <code>glm-grpo gallery RUN --serve</code>.`}</p>
      <p>Starred or rejected prompts can be saved as a file to train on. The file names target images by their place in
        the run, so save it in the run's folder and train with <code>data.path=RUN/starred.jsonl</code>.</p>`;
    return html`<${Title} name="Marks" about=${about} />
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
        ${lost > 0 && ` ${lost} more ${lost === 1 ? "belongs" : "belong"} to images that are not in this gallery.`}
      </p>
      ${items.length === 0 && html`<p class="soft">Nothing is marked yet. Enlarge an image and press t to star it, x to
        reject it, or m to write a note.</p>`}
      ${items.length > 0 && html`<${Downloads} items=${items} />`}
      ${SECTIONS.map(([title, isOf]) => html`<${Section} key=${title} title=${title} items=${items.filter(isOf)} />`)}`;
  }

  function Downloads({ items }) {
    const terms = gallery.run.reward.terms.map(({ name }) => name);
    const prompts = (verdict) => items.filter((item) => item.verdict === verdict);
    const download = (verdict, name) => html`<button type="button" disabled=${prompts(verdict).length === 0}
      onClick=${() => save(name, toPrompts(prompts(verdict)), "application/jsonl")}>
      ${name === "starred.jsonl" ? "Prompts of starred images" : "Prompts of rejected images"}
    </button>`;
    return html`<div class="buttons">
        <button type="button" onClick=${() => save("marks.csv", toCsv(items, terms), "text/csv")}>
          All marks as CSV
        </button>
        ${download("star", "starred.jsonl")} ${download("reject", "rejected.jsonl")}
      </div>`;
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
      ${items.length > SHOWN && html`<p class="soft">Showing the first ${SHOWN} of ${items.length}. Find shows all.</p>`}
    </section>`;
  }

  gallery.views.marks = Marks;
})();
