/* The data of the page: files under data/ are classic scripts that hand over one object each,
   because a page opened from disk may neither fetch nor import. */
(function () {
  "use strict";

  const SCHEMA = 3;
  const PARALLEL_LOADS = 4;
  const REMEDY = "to write it again, run glm-grpo gallery RUN";

  const received = new Map();
  const loads = new Map();
  const problems = [];
  const listeners = new Set();
  /* Data of data/run.js as they were read last, see readRun. */
  let newest = null;
  let readings = 0;

  const gallery = {
    html: htm.bind(preact.h),
    views: {},
    /* Data of data/run.js; undefined where that file is missing or damaged. */
    run: undefined,
    receive,
    load,
    loadEvaluation,
    loadSteps,
    loadMetrics,
    readRun,
    adopt,
    problems: () => problems.slice(),
    onProblem,
  };
  window.glmGallery = gallery;

  /** Called by the data files: keeps `data` under `key`. */
  function receive(key, data) {
    if (key !== "run") {
      received.set(key, data);
    } else if (data.schema !== SCHEMA) {
      addProblem(
        "data/run.js",
        `its schema is ${data.schema}, this page reads schema ${SCHEMA}; ` + REMEDY,
      );
    } else {
      newest = data;
      gallery.run ??= data;
    }
  }

  /** Reads data/run.js again, which a run that goes on writes anew: its data, or null where it could
      not be read. The page shows them once they are adopted. */
  async function readRun() {
    readings += 1;
    newest = null;
    await addScript(`data/run.js?reading=${readings}`);
    return newest;
  }

  /** Makes `run` the run that is shown, and forgets the data files that have changed since. */
  function adopt(run) {
    const before = new Map(gallery.run.chunks.map(({ key, steps }) => [key, steps.join()]));
    const last = run.chunks[run.chunks.length - 1]?.key;
    const evaluations = new Set(run.evaluations.map(({ key }) => key));
    for (const key of [...received.keys(), ...loads.keys()]) {
      const chunk = run.chunks.find((each) => each.key === key);
      /* To the last one more may have been added than its steps. */
      const isKept = chunk ? key !== last && before.get(key) === chunk.steps.join() : evaluations.has(key);
      if (!isKept) {
        received.delete(key);
        loads.delete(key);
      }
    }
    gallery.run = run;
  }

  /** Data of data/KEY.js as a promise; loaded once. A failure is noted and may be tried again. */
  function load(key) {
    if (received.has(key)) return Promise.resolve(received.get(key));
    if (!loads.has(key)) {
      const loading = loadFile(key);
      loads.set(key, loading);
      loading.catch((error) => {
        loads.delete(key);
        addProblem(`data/${key}.js`, `is missing or damaged; ${REMEDY}`);
      });
    }
    return loads.get(key);
  }

  async function loadFile(key) {
    /* An address of its own after each reading, so that no browser gives what it kept. */
    const query = readings ? `?reading=${readings}` : "";
    await addScript(`data/${encodeURIComponent(key)}.js${query}`);
    if (received.has(key)) return received.get(key);
    throw new Error(`data/${key}.js is missing or damaged`);
  }

  /* Ends when the script has run, or could not be had. */
  function addScript(address) {
    return new Promise((resolve) => {
      const script = document.createElement("script");
      script.src = address;
      script.onload = script.onerror = () => {
        script.remove();
        resolve();
      };
      document.head.append(script);
    });
  }

  /** An entry of run.evaluations as {step, groups} or {step, problem}. */
  function loadEvaluation({ step, key }) {
    return load(key).catch((error) => ({ step, problem: error.message }));
  }

  /** Every training step in order: {step, groups} or {step, problem}. */
  function loadSteps(onProgress) {
    return loadChunks(onProgress, {
      read: (data) => data.steps,
      instead: (chunk, message) => chunk.steps.map((step) => ({ step, problem: message })),
    });
  }

  /** Every line of metrics in order. Lines of an unreadable file are left out; it is a problem. */
  function loadMetrics(onProgress) {
    return loadChunks(onProgress, { read: (data) => data.metrics, instead: () => [] });
  }

  async function loadChunks(onProgress, { read, instead }) {
    const chunks = gallery.run.chunks;
    const parts = new Array(chunks.length);
    let next = 0;
    let done = 0;
    async function work() {
      while (next < chunks.length) {
        const index = next++;
        try {
          parts[index] = read(await load(chunks[index].key));
        } catch (error) {
          parts[index] = instead(chunks[index], error.message);
        }
        done += 1;
        if (onProgress) onProgress(done, chunks.length);
      }
    }
    await Promise.all(Array.from({ length: PARALLEL_LOADS }, work));
    return parts.flat();
  }

  function addProblem(where, message) {
    if (problems.some((known) => known.where === where)) return;
    problems.push({ where, message });
    listeners.forEach((listener) => listener());
  }

  /** Calls `listener` at every further problem of a data file; returns what ends that. */
  function onProblem(listener) {
    listeners.add(listener);
    return () => listeners.delete(listener);
  }

  /* A script or style sheet that failed is noted, so that the page can say so. Data files are noted
     by `load`, images say so in their place. */
  window.addEventListener(
    "error",
    ({ target, filename, message }) => {
      const source = filename || (target !== window && (target.src || target.href));
      if (!source || target.tagName === "IMG" || source.includes("/data/")) return;
      const where = source.split("/").slice(-2).join("/");
      addProblem(where, message || `is missing or damaged; ${REMEDY}`);
    },
    true,
  );
})();
