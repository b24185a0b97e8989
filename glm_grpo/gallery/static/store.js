/* The data of the page: files under data/ are classic scripts that hand over one object each,
   because a page opened from disk may neither fetch nor import. */
(function () {
  "use strict";

  const SCHEMA = 1;
  const PARALLEL_LOADS = 4;
  const REMEDY = "write the gallery again with: glm-grpo gallery RUN";

  const received = new Map();
  const loads = new Map();
  const problems = [];
  const listeners = new Set();

  const gallery = {
    html: htm.bind(preact.h),
    views: {},
    /* Data of data/run.js; undefined where that file is missing or damaged. */
    run: undefined,
    receive,
    load,
    loadSteps,
    loadMetrics,
    problems: () => problems.slice(),
    onProblem,
  };
  window.glmGallery = gallery;

  /** Called by the data files: keeps `data` under `key`. */
  function receive(key, data) {
    received.set(key, data);
    if (key !== "run") return;
    if (data.schema === SCHEMA) {
      gallery.run = data;
    } else {
      addProblem(
        "data/run.js",
        `its schema is ${data.schema}, this page reads schema ${SCHEMA}; ` + REMEDY,
      );
    }
  }

  /** Data of data/KEY.js as a promise; loaded once. A failure is noted and may be tried again. */
  function load(key) {
    if (received.has(key)) return Promise.resolve(received.get(key));
    if (!loads.has(key)) {
      const loading = addScript(key);
      loads.set(key, loading);
      loading.catch((error) => {
        loads.delete(key);
        addProblem(`data/${key}.js`, `is missing or damaged; ${REMEDY}`);
      });
    }
    return loads.get(key);
  }

  function addScript(key) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `data/${encodeURIComponent(key)}.js`;
      const settle = () => {
        script.remove();
        if (received.has(key)) resolve(received.get(key));
        else reject(new Error(`data/${key}.js is missing or damaged`));
      };
      script.onload = settle;
      script.onerror = settle;
      document.head.append(script);
    });
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
     by `load`, pictures say so in their place. */
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
