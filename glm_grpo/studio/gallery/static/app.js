/* The page around the views: header, navigation, problems of the run, help on keys. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, link, parts, views } = gallery;
  const { Dialog, KeyTable, Live, Problem, keys, useKeys } = parts;
  const { useEffect, useReducer, useRef, useState } = preactHooks;

  const TITLES = {
    start: "Start",
    progress: "Progress",
    groups: "Groups",
    weights: "Weights",
    curves: "Curves",
    find: "Find",
  };
  const REPORT = "report.html";
  const COMMON_KEYS = [
    ["?", "This help"],
    [`1 to ${Object.keys(TITLES).length + 1}`, "Open a view, in the order of the navigation"],
  ];

  function App() {
    const { view, params } = gallery.useRoute();
    const [isHelpOpen, setIsHelpOpen] = useState(false);
    const [, onAdopt] = useReducer((count) => count + 1, 0);
    const main = useRef(null);
    const pages = Object.keys(TITLES).map((name) => () => gallery.go(name));
    pages.push(() => location.assign(REPORT));
    const toPage = pages.map((open, index) => [String(index + 1), open]);
    useKeys({ "?": () => setIsHelpOpen(true), ...Object.fromEntries(toPage) });
    useTitle(view);
    useFocusOnHeading(main, view);
    return html`
      <${Header} view=${view} main=${main} onAdopt=${onAdopt} onHelp=${() => setIsHelpOpen(true)} />
      <main ref=${main} id="main" tabindex="-1">
        <${Boundary} key=${view}><${View} view=${view} params=${params} /></${Boundary}>
      </main>
      ${isHelpOpen && html`<${Help} view=${view} onClose=${() => setIsHelpOpen(false)} />`}`;
  }

  function useTitle(view) {
    useEffect(() => {
      document.title = `${TITLES[view] || "Unknown view"}: ${gallery.run.name}`;
    }, [view]);
  }

  /* Where the view changed the reader starts at its heading; not on the first view, which the
     browser starts at the top. */
  function useFocusOnHeading(main, view) {
    const isFirst = useRef(true);
    useEffect(() => {
      if (isFirst.current) {
        isFirst.current = false;
        return;
      }
      focusHeading(main.current);
    }, [view]);
  }

  function focusHeading(main) {
    const heading = main.querySelector("h2") || main;
    heading.tabIndex = -1;
    heading.focus();
  }

  function Header({ view, main, onAdopt, onHelp }) {
    const [, update] = useReducer((count) => count + 1, 0);
    useEffect(() => gallery.onProblem(update), []);
    const problems = [...gallery.run.problems, ...gallery.problems()];
    return html`<header class="page-head">
      <button type="button" class="skip" onClick=${() => focusHeading(main.current)}>
        Skip to the view
      </button>
      <${RunName} />
      <${Live} about=${html`<${RunLabel} />`} onAdopt=${onAdopt} />
      <button type="button" class="views-button" popovertarget="views" aria-label=${`Views: ${TITLES[view] ?? ""}`}>
        ${TITLES[view] ?? "Views"} <span class="soft" aria-hidden="true">\u25be</span>
      </button>
      <nav id="views" aria-label="Views" popover="auto" onClick=${(event) => event.currentTarget.hidePopover()}>
        <ul>
          ${Object.entries(TITLES).map(
            ([name, title]) => html`<li key=${name}>
            <a href=${link(name)} aria-current=${name === view ? "page" : undefined}>${title}</a>
          </li>`,
          )}
          <li><a href=${REPORT}>Before and after</a></li>
        </ul>
      </nav>
      <button type="button" class="help" onClick=${onHelp} aria-haspopup="dialog" aria-label="Keys">?</button>
      <div class="problems" aria-live="polite">
        ${problems.map(
          ({ where, message }) =>
            html`<${Problem} key=${where + message} where=${where} message=${message} />`,
        )}
      </div>
    </header>`;
  }

  /* The last part of the name tells runs of one day apart: the parts before it give way. */
  function RunName() {
    const [, place = "", last] = /^(.* \/ )?(.*)$/s.exec(gallery.run.name);
    return html`<h1 title=${gallery.run.name}>
      <span class="run-place">${place}</span><span class="run-name">${last}</span>
    </h1>`;
  }

  /* The run's whole name, and what was said about it when it was started. */
  function RunLabel() {
    const { name, notes, tags } = gallery.run.label ?? { tags: [] };
    return html`<p class="run-title">${name || gallery.run.name}</p>
      ${name && html`<p>${gallery.run.name}</p>`}
      ${tags.length > 0 && html`<p class="soft">${tags.map((tag) => `#${tag}`).join(" ")}</p>`}
      ${notes && html`<p class="run-notes">${notes}</p>`}`;
  }

  function View({ view, params }) {
    if (!Object.hasOwn(TITLES, view)) return html`<${UnknownView} view=${view} />`;
    const Shown = views[view];
    if (!Shown)
      return html`<${FailedView} where=${`assets/${view}.js`} message="is missing or damaged." />`;
    return html`<${Shown} params=${params} />`;
  }

  function FailedView({ where, message }) {
    return html`<h2>This view cannot be shown</h2>
      <${Problem} where=${where} message=${message}>
        <p>The other views still work. To repair this one, run <code>glm-grpo gallery RUN</code></p>
      </${Problem}>`;
  }

  function UnknownView({ view }) {
    const nearest = nearestName(view, Object.keys(TITLES));
    return html`<h2>Unknown view</h2>
      <${Problem} where="Address" message=${`there is no view named "${view}".`}>
        <p>The nearest is <a href=${link(nearest)}>${TITLES[nearest]}</a>.</p>
      </${Problem}>`;
  }

  /* The name that shares the longest beginning; the first where none shares any. */
  function nearestName(wrong, names) {
    const shared = (name) => {
      let length = 0;
      while (length < name.length && name[length] === wrong[length]?.toLowerCase()) length += 1;
      return length;
    };
    return names.reduce((best, name) => (shared(name) > shared(best) ? name : best));
  }

  class Boundary extends preact.Component {
    componentDidCatch(error) {
      console.error(error);
      this.setState({ error });
    }

    render({ children }, { error }) {
      if (!error) return children;
      return html`<${FailedView} where="View" message=${`stopped with: ${error.message}`} />`;
    }
  }

  function Help({ view, onClose }) {
    const [areOn, setAreOn] = useState(keys.areOn);
    const toggle = (event) => {
      keys.areOn = event.currentTarget.checked;
      setAreOn(keys.areOn);
    };
    const rows = [...COMMON_KEYS, ...((views[view] && views[view].keyHelp) || [])];
    return html`<${Dialog} className="help-dialog" title="Keys" onClose=${onClose}>
      <${KeyTable} keys=${rows} />
      <h3>In an enlarged image</h3>
      <${KeyTable} keys=${parts.LARGE_KEYS} />
      <p>
        <label>
          <input type="checkbox" checked=${areOn} onChange=${toggle} />
          ${" "}Use single-character shortcuts
        </label>
      </p>
    </${Dialog}>`;
  }

  function NoRun() {
    return html`<main>
      <h1>This gallery cannot be shown</h1>
      ${(gallery.problems().length
        ? gallery.problems()
        : [{ where: "data/run.js", message: "is missing or damaged" }]
      ).map((problem) => html`<${Problem} where=${problem.where} message=${problem.message} />`)}
      <p>To write it again, run <code>glm-grpo gallery RUN</code></p>
    </main>`;
  }

  /* data/run.js comes after this script. */
  window.addEventListener("DOMContentLoaded", () => {
    preact.render(
      gallery.run ? html`<${App} />` : html`<${NoRun} />`,
      document.getElementById("app"),
    );
  });
})();
