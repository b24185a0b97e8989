/* Stars, rejections and notes of pictures: kept beside the run where its gallery is served by
   `glm-grpo gallery RUN --serve`, else in this browser. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts } = gallery;
  const { useEffect, useId, useReducer, useRef, useState } = preactHooks;

  const ADDRESS = "../marks.json";
  /* As LONGEST_NOTE of glm_grpo/gallery/marks.py. */
  const LONGEST_NOTE = 2000;
  const VERDICTS = { star: "starred", reject: "rejected" };
  const NOTHING = { verdict: null, note: "" };

  const isServed = location.protocol.startsWith("http");
  const marks = new Map();
  const listeners = new Set();
  const state = { problem: null, isLoaded: false };

  const storageKey = () => `glm-grpo marks of ${location.pathname}`;

  /** {verdict: "star" | "reject" | null, note} of a picture. */
  const markOf = (image) => marks.get(image) ?? NOTHING;

  function notify() {
    listeners.forEach((listener) => listener());
  }

  function put(image, mark) {
    if (mark.verdict === null && !mark.note) marks.delete(image);
    else marks.set(image, mark);
  }

  /* Marks may come from a file that anyone wrote. */
  function readAll(entries) {
    for (const [image, { verdict, note }] of Object.entries(entries ?? {})) {
      put(image, { verdict: Object.hasOwn(VERDICTS, verdict ?? "") ? verdict : null, note: String(note ?? "") });
    }
  }

  async function loadAll() {
    if (state.isLoaded) return;
    state.isLoaded = true;
    readAll(gallery.run.marks);
    if (isServed) await fetchAll();
    else readAll(readStored());
    notify();
  }

  async function fetchAll() {
    try {
      const answer = await fetch(ADDRESS);
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      marks.clear();
      readAll(await answer.json());
    } catch (error) {
      state.problem = `marks.json cannot be read (${error.message}).`;
    }
  }

  /* What differs from the run's own marks; a browser may refuse to keep anything. */
  function readStored() {
    try {
      return JSON.parse(localStorage.getItem(storageKey()) ?? "{}");
    } catch {
      return {};
    }
  }

  function store(image, mark) {
    try {
      localStorage.setItem(storageKey(), JSON.stringify({ ...readStored(), [image]: mark }));
    } catch {
      state.problem = "this browser does not keep marks for pages from disk. Download them in Marks before you close the page.";
    }
  }

  async function send(image, mark) {
    const before = markOf(image);
    put(image, mark);
    notify();
    const request = {
      method: "PUT",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ image, ...mark }),
    };
    try {
      const answer = await fetch(ADDRESS, request);
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      state.problem = null;
    } catch (error) {
      put(image, before);
      state.problem = `the mark was not stored (${error.message}). Check that glm-grpo gallery --serve is still running.`;
    }
    notify();
  }

  /** Change the mark of a picture: `change` of {verdict, note}. */
  function setMark(image, change) {
    const mark = { ...markOf(image), ...change };
    if (isServed) {
      send(image, mark);
      return;
    }
    put(image, mark);
    store(image, mark);
    notify();
  }

  /** A verdict, or none where the picture has it already. */
  function toggle(image, verdict) {
    setMark(image, { verdict: markOf(image).verdict === verdict ? null : verdict });
  }

  /** Hook: {version, problem}; drawn again at every change, of which `version` counts. */
  function useMarks() {
    const [version, update] = useReducer((count) => count + 1, 0);
    useEffect(() => {
      listeners.add(update);
      loadAll();
      return () => listeners.delete(update);
    }, []);
    return { version, problem: state.problem };
  }

  /**
   * Star, reject and note one picture.
   *
   * @param image Path relative to images/.
   * @param name What the picture is, for those who do not see it, where several are on the page.
   * @param areKeysOn Whether t, x and m do the same, as where one picture alone is before the reader.
   * @param isInDialog Whether that is in a dialog.
   */
  function MarkButtons({ image, name = "this image", areKeysOn, isInDialog }) {
    useMarks();
    const id = useId();
    const [isOpen, setIsOpen] = useState(false);
    const { verdict, note } = markOf(image);
    const [draft, setDraft] = useState(null);
    const opener = useRef(null);
    /* The field is there as long as it has the focus: what is typed then never reaches the page's keys. */
    const keep = () => {
      if (draft !== null && draft !== note) setMark(image, { note: draft.trim() });
      setDraft(null);
      setIsOpen(false);
    };
    function leave(event) {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      /* A dialog around it stays. */
      event.preventDefault();
      opener.current.focus();
    }
    const press = (wanted, sign, label) => html`<button type="button" class="mark-button is-${wanted}"
      aria-pressed=${verdict === wanted} aria-label="${label} ${name}" title=${label}
      onClick=${() => toggle(image, wanted)}><span aria-hidden="true">${sign}</span></button>`;
    return html`<div class="mark-buttons">
      ${areKeysOn && html`<${Keys} image=${image} isInDialog=${isInDialog} onNote=${() => setIsOpen(true)} />`}
      ${press("star", verdict === "star" ? "\u2605" : "\u2606", "Star")}
      ${press("reject", "\u2715", "Reject")}
      <button type="button" class="mark-button" ref=${opener} aria-expanded=${isOpen} aria-controls=${id} aria-label="Note on ${name}"
        title="Note" onMouseDown=${(event) => isOpen && event.preventDefault()} onClick=${() => (isOpen ? opener.current.focus() : setIsOpen(true))}><span aria-hidden="true">\u270e</span></button>
      ${note && !isOpen && html`<span class="mark-note" dir="auto">${note}</span>`}
      <span id=${id} class="mark-field">${isOpen && html`<input type="text" aria-label="Note on ${name}" maxlength=${LONGEST_NOTE}
        ref=${focusOnce} value=${draft ?? note} onInput=${(event) => setDraft(event.currentTarget.value)} onBlur=${keep}
        onKeyDown=${leave} />`}</span>
    </div>`;
  }

  /* Called with the element as it enters the page, and again, with the same one, as it is redrawn. */
  function focusOnce(field) {
    if (field && !field.dataset.wasFocused) {
      field.dataset.wasFocused = "true";
      field.focus();
    }
  }

  function Keys({ image, isInDialog, onNote }) {
    parts.useKeys({ t: () => toggle(image, "star"), x: () => toggle(image, "reject"), m: onNote }, { isInDialog });
    return null;
  }

  /** The signs of a picture's mark, with their words for those who do not see them. */
  function MarkSigns({ image }) {
    const { verdict, note } = markOf(image);
    return html`${verdict !== null && html`<span class="mark-sign is-${verdict}" aria-hidden="true">${
      verdict === "star" ? "\u2605" : "\u2715"}</span><span class="visually-hidden">${VERDICTS[verdict]}</span>`}
    ${note && html`${" "}<span class="mark-note" dir="auto">${note}</span>`}`;
  }

  gallery.marks = {
    MarkButtons, MarkSigns, VERDICTS, isServed, list: () => [...marks.entries()], markOf, toggle, useMarks,
    keyHelp: [["t x m", "Star, reject or note the enlarged image, or the one chosen in Find"]],
  };
})();
