/* A run that goes on: the head of the page says how far it is, and takes up what is new. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { html, useShown } = gallery;
  const { useEffect, useRef, useState } = preactHooks;

  /* Milliseconds between two looks: a third of a step, within these. */
  const [SHORTEST, LONGEST] = [2_000, 15_000];
  /* Where nothing has come for long, or the file cannot be read. */
  const REST = 60_000;
  const LOOKS_PER_STEP = 3;
  /* Seconds without a step after which a run counts as stopped: this, or ten steps if that is more. */
  const STOPPED_AFTER = 900;
  const STOPPED_STEPS = 10;

  const lastStep = (run) => Math.max(0, ...run.chunks.flatMap((chunk) => chunk.steps));
  const namesOf = ({ chunks, evaluations }) => JSON.stringify([chunks, evaluations]);

  /** Seconds in words, such as "2 h 5 min". */
  function inWords(seconds) {
    const minutes = Math.max(Math.round(seconds / 60), 1);
    if (minutes < 60) return `${minutes} min`;
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  /* {isOver, isSilent, since}: whether all steps are done, whether no step has come for long, and for
     how many seconds none has. */
  function judge(run) {
    const since = run.recorded === null ? 0 : Date.now() / 1000 - run.recorded;
    const patience = Math.max(STOPPED_AFTER, STOPPED_STEPS * (run.seconds_per_step ?? 0));
    return {
      isOver: run.steps_planned !== null && lastStep(run) >= run.steps_planned,
      isSilent: since > patience,
      since,
    };
  }

  /* "about 14 min left", or why the time is not known. */
  function describeRest(run) {
    const { isOver, isSilent, since } = judge(run);
    if (isOver || run.steps_planned === null || run.recorded === null) return "";
    if (isSilent) return `no new step for ${inWords(since)}`;
    if (run.seconds_left === null) return "running";
    return `about ${inWords(Math.max(run.seconds_left - since, 0))} left`;
  }

  function describeNews(run) {
    const [steps, evaluations] = [
      lastStep(run) - lastStep(gallery.run),
      run.evaluations.length - gallery.run.evaluations.length,
    ];
    if (steps > 0) return steps === 1 ? "1 new step" : `${steps} new steps`;
    return evaluations > 0 ? "A new evaluation" : "Updated data";
  }

  /* Hook: the newest data of the run, and whether the last look failed. */
  function useNewest() {
    const [state, setState] = useState({ run: gallery.run, hasFailed: false });
    const latest = useRef(state);
    latest.current = state;
    useEffect(() => {
      let timer = null;
      const wait = () => {
        const { run, hasFailed } = latest.current;
        const { isOver, isSilent } = judge(run);
        /* After the last step comes its evaluation. */
        if (isOver && isSilent) return;
        const pace = ((run.seconds_per_step ?? 0) * 1000) / LOOKS_PER_STEP;
        const usual = Math.min(Math.max(pace, SHORTEST), LONGEST);
        timer = setTimeout(look, isSilent || hasFailed ? REST : usual);
      };
      async function look() {
        timer = null;
        if (!document.hidden) {
          const run = await gallery.readRun();
          latest.current = { run: run ?? latest.current.run, hasFailed: run === null };
          setState(latest.current);
        }
        wait();
      }
      const onReturn = () => {
        if (document.hidden || timer === null) return;
        clearTimeout(timer);
        look();
      };
      wait();
      document.addEventListener("visibilitychange", onReturn);
      return () => {
        clearTimeout(timer);
        document.removeEventListener("visibilitychange", onReturn);
      };
    }, []);
    return state;
  }

  /**
   * How far the run is, what is new, and whether the page follows.
   *
   * @param about The run in words, beside the switch that follows it.
   * @param onAdopt Called when gallery.run is another.
   */
  function Live({ about, onAdopt }) {
    const { run, hasFailed } = useNewest();
    const [follows, toggleFollows] = useShown("live.follow", true);
    const hasNews = namesOf(run) !== namesOf(gallery.run);
    const adopt = () => {
      const shownLast = lastStep(gallery.run);
      gallery.adopt(run);
      showNewest(shownLast);
      onAdopt();
    };
    const isEmpty = !gallery.run.chunks.length && !gallery.run.evaluations.length;
    useEffect(() => {
      if (hasNews && (follows || isEmpty)) adopt();
    }, [run, follows]);
    const { isOver } = judge(run);
    const rest = describeRest(run);
    return html`<button type="button" class="live" popovertarget="about-run">
        ${describeLength(run)}${rest && html`<span class="live-rest">, ${rest}</span>`}
${" "}<span class="soft" aria-hidden="true">\u25be</span>
      </button>
      <div id="about-run" class="about panel" popover="auto">
        ${about}
        <p>${describeLength(run)}${rest && `, ${rest}`}</p>
        ${(!isOver || hasNews) && html`<label>
          <input type="checkbox" checked=${follows} onChange=${toggleFollows} />
          ${" "}Follow new steps
        </label>`}
      </div>
      ${run.steps_planned !== null && !isOver && html`<progress max=${run.steps_planned} value=${lastStep(run)}
        aria-label="Part of the run that is done"></progress>`}
      <span role="status" class="live-news">
        ${hasNews && html`<button type="button" onClick=${adopt}>${describeNews(run)}</button>`}
        ${hasFailed && html`<span class="soft">Cannot read data/run.js now; trying again</span>`}
      </span>`;
  }

  /* Groups goes on to the newest step where it showed the newest before; not below a dialog. */
  function showNewest(shownLast) {
    const { view, params } = gallery.route();
    const isNewest = params.step === undefined || Number(params.step) === shownLast;
    if (view !== "groups" || !isNewest || document.querySelector("dialog[open]")) return;
    gallery.replace("groups", { diff: params.diff });
  }

  function describeLength(run) {
    const { steps_planned: planned } = run;
    return planned === null ? `step ${lastStep(run)}` : `step ${lastStep(run)} of ${planned}`;
  }

  gallery.parts.Live = Live;
})();
