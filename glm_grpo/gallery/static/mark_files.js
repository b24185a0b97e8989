/* Marks as files to download: a table of all, and prompts to train on. Pure functions but `save`. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { textRead } = gallery.readings;

  /* What a program for tables would take for a formula. */
  const FORMULA = /^[=+\-@\t\r]/;

  const textCell = (text) => quote(FORMULA.test(text) ? `'${text}` : text);
  const quote = (text) => (/[",\r\n']/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const numberCell = (value) => (value == null ? "" : String(value));

  /**
   * A table as CSV (RFC 4180), one row a marked picture. Texts that begin like a formula get an
   * apostrophe before them.
   *
   * @param items [{image, verdict, note, shared, sample}], `shared` and `sample` as of loadImages.
   * @param terms Names of the terms.
   */
  function toCsv(items, terms) {
    const head = ["mark", "note", "kind", "step", "prompt_id", "prompt", "asked", "read", "sample", "total", "image"];
    const rows = items.map(({ image, verdict, note, shared, sample }) => {
      const { kind, step, group } = shared;
      return [
        verdict ?? "", textCell(note), kind, String(step), textCell(group.prompt_id), textCell(group.prompt),
        textCell(group.texts.join(" ")), textCell(textRead(group, sample)), String(sample),
        numberCell(group.total[sample]), textCell(`images/${image}`),
        ...terms.map((name) => numberCell(group.raw[name]?.[sample])),
      ];
    });
    return [[...head, ...terms.map(textCell)], ...rows].map((row) => `${row.join(",")}\r\n`).join("");
  }

  /** The prompts of marked pictures, each once, as `data.path` takes them: one JSON object a line.
     Paths of pictures are relative to the run's folder. */
  function toPrompts(items) {
    const found = new Map();
    const ids = new Map();
    items.forEach(({ shared: { group } }) => {
      const key = JSON.stringify([group.prompt_id, group.prompt, group.texts]);
      if (found.has(key)) return;
      /* Prompts trained on and held out may share an id. */
      const count = (ids.get(group.prompt_id) ?? 0) + 1;
      ids.set(group.prompt_id, count);
      const id = count === 1 ? group.prompt_id : `${group.prompt_id}-${count}`;
      const target = group.target === null ? {} : { target: `images/${group.target}` };
      const sources = group.sources?.length ? { sources: group.sources.map((name) => `images/${name}`) } : {};
      found.set(key, { id, prompt: group.prompt, text: group.texts, ...target, ...sources });
    });
    return [...found.values()].map((prompt) => `${JSON.stringify(prompt)}\n`).join("");
  }

  /** Hand a text to the browser as a download. */
  function save(name, text, type) {
    const address = URL.createObjectURL(new Blob([text], { type }));
    const anchor = document.createElement("a");
    anchor.href = address;
    anchor.download = name;
    anchor.click();
    /* Not at once: the browser reads it after this. */
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  }

  gallery.markFiles = { save, toCsv, toPrompts };
})();
