/* What is drawn for a chart: columns, lines, bands and axes as uPlot takes them. */
(function () {
  "use strict";

  const gallery = window.glmGallery;
  const { figure, hasGap, isNumber, smooth } = gallery.curveMetrics;

  const FONT = "12px system-ui, sans-serif";
  /* Of the first line, the second and so on: lines differ without their colours. */
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [14, 4]];
  const EVALUATION_DASH = [4, 4];
  const GAP_DASH = [2, 4];
  const COLOURS = 8;
  const BAND_ALPHA = "2e";
  const FAINT_ALPHA = "59";
  /* Of the largest value: a smaller span is the rounding of 32-bit numbers. */
  const FLAT = 1e-6;
  /* Of the largest value: an axis has at least this span, so that small changes look small. */
  const LEAST_SPAN = 0.02;
  /* Sizes that an axis tells from 0 and from infinity: uPlot rounds to 24 decimals. */
  const SMALLEST = 1e-15;
  const LARGEST = 1e300;

  const STEP_TICKS = ticks([1, 2, 5], 0, 8);
  /* uPlot's own end at 1e32, below the largest 32-bit number. */
  const VALUE_TICKS = ticks([1, 2, 2.5, 5], -32, 300);

  const EVALUATION_STYLE = { colour: "--ink", dash: EVALUATION_DASH };

  /**
   * Colour, as the name of a CSS variable, and dash of a line.
   *
   * @param index Of the line in its chart.
   * @param firstColour Of the first line, the others following.
   */
  function lineStyle(index, firstColour = 0) {
    return { colour: `--term-${(firstColour + index) % COLOURS}`, dash: DASHES[index % DASHES.length] };
  }

  /**
   * What uPlot draws for a chart: {columns, series, bands}, the first column being the steps.
   *
   * @param chart {lines: [{values, low, high, style}], evaluations: [{values}], band: {low, high} | null}.
   * @param smoothing Weight of the past, 0 for none.
   */
  function layOut(steps, chart, smoothing) {
    const colourOf = readColours();
    const columns = [steps];
    const series = [{}];
    const bands = [];
    const add = (values, options) => {
      columns.push(values);
      series.push({ points: { show: false }, ...options });
      return series.length - 1;
    };
    const addBand = (low, high, colour) => {
      const ends = [high, low].map((values) => add(values, { stroke: null, width: 0 }));
      bands.push({ series: ends, fill: colour + BAND_ALPHA });
    };
    if (chart.band) addBand(chart.band.low, chart.band.high, colourOf("--soft"));
    for (const { values, low, high, style } of chart.lines) {
      const colour = colourOf(style.colour);
      const shown = smooth(values, smoothing);
      if (low) addBand(smooth(low, smoothing), smooth(high, smoothing), colour);
      add(smoothing > 0 ? values : values.map(() => null), { stroke: colour + FAINT_ALPHA, width: 1 });
      if (hasGap(values)) add(shown, { stroke: colour, width: 1.5, dash: GAP_DASH, spanGaps: true });
      add(shown, { stroke: colour, width: 1.75, dash: style.dash, points: pointStyle(colour) });
    }
    for (const { values, style } of chart.evaluations) {
      const colour = colourOf(style.colour);
      const points = { show: true, size: 6, fill: colour, stroke: colour };
      add(values, { stroke: colour, width: 1.25, dash: EVALUATION_DASH, spanGaps: true, points });
    }
    if (chart.band) {
      const colour = colourOf("--worse");
      add(outside(chart), { stroke: colour, width: 0, points: { show: true, size: 8, width: 2, fill: colourOf("--panel"), stroke: colour } });
    }
    return { columns, series, bands };
  }

  /* Where there is room for them. */
  const pointStyle = (colour) => ({ size: 4, fill: colour, stroke: colour });

  /* The values that lie outside the band. */
  function outside({ lines, band }) {
    return lines[0].values.map((value, index) => {
      if (!isNumber(value) || band.low[index] === null) return null;
      const isAbove = !band.isOpenAbove && value > band.high[index];
      return isAbove || value < band.low[index] ? value : null;
    });
  }

  /* A canvas knows no CSS variables. */
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue(name).trim();
  }

  function axes(unit) {
    const colourOf = readColours();
    const axis = {
      stroke: colourOf("--soft"),
      font: FONT,
      grid: { stroke: colourOf("--line"), width: 1 },
      ticks: { show: false },
    };
    return [
      {
        ...axis,
        size: 28,
        /* Below the lowest label of the other axis, which is half a line lower than its end. */
        gap: 8,
        space: 40,
        incrs: STEP_TICKS,
        values: (plot, values) => values.map(String),
        grid: { show: false },
      },
      {
        ...axis,
        gap: 4,
        space: 28,
        incrs: VALUE_TICKS,
        size: (plot, labels) => 12 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length)),
        values: (plot, values, axis, space, step) => {
          const largest = Math.max(...values.map(Math.abs));
          return values.map((value) => figure(value, unit, Math.ceil(Math.log10(largest / step)) + 2));
        },
      },
    ];
  }

  /* From one tick to the next: digits times powers of ten. */
  function ticks(digits, first, last) {
    const powers = Array.from({ length: last - first + 1 }, (_, index) => first + index);
    return powers.flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`)));
  }

  /**
   * Ends of the axis of values: some room above and below, also where all of them are equal.
   *
   * Between two ends that are one number uPlot would draw ticks without end.
   */
  function yRange(plot, lowest, highest) {
    const [low, high] = [lowest, highest].map((value) => Math.min(Math.max(value ?? 0, -LARGEST), LARGEST));
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (size < SMALLEST) return [0, 1];
    if (high - low <= FLAT * size) return [low - size / 10, high + size / 10];
    if (high - low < LEAST_SPAN * size) {
      const beside = (LEAST_SPAN * size - (high - low)) / 2;
      return [low - beside, high + beside];
    }
    const [from, to] = uPlot.rangeNum(low, high, 0.1, true);
    // It rounds ends that share their first six digits, at times to one number.
    const room = (high - low) / 10;
    return from <= low && high <= to ? [from, to] : [low - room, high + room];
  }

  gallery.curveLayout = { EVALUATION_STYLE, axes, layOut, lineStyle, yRange };
})();
