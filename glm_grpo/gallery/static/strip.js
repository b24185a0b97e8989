/* Film: one prompt through all steps, as a strip of pictures and as a film that plays. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts } = gallery;
  const { FoundLarge, Loading, Picture, Problem, PromptText, SizeControls, Terms, Title } = parts;
  const { changeClass, clip, fmt, fullUrl, signed, thumbUrl, useKeys, useLoaded, useSizes } = parts;
  const { useEffect, useMemo, useRef, useState } = preactHooks;

  const KINDS = { evaluations: "held-out prompts", training: "training prompts" };
  const BEST = "best";
  const SPEEDS = { 0.5: "1 in 2 seconds", 1: "1 a second", 2: "2 a second", 4: "4 a second", 8: "8 a second" };
  const USUAL_SPEED = "2";
  const USUAL_SIZE = 128;

  const set = (change) => gallery.replace("film", { ...gallery.route().params, ...change });

  const ABOUT = html`
    <p>One prompt through all steps of the run. Held-out prompts are sampled with the same seeds at every evaluation.
      Training prompts are listed if more than one step used them.</p>
    <p>To save a film as a file: <code>glm-grpo gallery RUN --film FILE.gif --prompt ID</code></p>`;

  function Film({ params }) {
    const kind = Object.hasOwn(KINDS, params.of ?? "") ? params.of : "evaluations";
    const { data, error, progress } = useLoaded(
      (onProgress) => loadPrompts(kind, onProgress),
      [kind],
    );
    if (data) return html`<${Prompts} kind=${kind} prompts=${data} params=${params} />`;
    return html`<${Title} name="Film" about=${ABOUT} /><${Loading} what="Steps" error=${error} progress=${progress} />`;
  }

  /* Promises [[prompt_id, [{step, group}]]] with the steps in order. */
  async function loadPrompts(kind, onProgress) {
    const entries = kind === "training" ? await gallery.loadSteps(onProgress) : await loadAll();
    const prompts = new Map();
    for (const { step, groups } of entries) {
      for (const group of groups ?? []) {
        if (!prompts.has(group.prompt_id)) prompts.set(group.prompt_id, []);
        prompts.get(group.prompt_id).push({ step, group });
      }
    }
    return [...prompts].filter(([, steps]) => kind === "evaluations" || steps.length > 1);
  }

  function loadAll() {
    return Promise.all(
      gallery.run.evaluations.map(({ step, key }) =>
        gallery.load(key).catch((error) => ({ step, problem: error.message })),
      ),
    );
  }

  function Prompts({ kind, prompts, params }) {
    const at = Math.max(
      0,
      prompts.findIndex(([id]) => id === params.prompt),
    );
    const isUnknown = params.prompt !== undefined && prompts[at]?.[0] !== params.prompt;
    const show = (index) => prompts[index] && set({ prompt: prompts[index][0], step: null });
    useKeys({ j: () => show(at + 1), k: () => show(at - 1) });
    const entries = prompts[at]?.[1] ?? [];
    const count = Math.max(1, ...entries.map(({ group }) => group.images.length));
    const usual = kind === "training" ? BEST : "0";
    const isSample = params.sample === BEST || Number(params.sample) < count;
    const sample = isSample ? params.sample : usual;
    const sizes = useSizes("film", { size: USUAL_SIZE, density: "captions" });
    const frames = useMemo(() => makeFrames(kind, entries, sample), [kind, entries, sample]);
    return html`<${Title} name="Film" about=${ABOUT}>
        <label>Of
          <select value=${kind} onChange=${(event) =>
            set({ of: event.currentTarget.value, prompt: null, sample: null, step: null })}>
            ${Object.entries(KINDS).map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}
          </select>
        </label>
        ${
          prompts.length > 0 &&
          html`<label>Prompt
            <select class="film-prompt" value=${prompts[at][0]}
                onChange=${(event) => set({ prompt: event.currentTarget.value, step: null })}>
              ${prompts.map(([id]) => html`<option key=${id} value=${id}>${clip(id)}</option>`)}
            </select>
          </label>
          <span class="buttons">
            <button type="button" disabled=${at === 0} aria-label="Previous prompt"
              onClick=${() => show(at - 1)}>\u2190</button>
            <button type="button" disabled=${at + 1 === prompts.length} aria-label="Next prompt"
              onClick=${() => show(at + 1)}>\u2192</button>
          </span>
          <label>Sample
            <select value=${sample} onChange=${(event) => set({ sample: event.currentTarget.value })}>
              ${[...Array(count).keys(), BEST].map((each) => html`<option key=${each} value=${String(each)}>${each}</option>`)}
            </select>
          </label>
          <${SizeControls} sizes=${sizes} shown=${USUAL_SIZE} />`
        }
      </${Title}>
      ${isUnknown && html`<${Problem} where="Address" message=${`there is no film of the prompt "${params.prompt}".`} />`}
      ${
        frames.length
          ? html`<${Reel} key=${`${kind} ${prompts[at][0]} ${sample}`} frames=${frames} sizes=${sizes}
              params=${params} />`
          : html`<p>
              ${
                kind === "training"
                  ? "No training prompt was used in more than one step."
                  : "No evaluation is stored yet. After the first one this page shows its prompts. It updates by itself."
              }
              ${" "}See <a href=${link("groups")}>Groups</a>.
            </p>`
      }`;
  }

  /* [{kind, step, group, sample, total, change}] with `change` since the first. */
  function makeFrames(kind, entries, wanted) {
    const frames = entries.map(({ step, group }) => {
      const best = group.total.indexOf(Math.max(...group.total));
      const sample = wanted === BEST ? best : Number(wanted);
      return { step, group, sample, total: group.total[sample] };
    });
    const there = frames.filter(({ group, sample }) => group.images[sample] !== undefined);
    const name = kind === "training" ? "training" : "evaluation";
    return there.map((frame) => ({ ...frame, kind: name, change: frame.total - there[0].total }));
  }

  const imageOf = ({ group, sample }) => group.images[sample];

  /* The film, and the strip of its pictures below. */
  function Reel({ frames, sizes, params }) {
    const asked = frames.findIndex(({ step }) => String(step) === params.step);
    const at = asked < 0 ? 0 : asked;
    const show = (index) => set({ step: frames[index].step });
    const enlarge = (index) => set({ step: frames[index].step, large: 1 });
    const rows = useMemo(() => [frames], [frames]);
    const { prompt } = frames[0].group;
    return html`<p><${PromptText} text=${prompt} /></p>
      <${Player} frames=${frames} at=${at} show=${show} onOpen=${() => enlarge(at)} />
      <ol class="strip scroll-region" tabindex="0" aria-label="Images by step" style=${sizes.style}>
        ${frames.map(
          (frame, index) =>
            html`<${Frame} key=${frame.step} frame=${frame} density=${sizes.density} isShown=${index === at}
              isFirst=${index === 0} onOpen=${() => enlarge(index)} />`,
        )}
      </ol>
      ${
        params.large &&
        html`<${FoundLarge} rows=${rows} at=${imageOf(frames[at])}
          onShow=${(image) => show(frames.findIndex((frame) => imageOf(frame) === image))}
          onClose=${() => set({ large: null })} />`
      }`;
  }

  function Player({ frames, at, show, onOpen }) {
    const [isPlaying, setIsPlaying] = useState(false);
    const [speed, setSpeed] = useState(USUAL_SPEED);
    const latest = useRef(null);
    latest.current = () => show((at + 1) % frames.length);
    useEffect(() => {
      if (!isPlaying) return undefined;
      const timer = setInterval(() => {
        if (!document.querySelector("dialog[open]")) latest.current();
      }, 1000 / Number(speed));
      return () => clearInterval(timer);
    }, [isPlaying, speed]);
    useKeys({
      p: () => setIsPlaying(!isPlaying),
      ArrowLeft: () => at > 0 && show(at - 1),
      ArrowRight: () => at + 1 < frames.length && show(at + 1),
    });
    const frame = frames[at];
    const caption = `Step ${frame.step}, sample ${frame.sample}: total ${fmt(frame.total)}`;
    return html`<div class="film panel">
      <${Screen} image=${imageOf(frame)} next=${imageOf(frames[(at + 1) % frames.length])} alt=${caption}
        onOpen=${onOpen} />
      <div class="film-controls">
        <button type="button" onClick=${() => setIsPlaying(!isPlaying)}>
          ${isPlaying ? "Pause" : "Play"} <kbd>p</kbd>
        </button>
        <input type="range" min="0" max=${frames.length - 1} value=${at} aria-label="Step"
          aria-valuetext=${`step ${frame.step}`} onInput=${(event) => show(Number(event.currentTarget.value))} />
        <label>Speed
          <select value=${speed} onChange=${(event) => setSpeed(event.currentTarget.value)}>
            ${Object.entries(SPEEDS).map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}
          </select>
        </label>
      </div>
      <p class="film-caption">
        ${caption}${" "}<span class=${changeClass(frame.change)}>${at > 0 && signed(frame.change)}</span>
      </p>
    </div>`;
  }

  /* One element whose picture changes: the last stays until the next is there. */
  function Screen({ image, next, alt, onOpen }) {
    const [lost, setLost] = useState(new Set());
    useEffect(() => {
      new Image().src = fullUrl(next);
    }, [next]);
    const { width, height } = gallery.run.picture ?? { width: 1, height: 1 };
    const kind = width < 256 ? "film-screen is-pixelated" : "film-screen";
    return html`<button type="button" class=${kind} aria-haspopup="dialog" onClick=${onOpen}
        style=${{ aspectRatio: `${width} / ${height}`, "--ratio": width / height }}>
      <img src=${lost.has(image) ? thumbUrl(image) : fullUrl(image)} alt=${alt} decoding="sync"
        onError=${() => lost.has(image) || setLost(new Set([...lost, image]))} />
    </button>`;
  }

  function Frame({ frame, density, isShown, isFirst, onOpen }) {
    const place = useRef(null);
    useEffect(() => {
      const { current } = place;
      /* Within the strip alone: the page stays where the reader has it. */
      const strip = current.parentElement;
      if (!isShown) return;
      const [left, right] = [current.offsetLeft, current.offsetLeft + current.offsetWidth];
      if (left < strip.scrollLeft) strip.scrollLeft = left;
      else if (right > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = right - strip.clientWidth;
    }, [isShown]);
    const { step, group, sample, total, change } = frame;
    return html`<li ref=${place} aria-current=${isShown ? "step" : undefined}>
      <${Picture} image=${imageOf(frame)} alt=${`Step ${step}, sample ${sample}: total ${fmt(total)}`}
        onOpen=${onOpen} attributes=${{ "aria-haspopup": "dialog" }} />
      ${
        density !== "pictures" &&
        html`<p><strong>Step ${step}</strong> ${fmt(total)}${" "}
          <span class=${changeClass(change)}>${!isFirst && signed(change)}</span>
        </p>`
      }
      ${
        density === "figures" &&
html`<${Terms} raw=${group.raw} sample=${sample} />`
      }
    </li>`;
  }

  Film.keyHelp = [
    ["p", "Play and pause"],
    ["\u2190 \u2192", "Step before and after"],
    ["j k", "Next and previous prompt"],
  ];
  gallery.views.film = Film;
})();
