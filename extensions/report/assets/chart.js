/* Tables, numbers, and the figure that holds one plot with its legend, sentence and table. */

/** A scrollable table; the first cell of a row is its heading, and numbers are right-aligned. */
function table(caption, head, rows) {
  const isNumber = (cell) => typeof cell === "string" && /^([-−]?[\d.,]+([ e%±].*)?|–)?$/.test(cell);
  const side = head.map((_, i) => i > 0 && rows.every((row) => isNumber(row[i])) && "number");
  const cell = (words, i) => (i ? h("td", {class: side[i]}, words) : h("th", {scope: "row"}, words));
  return h("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": caption},
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((words, i) => h("th", {scope: "col", class: side[i]}, words)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}

/** Like `h`, for drawings. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS(document.querySelector("svg").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat());
  return element;
}

const aside = (words) => h("span", {class: "hidden"}, words);  // for screen readers alone
const swatch = (color, shape = "square") => h("span", {class: `swatch ${shape}`, style: `color: ${color}`});

// --------------------------------------------------------------------------------------------------- numbers

/** A value as text; `how.percent` says that it is a share, `how.places` gives a fixed number of decimals. */
function format(value, how = {}, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (how.percent) return `${format(100 * value, {places: how.places}, digits)} %`;
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e12)) return value.toExponential(digits - 2);
  const fixed = {minimumFractionDigits: how.places, maximumFractionDigits: how.places};
  const usual = size >= 1000 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: digits};
  return value.toLocaleString("en", how.places === undefined ? usual : fixed);
}

/** The decimals of a column: three for a last value from 0.1 to 10, fewer above, three digits below. */
const placesOf = (values) => {
  const power = Math.floor(Math.log10(Math.abs(last(values)) || 1));
  return power < -1 ? Math.min(6, 2 - power) : Math.max(0, 3 - Math.max(0, power));
};

const whole = (value) => format(value && Math.round(value));

/** A result and its standard error as [text, " ± text"], by the rules of `number_text` in
    extensions/report/numbers.py. null: NaN or infinity. */
function measured(value, error, how = {}) {
  if (typeof value !== "number") return [value === null ? "not finite" : "–", ""];
  const [scale, unit] = how.percent ? [100, " %"] : [1, ""], size = Math.abs(value * scale);
  const isPlain = how.percent || error || size === 0 || (size >= 1e-3 && size < 1e12);
  if (!isPlain) return [value.toExponential(1).replace("+", ""), ""];
  const usual = how.places ?? (how.percent ? 1 : size < 100 ? 3 : size < 1000 ? 1 : 0);
  const smallest = (error && error * scale) || size;  // its first digit is shown
  const places = smallest ? Math.max(usual, -Math.floor(Math.log10(smallest))) : usual;
  const say = (each) => (each * scale).toLocaleString("en", {minimumFractionDigits: places,
    maximumFractionDigits: places});
  return error ? [say(value), ` ± ${say(error)}${unit}`] : [say(value) + unit, ""];
}

