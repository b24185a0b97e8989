/* An image in the whole window, held against its target, its source or an earlier step. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, parts, useSetting, useShown } = gallery;
  const { Dialog, KeyTable, fullUrl, useKeys } = parts;
  const { Stage } = gallery.largeStage;
  const { CreditButton, CreditOver, Legend, useCredit, useCreditOf } = gallery.credit;
  const { useEffect, useMemo, useRef, useState } = preactHooks;

  const LAYOUTS = { one: "One", side: "Side by side", wipe: "Wipe", difference: "Difference" };
  const EARLIER = "earlier";
  const ZOOM_FACTOR = 1.25;
  const PAN = 80;
  const WIPE_STEP = 0.05;
  /* Narrower windows begin without the figures. */
  const WIDE = "(min-width: 64rem)";
  const ARROWS = { left: "\u2190", right: "\u2192", up: "\u2191", down: "\u2193" };
  const KEYS = [
    ["\u2190 \u2192", "Previous and next sample"],
    ["\u2191 \u2193", "Previous and next prompt"],
    ["Page Up, Page Down", "Previous and next step"],
    ["Space, b", "Switch between the image and what it is compared with"],
    ["o s w d", "One image, side by side, wipe, difference"],
    ["+ \u2212", "Zoom in and out; the wheel zooms around the pointer"],
    ["0 1", "Fit to the window; show at 100 %"],
    ["Shift and an arrow", "Move the image, or the edge in Wipe; a drag does the same"],
    ["c", "Credit by place of a training sample, if the run trains with it"],
    ["i", "Show or hide the figures"],
  ];

  /**
   * @param item What is shown: {id, title, alt, image, target, sources, credit, body, earlier}.
   *     `id` tells items apart; `credit` is {key, group, sample}: a data file, and what to take of
   *     it; body() gives the figures; earlier() promises [{step, image, title}] of the same
   *     prompt at earlier steps, the newest last.
   * @param moves Where keys and buttons lead: {left, right, up, down, before, after}, each undefined
   *     where nothing is there. `before` and `after` are steps.
   * @param near Images to fetch in advance.
   * @param first "target" or "source" to begin with that image; the sample without.
   * @param onClose Called when the view was left; what had the focus before has it again.
   */
  function LargeView({ item, moves, near, first, onClose }) {
    const [layout, setLayout] = useChoice("large.layout", LAYOUTS, "one");
    const [against, setAgainst] = useState(null);
    const [isFlipped, setIsFlipped] = useState(first !== undefined);
    const [wipe, setWipe] = useState(0.5);
    const [scale, setScale] = useState(1);
    const [areFigures, toggleFigures] = useShown("large.figures", matchMedia(WIDE).matches);
    const [areKeys, setAreKeys] = useState(false);
    const earlier = useEarlier(item, against);
    const plates = useMemo(() => makePlates(item, earlier.found), [item.id, earlier.found]);
    const second = chooseSecond(plates, against ?? first);
    const [isCredit, toggleCredit] = useCredit();
    const loaded = useCreditOf(item.credit?.key, isCredit);
    const credit = item.credit && loaded.data?.[item.credit.group];
    const [sample, ...others] = arrange(plates, second, layout);
    const over =
      credit && html`<${CreditOver} credit=${credit} sample=${item.credit.sample} isLarge />`;
    const shown = [{ ...sample, over }, ...others];
    const stage = useRef(null);
    const zoom = useRef(null);
    const flip = () => {
      if (layout !== "one") setLayout("one");
      else if (second) setIsFlipped(!isFlipped);
    };
    const pan = (x, y) => () => zoom.current.pan(x, y);
    const edge = (by, x) =>
      layout === "wipe" ? () => setWipe(Math.min(Math.max(wipe + by, 0), 1)) : pan(x, 0);
    const arrow = (name, panned) => (event) => (event.shiftKey ? panned() : moves[name]?.());
    useKeys(
      {
        ArrowLeft: arrow("left", edge(-WIPE_STEP, PAN)),
        ArrowRight: arrow("right", edge(WIPE_STEP, -PAN)),
        ArrowUp: arrow("up", pan(0, PAN)),
        ArrowDown: arrow("down", pan(0, -PAN)),
        PageUp: () => moves.before?.(),
        PageDown: () => moves.after?.(),
        b: flip,
        o: () => setLayout("one"),
        s: () => setLayout("side"),
        w: () => setLayout("wipe"),
        d: () => setLayout("difference"),
        "+": () => zoom.current.zoomAt(ZOOM_FACTOR),
        "=": () => zoom.current.zoomAt(ZOOM_FACTOR),
        "-": () => zoom.current.zoomAt(1 / ZOOM_FACTOR),
        0: () => zoom.current.fit(),
        1: () => zoom.current.scaleTo(1),
        i: toggleFigures,
        ...(item.credit && { c: toggleCredit }),
        "?": () => setAreKeys(!areKeys),
      },
      { isInDialog: true },
    );
    useSpace(flip);
    usePreloaded(near);
    const compare = html`<${Compare} plates=${plates} second=${second} earlier=${earlier}
      hasEarlier=${Boolean(item.earlier)}
      against=${against} onChange=${(key) => {
        setAgainst(key);
        setIsFlipped(false);
      }} />`;
    const tools = html`<div class="large-tools" onMouseDown=${keepFocus}>
      <div class="segments" role="radiogroup" aria-label="Layout">
        ${Object.entries(LAYOUTS).map(
          ([name, title]) => html`<label key=${name}>
            <input type="radio" name="large-layout" checked=${layout === name}
              onChange=${() => setLayout(name)} />${title}
          </label>`,
        )}
      </div>
      ${compare}
      <${ZoomButtons} scale=${scale} zoom=${zoom} />
      <${MoveButtons} moves=${moves} />
    </div>`;
    const buttons = html`${
        item.credit &&
        html`<${CreditButton} isOn=${isCredit} toggle=${toggleCredit} attributes=${{ onMouseDown: keepFocus }} />`
      }
      <button type="button" aria-pressed=${areFigures} onMouseDown=${keepFocus}
        onClick=${toggleFigures}>Figures</button>
      <button type="button" class="large-help" aria-label="Keys" aria-pressed=${areKeys}
        onMouseDown=${keepFocus} onClick=${() => setAreKeys(!areKeys)}>?</button>`;
    return html`<${Dialog} className="large" title=${item.title} tools=${tools} buttons=${buttons}
        focus=${stage} onClose=${onClose}>
      <div class=${areFigures || areKeys ? "large-body has-side" : "large-body"}>
        ${credit && html`<div class="large-credit"><${Legend} credit=${credit} /></div>`}
        <${Stage} focus=${stage} label=${`Images of ${item.title}`} layout=${layout} shown=${shown}
          isFlipped=${isFlipped} wipe=${wipe} onWipe=${setWipe} moves=${moves} zoomRef=${zoom}
          onZoom=${setScale} />
        ${
          (areFigures || areKeys) &&
          html`<div class="large-side scroll-region" tabindex="0" role="region" aria-label="Figures">
            ${areKeys && html`<${KeyTable} keys=${KEYS} />`}
            ${areFigures && html`<div key=${item.id}>${item.body()}</div>`}
            ${
              areFigures &&
              html`<p><a href=${fullUrl(item.image)} target="_blank" rel="noopener">Open the
                stored image in a new tab</a></p>`
            }
          </div>`
        }
      </div>
    </${Dialog}>`;
  }

  /* A setting that is one of the names of `choices`. */
  function useChoice(name, choices, usual) {
    const [stored, set] = useSetting(name);
    return [Object.hasOwn(choices, stored ?? "") ? stored : usual, set];
  }

  /* What was found of earlier steps, once that is asked for: {found, isLoading}. */
  function useEarlier(item, against) {
    const [state, setState] = useState({ id: null, found: null });
    const isWanted = Boolean(item.earlier) && against !== null && against.startsWith(EARLIER);
    useEffect(() => {
      if (!isWanted || state.id === item.id) return undefined;
      let isCurrent = true;
      item.earlier().then((found) => isCurrent && setState({ id: item.id, found }));
      return () => {
        isCurrent = false;
      };
    }, [isWanted, item.id]);
    const found = state.id === item.id ? state.found : null;
    return { found, isLoading: isWanted && found === null };
  }

  function makePlates(item, earlier) {
    const { image, alt, target, sources = [] } = item;
    return [
      { key: "sample", title: "Sample", image, alt },
      target && { key: "target", title: "Target", image: target, alt: "Target" },
      ...sources.map((source, index) => ({
        key: index ? `source-${index + 1}` : "source",
        title: sources.length > 1 ? `Source ${index + 1}` : "Source",
        image: source,
        alt: sources.length > 1 ? `Source ${index + 1}` : "Source",
      })),
      ...(earlier ?? []).map(({ step, image: before, title }) => ({
        key: `${EARLIER}-${step}`,
        title,
        image: before,
        alt: title,
      })),
    ].filter(Boolean);
  }

  /* The image to compare with: that asked for, of earlier steps the newest, or the first. */
  function chooseSecond(plates, wanted) {
    const [, ...others] = plates;
    const earlier = others.filter((plate) => plate.key.startsWith(EARLIER));
    const newest = wanted?.startsWith(EARLIER) ? earlier.pop() : undefined;
    return others.find((plate) => plate.key === wanted) ?? newest ?? others[0];
  }

  /* Side by side stand all but earlier steps that are not compared with. */
  function arrange(plates, second, layout) {
    if (layout !== "side") return second ? [plates[0], second] : [plates[0]];
    return plates.filter((plate) => plate === second || !plate.key.startsWith(EARLIER));
  }

  /* Buttons are pressed by Space themselves; anything else that has the focus has no use for it,
     radio buttons that are chosen among them. */
  function useSpace(flip) {
    const latest = useRef(flip);
    latest.current = flip;
    useEffect(() => {
      const onKeyDown = (event) => {
        if (event.key !== " " || event.target.closest("button, select, a, [type=text], .large-side")) return;
        event.preventDefault();
        latest.current();
      };
      document.addEventListener("keydown", onKeyDown);
      return () => document.removeEventListener("keydown", onKeyDown);
    }, []);
  }

  /* Fetched in advance, so that the next image is there at once. */
  function usePreloaded(images) {
    const kept = useRef([]);
    useEffect(() => {
      kept.current = images.map((image) => {
        const fetched = new Image();
        fetched.src = fullUrl(image);
        return fetched;
      });
    }, [images.join("\n")]);
  }

  /* A click on a tool leaves the focus with the images, where Space and arrows are theirs. */
  function keepFocus(event) {
    if (!event.target.closest("select")) event.preventDefault();
  }

  function Compare({ plates, second, earlier, hasEarlier, against, onChange }) {
    const isEarlier = (plate) => plate.key.startsWith(EARLIER);
    const isAsked = against !== null && against.startsWith(EARLIER);
    const isNone = isAsked && earlier.found !== null && !plates.some(isEarlier);
    return html`<label>With
      <select value=${earlier.isLoading ? EARLIER : (second?.key ?? "")}
          onChange=${(event) => onChange(event.currentTarget.value)}>
        ${!second && html`<option value="">nothing</option>`}
        ${plates
          .slice(1)
          .map((plate) => html`<option key=${plate.key} value=${plate.key}>${plate.title}</option>`)}
        ${
          hasEarlier &&
          !plates.some(isEarlier) &&
          html`<option value=${EARLIER} disabled=${isNone}>
            ${earlier.isLoading ? "loading earlier steps" : isNone ? "no earlier step" : "an earlier step"}
          </option>`
        }
      </select>
    </label>`;
  }

  function ZoomButtons({ scale, zoom }) {
    return html`<span class="buttons" role="group" aria-label="Zoom">
      <button type="button" class="large-less" aria-label="Smaller"
          onClick=${() => zoom.current.zoomAt(1 / ZOOM_FACTOR)}>
        \u2212
      </button>
      <output class="large-scale">${Math.round(scale * 100)} %</output>
      <button type="button" class="large-more" aria-label="Larger"
          onClick=${() => zoom.current.zoomAt(ZOOM_FACTOR)}>
        +
      </button>
      <button type="button" onClick=${() => zoom.current.fit()}>Fit</button>
      <button type="button" onClick=${() => zoom.current.scaleTo(1)}>100 %</button>
    </span>`;
  }

  function MoveButtons({ moves }) {
    const names = {
      left: "Previous sample",
      right: "Next sample",
      up: "Previous prompt",
      down: "Next prompt",
    };
    return html`<span class="buttons" role="group" aria-label="Move">
      ${Object.entries(names).map(
        ([way, name]) => html`<button type="button" key=${way} aria-label=${name} title=${name}
          disabled=${!moves[way]} onClick=${moves[way]}>${ARROWS[way]}</button>`,
      )}
      ${
        "before" in moves &&
        html`<button type="button" aria-label="Step before" disabled=${!moves.before}
            onClick=${moves.before}>Before</button>
          <button type="button" aria-label="Step after" disabled=${!moves.after}
            onClick=${moves.after}>After</button>`
      }
    </span>`;
  }

  /**
   * Where the keys lead from a place of rows that stand below one another: {left, right, up, down}.
   * After the last of a row comes the first of the next; up and down keep the column where they can.
   *
   * @param counts How many images each row has.
   * @param at [row, column].
   * @param show Called with the [row, column] to show.
   */
  function movesIn(counts, [row, column], show) {
    const to = (nextRow, nextColumn) => {
      const count = counts[nextRow];
      if (!count) return undefined;
      return () => show([nextRow, Math.min(nextColumn, count - 1)]);
    };
    return {
      left: column > 0 ? to(row, column - 1) : to(row - 1, Infinity),
      right: column + 1 < counts[row] ? to(row, column + 1) : to(row + 1, 0),
      up: to(row - 1, column),
      down: to(row + 1, column),
    };
  }

  Object.assign(parts, { LARGE_KEYS: KEYS, LargeView, movesIn });
})();