/** Seconds as text: 0.25 s, 3 min 20 s, 2 h 05 min, 3 d 04 h. */
function duration(seconds) {
  if (seconds < 60) return `${format(seconds, {}, seconds < 10 ? 2 : 3)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [[big, size], [small, part]] = units.slice(units.findIndex(([, one]) => seconds >= one));
  const rest = String(Math.floor((seconds % size) / part)).padStart(2, "0");
  return `${Math.floor(seconds / size)} ${big} ${rest} ${small}`;
}

const least = (values) => values.reduce((a, b) => (b < a ? b : a), Infinity);
const most = (values) => -least(values.map((value) => -value));
const known = (values) => values.filter((value) => value !== null);
const last = (values) => values.findLast((value) => value !== null);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const pointsOf = ({x, y}) => x.map((at, i) => [at, y[i]]).filter(([, value]) => value !== null);

/** The index of the last element <= `value` in an ascending list, or -1. */
function place(sorted, value, key = (each) => each) {
  let low = -1, high = sorted.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (key(sorted[middle]) <= value) low = middle; else high = middle;
  }
  return low;
}

/** The linearly interpolated value of a curve at `step`. */
function interpolate({x, y}, step) {
  const i = place(x, step), j = i + 1;
  if (i < 0 || j >= x.length || x[i] === step) return y[Math.max(0, i)] ?? null;
  return y[i] === null || y[j] === null ? null : y[i] + (y[j] - y[i]) * (step - x[i]) / (x[j] - x[i]);
}

/** Lines fitted around each point with weights exp(-distance / span); a mean would bend towards the ends. */
function smooth(x, y, span) {
  const sums = y.map(() => [0, 0, 0, 0, 0]), order = [...y.keys()].filter((i) => y[i] !== null);
  for (const way of [order, [...order].reverse()]) {
    let kept = [0, 0, 0, 0, 0], before = x[way[0]];  // weights, times d, d², y, d·y; d: from the point
    for (const i of way) {
      const d = before - x[i], decay = Math.exp(-Math.abs(d) / span), [w, wd, wdd, wy, wdy] = kept;
      kept = [w, wd + d * w, wdd + 2 * d * wd + d * d * w, wy, wdy + d * wy].map((sum) => sum * decay);
      kept.forEach((sum, j) => { sums[i][j] += sum; });
      [kept[0], kept[3], before] = [kept[0] + 1, kept[3] + y[i], x[i]];
    }
  }
  return y.map((value, i) => {
    if (value === null) return null;
    const [w, wd, wdd, wy, wdy] = [sums[i][0] + 1, sums[i][1], sums[i][2], sums[i][3] + value, sums[i][4]];
    const spread = w * wdd - wd * wd;
    return spread > 1e-9 * w * wdd ? (wdd * wy - wd * wdy) / spread : wy / w;
  });
}

/** Whether a point averages values that differ. */
const isRange = ({low, high}, i) => Boolean(low) && low[i] < high[i];

/** Whether a curve fluctuates much more than it trends; other curves are never smoothed. */
function isNoisy(y) {
  const values = known(y);
  const way = values.reduce((sum, value, i) => sum + Math.abs(value - values[Math.max(0, i - 1)]), 0);
  return values.length > 40 && way > 5 * (most(values) - least(values));
}

const TIME_TICKS = [
  1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, .001, .002, .005, .01, .02, .05, .1, .2, .5,
  ...[1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800],
  ...[1, 2, 3, 6, 12, 24, 48, 120, 240, 480, 1200].map((hours) => 3600 * hours)];
const STEP_TICKS = [...Array(15).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
const UNITS = {  // from which value on, what one is, its sign
  count: [[1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"], [0, 1, ""]],
  seconds: [[172800, 86400, " d"], [7200, 3600, " h"], [120, 60, " min"], [0, 1, " s"]],
};

/** Tick labels in the largest unit in which two digits distinguish them. */
function ticks(values, how) {
  const scaled = values.map((value) => value * (how.percent ? 100 : 1)), largest = most(scaled.map(Math.abs));
  const isExact = (value) => Math.abs(value - Math.round(value)) < 1e-6;
  const isEnough = (count, size) => scaled.every((value) => isExact(value / size * 10 ** count));
  const digits = (size) => [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].find((count) => count > 8 || isEnough(count, size));
  const units = UNITS[how.seconds ? "seconds" : "count"];
  const [, size, sign] = units.find(([from, one]) => largest >= from && digits(one) <= 2) || units[3];
  const places = digits(size);
  const tiny = (value) => Number(value.toPrecision(3)).toExponential();
  const label = (value) => (places > 4 && !how.seconds ? tiny(value) : (value / size).toFixed(places)) + sign;
  return scaled.map((value) => (value ? label(value) : "0") + (how.percent ? "%" : ""));
}

/** The ticks of a logarithmic axis: round numbers within a decade, else 1, 2, 5 or 1 of each decade. */
function logTicks(low, high) {
  const decades = Math.log10(high / low), found = [];
  if (decades < 1) {
    const power = 10 ** Math.floor(Math.log10((high - low) / 5));
    const apart = power * [1, 2, 5, 10].find((factor) => factor * power >= (high - low) / 5);
    for (let i = Math.ceil(low / apart); i * apart <= high; i++) found.push(i * apart);
    return found;
  }
  for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent++) {
    for (const factor of decades < 2.5 ? [1, 2, 5] : [1]) found.push(Number(`${factor}e${exponent}`));
  }
  return found.filter((tick) => tick >= low && tick <= high);
}

// ----------------------------------------------------------------------------------------------------- chart

// The charts of a group share axis, cursor and zoom: [low, high] or null.
const groups = new Map();

function groupOf(name) {
  if (!groups.has(name)) groups.set(name, {zoom: null, extent: [0, 1], marks: [], charts: [], zoomed: []});
  return groups.get(name);
}

const probe = document.body.appendChild(h("span", {hidden: true}));

/** A CSS colour in the current theme, for a canvas. */
function ink(color, alpha = 1) {
  probe.style.color = color;
  return getComputedStyle(probe).color.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

const font = (size) => `${size}px ${getComputedStyle(document.body).fontFamily}`;
const MUTED = "var(--muted)", CARD = "var(--card)";

/** Draw the line through these points of a canvas. */
function stroke(ctx, color, dash, ...points) {
  ctx.strokeStyle = color;
  ctx.setLineDash(dash);
  ctx.beginPath();
  points.forEach(([x, y]) => ctx.lineTo(x, y));
  ctx.stroke();
}

/** One figure of lines: {key, label, steps, x, y, low, high, error, color, alpha, dash, shape, sparse, span,
    reference, letter, how}; low and high are the range of the values that a point averages, shape is that
    of the swatch, span the width of the smoothing as a part of the axis. */
class Chart {
  constructor(key, group) {
    Object.assign(this, {key, group, off: new Set(), isWide: false, isTurned: false, above: null});
    this.title = h("h3", {id: `title-${key}`});
    this.tools = h("span", {});
    this.area = h("div", {class: "plot", tabindex: 0, role: "slider", "aria-describedby": `sentence-${key}`});
    this.at = h("span", {class: "at"});
    this.legend = h("ul", {});
    this.sentence = h("p", {class: "hidden", id: `sentence-${key}`});
    this.details = h("details", {}, h("summary", {}, "Table"), h("div", {}));
    this.figure = h("figure", {class: "chart", id: `chart-${key}`, "aria-labelledby": `title-${key}`},
      h("figcaption", {}, this.title, this.tools), this.area,
      h("div", {class: "legend"}, this.at, this.legend), this.sentence, this.details);
    this.figure.addEventListener("click", (event) => this.clicked(event.target.closest("[data-do]")));
    this.tools.addEventListener("change", ({target}) => {
      saveChart(this, target.value);
      target.value = "save";
    });
    this.details.addEventListener("toggle", () => this.fillTable());
    this.area.addEventListener("keydown", (event) => this.pressed(event));
    this.listenToTouch();
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.area);
    group.charts.push(this);
  }

  size(most = Infinity) {
    return {width: Math.max(100, Math.min(most, this.area.clientWidth)), height: this.area.clientHeight};
  }

  /** Show these lines; `chart` has the form of the data's charts. */
  update(chart, lines) {
    Object.assign(this, {chart, lines});
    this.findFloor();
    const ends = lines.map(({y}) => last(y)).filter((value) => value > 0);
    const isSteep = chart.falling && this.lowest > 0 && this.highest > 3 * most(ends);
    this.isLog = (chart.log || isSteep || false) !== this.isTurned && this.canBeLog();
    this.figure.classList.toggle("wide", this.isWide);
    this.figure.classList.toggle("floating", Boolean(chart.isFloating));
    const shapes = new Map(lines.map(({series, shape}) => [series?.label, swatch(MUTED, shape)]));
    const key = chart.isFloating && shapes.size > 1 && [...shapes].map(([name, shape]) => [" ", shape, name]);
    fill(this.title, `${chart.title} `, h("small", {}, chart.unit, key));
    fill(this.tools, this.canBeLog() && this.button("log", this.isLog, ["log", aside(" axis")]),
      chart.id && this.button("pin", pins.has(chart.id), ["pin", aside(" chart")]),
      this.button("wide", this.isWide, ["wide", aside(" chart")]),
      h("select", {"aria-label": `Save ${chart.title}`}, ["save", "csv", "png", "svg"].map((kind) =>
        h("option", {value: kind}, kind))));
    const label = (line) => [swatch(line.color, line.shape), `${line.label} `, h("b", {})];
    fill(this.legend,
      lines.map((line) => h("li", {}, this.button(line.key, !this.off.has(line.key), label(line)))));
    this.sentence.textContent = lines.map((line) => this.summary(line)).join(" ");
    this.draw();
    this.fillTable();
  }

  /** The lower end of a logarithmic axis: a power of ten below the positive values. Lower values go there. */
  findFloor() {
    const values = this.lines.flatMap(({y, low, high}) => known([...y, ...(low || []), ...(high || [])]));
    const high = most(values), low = Math.max(least(values.filter((value) => value > 0)), high * 1e-9);
    Object.assign(this, {lowest: least(values), highest: high, isSpread: high > 3 * low,
      floor: high > 0 ? Number(`1e${Math.ceil(Math.log10(low)) - 1}`) : null});
  }

  canBeLog() {
    const isUseful = this.chart.log || (this.lowest >= 0 && this.isSpread);
    return !this.chart.stacked && this.floor > 0 && isUseful;
  }

  /** The value where it is drawn. */
  onAxis(value) {
    return value === null || !this.isLog ? value : Math.max(value, this.floor);
  }

  button(action, isPressed, content) {
    return h("button", {type: "button", "data-do": action, "aria-pressed": String(isPressed)}, content);
  }

  clicked(button) {
    if (!button) return;
    const action = button.dataset.do;
    if (action === "log") this.isTurned = !this.isTurned;
    else if (action === "pin") return pin(this);
    else if (action === "wide") this.isWide = !this.isWide;
    else if (!this.off.delete(action)) this.off.add(action);
    this.update(this.chart, this.lines);
  }

  summary({label, steps, y, low, high, how}) {
    const [values, lows, highs] = [y, low || y, high || y].map((ends) => pointsOf({x: steps, y: ends}));
    if (!values.length) return `${label}: no values.`;
    const say = ([step, value]) => `${format(value, how)} at step ${whole(step)}`;
    const lowest = lows.reduce((a, b) => (b[1] < a[1] ? b : a));
    const highest = highs.reduce((a, b) => (b[1] > a[1] ? b : a));
    return `${label}: last ${say(values.at(-1))}, lowest ${say(lowest)}, highest ${say(highest)}.`;
  }

  /** The labels of the lines, then a row for each step; `cell` makes the text of a line's point. */
  rows(empty, cell) {
    const rows = new Map();
    this.lines.forEach((line, column) => line.steps.forEach((step, i) => {
      if (!rows.has(step)) rows.set(step, [String(step), ...this.lines.map(() => empty)]);
      if (line.y[i] !== null) rows.get(step)[column + 1] = cell(line, i);
    }));
    const head = ["step", ...this.lines.map(({label}) => label)];
    return [head, ...[...rows].sort(([a], [b]) => a - b).map(([, row]) => row)];
  }

  /** Fill the chart's table of values, if it is open. */
  fillTable() {
    if (!this.details.open) return;
    const short = (value, digits) => String(Number(value.toPrecision(digits)));
    const [head, ...rows] = this.rows("–", ({y, error, low, high}, i) => short(y[i], 6)
      + (error && error[i] !== null ? ` ± ${short(error[i], 2)}` : "")
      + (isRange({low, high}, i) ? ` (${short(low[i], 4)} to ${short(high[i], 4)})` : ""));
    fill(this.details.lastChild, table(this.chart.title, head, rows));
  }

  // ------------------------------------------------------------------------------------------------- drawing

  /** The plot's columns: a line's band (high, low), its values before smoothing (raw), and itself (main). */
  columns() {
    const found = [];
    for (const line of this.lines.filter(({key}) => !this.off.has(key))) {
      const {x, y, low, high, error, span} = line;
      const edge = (sign) => y.map((value, i) => (value === null ? null : value + sign * error[i]));
      const push = (role, values) => found.push({line, x, y: values.map((each) => this.onAxis(each)), role});
      if (error || low) [["high", 1, high], ["low", -1, low]].forEach(([role, sign, ends]) =>
        push(role, error ? edge(sign) : ends));
      const isSmooth = span > 0 && !line.sparse && isNoisy(y);
      if (isSmooth && !low) push("raw", y);
      const means = low && !line.group ? [...y.slice(0, -1), null] : y;  // the last is one value
      push("main", isSmooth ? smooth(x, means, span * (last(x) - x[0])) : means);
    }
    return this.chart.stacked ? this.stacked(found.filter(({role}) => role === "main")) : found;
  }

  /** The sums of these columns, the largest first, where the longest has points: each has its own. */
  stacked(columns) {
    const grid = columns.map(({x}) => x).reduce((a, b) => (b.length > a.length ? b : a), []);
    const sums = grid.map(() => 0);
    return columns.map(({line, x, y}) => {
      const isIn = (at) => at >= x[0] && at <= x[x.length - 1];
      grid.forEach((at, i) => { sums[i] += isIn(at) ? interpolate({x, y}, at) : 0; });
      return {line, x: grid, y: [...sums], role: "main"};
    }).reverse();
  }

  draw() {
    this.slots = this.columns();
    const data = this.slots.length ? uPlot.join(this.slots.map(({x, y}) => [x, y])) : [[0], [null]];
    const signature = JSON.stringify([this.isLog, this.chart.seconds,
      this.slots.map(({line, role}) => [line.key, role, line.color, line.x.length > 1])]);
    if (this.plot && signature === this.signature) {
      this.plot.setData(data);
    } else {
      if (this.plot) this.plot.destroy();
      this.plot = new uPlot(this.options(), data, this.area);
    }
    this.signature = signature;
    this.readOut();
  }

  options() {
    const {isLog, chart} = this, how = {percent: chart.percent};
    const rule = {stroke: () => ink("var(--grid)"), width: 1};
    const axis = {stroke: () => ink(MUTED), font: font(12), grid: rule, ticks: {...rule, size: 4}, gap: 4};
    const bottom = {...axis, space: 62, size: 26,
      incrs: chart.seconds ? TIME_TICKS : STEP_TICKS, values: (_, at) => ticks(at, {seconds: chart.seconds})};
    const width = (_, labels) => 14 + 7 * Math.max(2, ...(labels || []).map(({length}) => length));
    const side = {...axis, space: 34, size: width, values: (_, at) => ticks(at, how)};
    if (isLog) {
      const splits = (_, __, low, high) => logTicks(low, high);
      const isFloor = (one) => one === this.floor && this.lowest <= 0;
      const values = (_, at) => at.flatMap((one) => (isFloor(one) ? "≤ 0" : ticks([one], how)));
      Object.assign(side, {splits, filter: (_, at) => at, values});
    }
    const isPointed = (i) => this.slots[i - 1].role === "main" && !chart.stacked;
    const point = (_, i) => isPointed(i) && h("div", {style: "width: 7px; height: 7px; margin: -3.5px"});
    const band = (color, i) => ({series: [i + 1, i + 2], fill: () => ink(color, .15)});
    return {
      ...this.size(), legend: {show: false}, padding: [8, 22, 0, 0], axes: [bottom, side],
      scales: {x: {time: false, range: () => this.group.zoom || this.group.extent},
        y: {distr: isLog ? 3 : 1, range: (_, low, high) => this.range(low, high)}},
      series: [{}, ...this.slots.map((slot) => this.series(slot))],
      bands: this.slots.flatMap(({role, line}, i) => (role === "high" ? [band(line.color, i)] : [])),
      cursor: {
        y: false, drag: {x: true, y: false, setScale: false, dist: 4}, hover: {skip: [null, undefined]},
        points: {size: 7, show: point}, bind: {dblclick: () => () => zoom(this.group, null)},
      },
      hooks: {
        drawClear: [() => this.drawBehind()], draw: [() => this.drawAbove()],
        setCursor: [() => this.cursorMoved()], setSelect: [() => this.selected()],
      },
    };
  }

  series({line, role}) {
    const color = () => ink(line.color, line.alpha), none = {show: false};
    const paths = line.x.length > 1 ? null : uPlot.paths.bars({size: [1, 40]});  // an area has no width yet
    if (this.chart.stacked) return {stroke: () => ink(CARD), width: 1, fill: color, points: none, paths};
    if (role === "raw") return {stroke: () => ink(line.color, .3), width: 1, points: none};
    if (role !== "main") return {stroke: "transparent", width: 0, points: none};
    const points = {fill: color, stroke: color,
      ...(line.sparse && line.x.length <= 100 ? {show: true, size: 6} : {})};
    return {stroke: color, width: line.sparse || this.chart.seconds ? 1.5 : 2, dash: line.dash, points};
  }

  references() {
    const values = new Set(this.lines.map((line) => line.reference));
    return [...values].filter((value) => typeof value === "number" && (value > 0 || !this.isLog));
  }

  /** The vertical range: visible values and references; from 0 if values are stacked. */
  range(low, high) {
    if (!Number.isFinite(low ?? NaN)) return this.isLog ? [.1, 1] : [0, 1];
    if (this.chart.stacked) return [0, high * 1.05 || 1];
    const usual = this.isLog ? high : this.usualTop(low);
    // Include evaluations that are only slightly higher.
    const top = Math.max(usual, ...this.slots.filter(({role, line}) => role === "main" && line.sparse)
      .flatMap(({y}) => y).filter((value) => value !== null && value - low <= 1.5 * (usual - low)));
    this.above = high - low > 1.5 * (top - low) ? high : null;
    high = this.above === null ? high : top;
    const slack = Math.abs(high) > 100 * (high - low) ? Math.abs(high) / 100 : 0;  // of a constant
    [low, high] = [Math.min(low - slack, ...this.references()), Math.max(high + slack, ...this.references())];
    if (!this.isLog) return uPlot.rangeNum(low, high, .1, true);
    return low < high ? [low / (high / low) ** .05, high * (high / low) ** .05] : [low / 2, high * 2];
  }

  /** The highest value in sight without the first 20th, and of bands without the highest 100th. */
  usualTop(low) {
    const [start, end] = this.group.zoom || this.group.extent;
    const from = this.group.zoom ? start : start + (end - start) / 20;
    const seen = ({x, y}) => y.filter((value, i) => value !== null && x[i] >= from && x[i] <= end);
    const of = (role) => this.slots.filter((slot) => slot.role === role).flatMap(seen).sort((a, b) => a - b);
    const [lines, bands] = ["main", "high"].map(of);
    if (lines.length < 10) return Infinity;
    return Math.max(low, lines.at(-1) ?? low, bands[Math.floor(.99 * bands.length)] ?? low);
  }

  visibleMarks() {
    const {min, max} = this.plot.scales.x;
    const isShown = (run) => !this.chart.run || this.chart.run === run;
    return this.group.marks.filter(({x, run}) => isShown(run) && x >= min && x <= max);
  }

  drawBehind() {
    const {plot} = this, {ctx, bbox} = plot, unit = uPlot.pxRatio;
    ctx.save();
    ctx.lineWidth = unit;
    for (const mark of this.visibleMarks()) {
      const at = plot.valToPos(mark.x, "x", true);
      stroke(ctx, ink(mark.color, .6), [2 * unit, 3 * unit], [at, bbox.top], [at, bbox.top + bbox.height]);
    }
    ctx.restore();
  }

  /** Chance, marks at the upper edge, error bars where points are few, and the letter of each line's run. */
  drawAbove() {
    const {plot} = this, {ctx, bbox} = plot, {min, max} = plot.scales.x;
    const unit = uPlot.pxRatio, right = bbox.left + bbox.width;
    const [left, top] = ["x", "y"].map((scale) => (value) => plot.valToPos(value, scale, true));
    ctx.save();
    Object.assign(ctx, {font: font(12 * unit), lineWidth: unit, fillStyle: ink(MUTED)});
    Object.assign(ctx, {textAlign: "right", textBaseline: "alphabetic"});
    for (const reference of this.references()) {
      stroke(ctx, ink(MUTED), [4 * unit, 4 * unit], [bbox.left, top(reference)], [right, top(reference)]);
      ctx.fillText(`chance ${format(reference, this.chart)}`, right - 4 * unit, top(reference) - 5 * unit);
    }
    for (const mark of this.visibleMarks()) {
      const at = left(mark.x), size = 4 * unit, up = mark.sign === "▲" ? size : -size;
      const middle = bbox.top + size, isLate = at > (bbox.left + right) / 2;
      ctx.fillStyle = ink(mark.color);
      ctx.beginPath();
      [[0, -1], [1, 1], [-1, 1]].forEach(([x, y]) => ctx.lineTo(at + x * size, middle + y * up));
      ctx.fill();
      ctx.textAlign = isLate ? "right" : "left";
      if (mark.label) ctx.fillText(mark.label, at + (isLate ? -8 : 8) * unit, bbox.top + 10 * unit);
    }
    if (this.above !== null) {
      Object.assign(ctx, {fillStyle: ink(MUTED), textAlign: "left"});
      ctx.fillText(`▲ up to ${format(this.above, this.chart)}`, bbox.left + 6 * unit, bbox.top + 22 * unit);
    }
    const ends = [];
    for (const {line, x, y} of this.slots.filter(({role}) => role === "main")) {
      const seen = [...x.keys()].filter((i) => x[i] >= min && x[i] <= max && y[i] !== null);
      const end = seen[seen.length - 1];
      const edge = (i, sign) => [left(x[i]), top(this.onAxis(y[i] + sign * line.error[i]))];
      if (!seen.length) continue;
      if (line.error && seen.length <= 60) {
        for (const i of seen) stroke(ctx, ink(line.color), [], edge(i, -1), edge(i, 1));
      }
      ends.push({x: left(x[end]), y: top(y[end]), line});
    }
    Object.assign(ctx, {textAlign: "left", textBaseline: "middle"});
    let above = -Infinity, before = null;
    for (const end of this.chart.stacked ? [] : ends.sort((a, b) => a.y - b.y)) {
      if (!end.line.letter || (end.line.letter === before && end.y - above < 20 * unit)) continue;
      [above, before] = [Math.max(end.y, above + 11 * unit), end.line.letter];
      ctx.fillStyle = ink(end.line.color);
      ctx.fillText(before, end.x + 6 * unit, above);
    }
    ctx.restore();
  }

  // ------------------------------------------------------------------------------------------------- reading

  /** Move the group's cursors to this one, and show the values there. */
  cursorMoved() {
    const {left} = this.plot.cursor, value = left >= 0 ? this.plot.posToVal(left, "x") : null;
    for (const chart of this.group.charts.filter((each) => each.plot && !each.figure.hidden)) {
      const at = value === null ? -10 : chart.plot.valToPos(value, "x");
      if (chart !== this) chart.plot.setCursor({left: at, top: Math.min(at, 1)}, false);
      chart.readOut();
    }
  }

  /** Show the values at the cursor, or the last values, in the legend. */
  readOut() {
    const {plot, group} = this, {idx, idxs, left} = plot.cursor;
    const isActive = left >= 0 && typeof idx === "number", isKnown = (value) => value !== null;
    const said = this.lines.map((line, row) => {
      const slot = this.slots.findIndex((each) => each.line === line && each.role === "main");
      const isAt = isActive && slot >= 0;
      const i = isAt ? place(line.x, plot.data[0][idxs[slot + 1]]) : line.y.findLastIndex(isKnown);
      const [low, high] = isRange(line, i) ? [line.low[i], line.high[i]] : [];
      const range = low === undefined ? "" : ` (${format(low, line.how)} to ${format(high, line.how)})`;
      const isElsewhere = isAt ? line.sparse && i >= 0 && line.x[i] !== plot.data[0][idx]
        : i >= 0 && i < line.y.length - 1;
      const where = isElsewhere ? ` (step ${whole(line.steps[i])})` : "";
      const value = slot < 0 ? "" : measured(line.y[i], line.error?.[i], line.how).join("") + range + where;
      this.legend.children[row].querySelector("b").textContent = value;
      return `${line.label} ${value}`;
    });
    const box = this.legend.parentNode, isRight = left > this.area.clientWidth / 2;
    box.classList.toggle("active", isActive && this.figure.matches(":hover, :focus-within"));
    if (this.chart.isFloating) box.style.cssText = `${isRight ? "left: 60px" : "right: 24px"}`;
    const at = isActive ? plot.data[0][idx] : null, [low, high] = group.zoom || group.extent;
    this.at.textContent = isActive ? this.where(at) : "last:";
    const spoken = {
      "aria-label": `${this.chart.title}: values along the axis`, "aria-valuemin": low, "aria-valuemax": high,
      "aria-valuenow": at ?? high, "aria-valuetext": `${this.at.textContent} ${said.join(", ")}`,
    };
    for (const [name, value] of Object.entries(spoken)) this.area.setAttribute(name, value);
  }

  where(at) {
    const {plot, chart} = this;
    const near = this.visibleMarks().filter(({x}) => Math.abs(plot.valToPos(x, "x") - plot.cursor.left) < 6);
    const said = chart.seconds ? duration(at) : `${chart.axis} ${whole(at)}`;
    return [`${said}:`, ...near.slice(0, 3).map(({sign, text}) => `${sign} ${text}`)].join(" ");
  }

  selected() {
    const {plot} = this, {left, width} = plot.select;
    if (width > 3) zoom(this.group, [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
  }

  pressed(event) {
    const {plot, group} = this, steps = plot.data[0], [low, high] = group.zoom || group.extent;
    const now = plot.cursor.idx ?? steps.length - 1, isSeen = steps[now] >= low && steps[now] <= high;
    const jump = event.shiftKey ? 10 : 1, far = Math.ceil(steps.length / 10);
    const moves = {ArrowLeft: -jump, ArrowRight: jump, ArrowDown: -jump, ArrowUp: jump, PageDown: -far,
      PageUp: far, Home: -Infinity, End: Infinity};
    const next = Math.min(steps.length - 1, Math.max(0, now + moves[event.key]));
    const middle = isSeen ? steps[now] : (low + high) / 2, factor = {"+": .5, "=": .5, "-": 2}[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) this.moveTo(steps[next]);
    else if (factor) zoom(group, [low, high].map((end) => middle + (end - middle) * factor));
    else if (event.key === "Escape" || event.key === "0") zoom(group, null);
    else return;
    event.preventDefault();
  }

  /** Move the cursor to a value of the axis, and the zoomed range with it. */
  moveTo(value) {
    const [low, high] = this.group.zoom || this.group.extent;
    const shift = Math.min(0, value - low) + Math.max(0, value - high);
    if (shift) zoom(this.group, [low + shift, high + shift]);
    this.plot.setCursor({left: this.plot.valToPos(value, "x"), top: 1});
  }

  /** One finger reads values, two zoom; up and down still scrolls the page. */
  listenToTouch() {
    const fingers = new Map(), left = (event) => event.clientX - this.plot.over.getBoundingClientRect().left;
    this.area.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") fingers.set(event.pointerId, this.plot.posToVal(left(event), "x"));
    });
    this.area.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      if (fingers.size === 1) return this.plot.setCursor({left: left(event), top: 1});
      const [, other] = [...fingers].find(([id]) => id !== event.pointerId);
      const still = this.plot.valToPos(other, "x"), rest = this.plot.over.clientWidth - still;
      const scale = (fingers.get(event.pointerId) - other) / (left(event) - still);
      if (scale > 0) zoom(this.group, [other - still * scale, other + rest * scale]);
    });
    const lift = (event) => fingers.delete(event.pointerId);
    ["pointerup", "pointercancel"].forEach((end) => addEventListener(end, lift));
  }
}

/** Zoom all charts of the group to this range of the axis; null = the whole axis. */
function zoom(group, range) {
  const [low, high] = group.extent, [first, end] = range || group.extent;
  const [from, to] = [Math.max(low, first), Math.min(high, end)];
  if (to - from < 1e-9 * (high - low)) return;
  group.zoom = from === low && to === high ? null : [from, to];
  // Setting the scale only triggers its range function, which returns the zoom.
  for (const {plot} of group.charts) if (plot) plot.batch(() => plot.setScale("x", {min: from, max: to}));
  for (const notify of group.zoomed) notify();
  byId("reset")?.toggleAttribute("disabled", [...groups.values()].every((each) => !each.zoom));
}
