"use strict";
/* The page of one or several runs. The data is one JSON object, embedded and, where the page is live, sent again as an event.
   An update builds each section anew and patches the old one with it, so that focus, scroll positions and opened details stay.
   What a run says is set as text, never as HTML. */

const byId = (id) => document.getElementById(id);
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const STATES = {finished: "✓ finished", running: "▶ running", stopped: "■ stopped", failed: "✕ failed", unknown: "? unknown"};
const STEPS = "steps";  // the group of charts that share an axis, a cursor and a zoom; each power chart is a group of its own

const view = {axis: "step", smoothing: 25, log: new Set(), off: new Set(), away: new Set(), wide: new Set(), zoom: {}, sample: null};
const charts = new Map();
let report = null;
let known = null;  // of the runs shown on the chosen axis: extent and marks

// ---------------------------------------------------------------------------------------------------- elements

/** Return a new element; children are elements, texts and lists of them. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") element.style.cssText = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Make `old` equal to `fresh` with the fewest changes; what the reader opened stays open. */
function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  const kept = (name) => name === "open" || name === "style";
  for (const {name} of [...old.attributes]) if (!kept(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const {name, value} of fresh.attributes) if (!kept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  // The policy of the page forbids style attributes that are set as text.
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  const children = [...fresh.childNodes];
  children.forEach((child, i) => (i < old.childNodes.length ? patch(old.childNodes[i], child) : old.append(child)));
  while (old.childNodes.length > children.length) old.lastChild.remove();
}

/** Show these children in the element, or hide its section where there are none. */
function fill(element, ...children) {
  const fresh = element.cloneNode(false);
  fresh.append(...children.flat(3).filter(Boolean));
  patch(element, fresh);
  const section = element.closest("section");
  if (section && element.matches("section > div")) section.hidden = !fresh.childNodes.length && !element.childNodes.length;
}

const isNumber = (cell) => typeof cell === "string" && /^[-+−]?[\d.,]+($|[ e%])/.test(cell);

/** A table that scrolls inside its box; cells are texts or elements, the first of a row is its heading. */
function table(caption, head, rows) {
  const numeric = head.map((_, i) => i > 0 && rows.some((row) => isNumber(row[i])) && rows.every((row) => isNumber(row[i]) || !row[i] || row[i] === "–"));
  const body = rows.map((row) => h("tr", {}, row.map((cell, i) =>
    (i ? h("td", {class: numeric[i] && "number"}, cell) : h("th", {scope: "row"}, cell)))));
  return h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption},
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((cell, i) => h("th", {scope: "col", class: numeric[i] && "number"}, cell)))),
      h("tbody", {}, body)));
}

// ----------------------------------------------------------------------------------------------------- numbers

/** A value as text; `how` may say that it is a share (percent). */
function format(value, how = {}, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (how.percent) return `${format(100 * value, {}, digits)} %`;
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e12)) return value.toExponential(digits - 2);
  return value.toLocaleString("en", size >= 1000 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: digits});
}

const whole = (value) => Math.round(value).toLocaleString("en");

/** Seconds as text: 0.25 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
function duration(seconds) {
  if (seconds < 60) return `${format(seconds, {}, seconds < 10 ? 2 : 3)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  const [[big, bigSize], [small, smallSize]] = [units[first], units[first + 1]];
  const rest = Math.floor((seconds % bigSize) / smallSize);
  return `${Math.floor(seconds / bigSize)} ${big}${rest ? ` ${rest} ${small}` : ""}`;
}

const last = (values) => values.findLast((value) => value !== null && value !== undefined);

/** The value at `step` of a curve that rises, between its points by their line. */
function interpolate({x, y}, step) {
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= step) low = middle; else high = middle;
  }
  if (step <= x[low] || low === high) return y[low];
  return step >= x[high] ? y[high] : y[low] + (y[high] - y[low]) * (step - x[low]) / (x[high] - x[low]);
}

/** Means weighted by exp(-distance / span) to both sides, which do not lag as a mean of the past does. */
function smooth(x, y, span) {
  const total = new Float64Array(y.length), weight = new Float64Array(y.length);
  const sweep = (order) => {
    let sum = 0, count = 0, before = null;
    for (const i of order) {
      if (y[i] === null) continue;
      const decay = before === null ? 0 : Math.exp(-Math.abs(x[i] - before) / span);
      [sum, count, before] = [sum * decay + y[i], count * decay + 1, x[i]];
      total[i] += sum;
      weight[i] += count;
    }
  };
  const order = [...y.keys()];
  sweep(order);
  sweep(order.reverse());
  return y.map((value, i) => (value === null ? null : (total[i] - value) / (weight[i] - 1)));
}

// -------------------------------------------------------------------------------------------------------- runs

const several = () => report.runs.length > 1;
const shown = () => report.runs.filter((run) => !view.away.has(run.name));
const letter = (run) => LETTERS[report.runs.indexOf(run) % 26];
const named = (run) => (several() ? `${letter(run)} ${run.name}` : run.name);
const colorOf = (index) => `var(--color-${index % 8})`;
const runColor = (run) => colorOf(report.runs.indexOf(run));

/** The function from a step of the run to its place on the chosen axis, or null where the run does not tell it. */
function axisOf(run) {
  if (view.axis === "step") return (step) => step;
  const curve = run.curves[view.axis === "time" ? "time" : "tokens_seen"];
  if (!curve || !curve.x.length) return null;
  const zero = view.axis === "time" ? curve.y[0] : 0;
  return (step) => interpolate(curve, step) - zero;
}

/** First and last place on the axis of the runs shown. */
function findExtent() {
  const ends = shown().flatMap((run) => {
    const axis = axisOf(run), curves = Object.values(run.curves).filter(({x}) => x.length);
    return axis ? curves.flatMap(({x}) => [axis(x[0]), axis(x[x.length - 1])]) : [];
  });
  const low = Math.min(...ends), high = Math.max(...ends);
  return ends.length ? [low, high > low ? high : low + 1] : [0, 1];
}

/** Resumes and alarms of the runs shown, with their place on the axis. */
function findMarks() {
  return shown().flatMap((run) => {
    const axis = axisOf(run) || (() => NaN), who = several() ? `${letter(run)}: ` : "";
    const resumes = run.segments.slice(1).map((segment) => ({step: segment.step, sign: "▲", text: `${who}resumed: ${told(segment)}`}));
    const alarms = run.alarms.map((alarm) => ({step: alarm.step, sign: "●", text: `${who}${alarm.kind}: ${alarm.text}`}));
    return [...resumes, ...alarms].map((mark) => ({...mark, x: axis(mark.step), color: mark.sign === "▲" ? "--muted" : "--bad"}));
  });
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const change = ({name, before, after}) => `${name} ${text(before)} → ${text(after)}`;
const told = (segment) => segment.changes.map(change).join(", ") || "nothing changed";

// ------------------------------------------------------------------------------------------------------ charts

const probe = document.body.appendChild(h("span", {hidden: true}));

/** A CSS colour as the canvas takes it, in the theme of now. */
function color(name, alpha = 1) {
  probe.style.color = name.startsWith("--") ? `var(${name})` : name;
  const found = getComputedStyle(probe).color;
  return alpha === 1 ? found : found.replace(/^rgba?\(([^,)]+),([^,)]+),([^,)]+).*/, `rgba($1,$2,$3,${alpha})`);
}

const FONT = `12px ${getComputedStyle(document.documentElement).getPropertyValue("--font")}`;
const SECONDS = [1e-6, 1e-5, 1e-4, 1e-3, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  10800, 21600, 43200, 86400, 172800, 432800, 864000, 1728000];

/** Tick labels: k, M and G, or seconds to days, by the distance of the ticks, so that neighbours differ. */
function ticks(values, increment, how) {
  const largest = Math.max(0, ...values.map((value) => Math.abs(value || 0)));
  const scales = how.seconds ? [[86400, " d"], [3600, " h"], [60, " min"], [1, " s"]] : [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const [size, unit] = scales.find(([scale]) => largest >= scale * (how.seconds ? 2 : 10) && increment >= scale / 20) || scales[3];
  return values.map((value) => {
    if (value === null) return "";
    if (!value && !how.seconds) return how.percent ? "0%" : "0";
    const scaled = (how.percent ? 100 : 1) * value / size, apart = (how.percent ? 100 : 1) * increment / size;
    const digits = Math.min(9, Math.max(0, -Math.floor(Math.log10(apart) + 1e-9)));
    const label = scaled && digits > 4 && !how.seconds ? scaled.toExponential(1).replace(".0e", "e") : scaled.toFixed(digits);
    return `${label}${unit}${how.percent ? "%" : ""}`;
  });
}

/** Ticks of a logarithmic axis: round numbers within a decade, or 1, 2, 5 or 1 of each decade. */
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 1.1) {
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const apart = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    return Array.from({length: 12}, (_, i) => (Math.ceil(low / apart) + i) * apart).filter((tick) => tick <= high);
  }
  const found = [];
  for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent++) {
    for (const factor of decades < 2.5 ? [1, 2, 5] : [1]) found.push(Number(`${factor}e${exponent}`));
  }
  return found.filter((tick) => tick >= low && tick <= high);
}

/** One figure: a plot, its legend with values, a sentence and a table. */
class Chart {
  constructor(key, group) {
    Object.assign(this, {key, group, plot: null, signature: ""});
    this.title = h("h3", {id: `title-${key}`});
    this.tools = h("span", {});
    this.area = h("div", {class: "plot", id: `plot-${key}`, tabindex: 0, role: "slider"});
    this.at = h("p", {class: "at"});
    this.legend = h("ul", {class: "legend"});
    this.sentence = h("p", {class: "hidden", id: `sentence-${key}`});
    this.details = h("details", {}, h("summary", {}, "Table"), h("div", {}));
    this.figure = h("figure", {class: "chart", id: `chart-${key}`, "aria-labelledby": `title-${key}`},
      h("figcaption", {}, this.title, this.tools), this.area, this.at, this.legend, this.sentence, this.details);
    this.figure.addEventListener("click", (event) => this.clicked(event.target.closest("[data-do]")));
    this.details.addEventListener("toggle", () => this.fillTable());
    this.area.addEventListener("keydown", (event) => this.pressed(event));
    this.listenToTouch();
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.area);
  }

  size() {
    return {width: Math.max(this.area.clientWidth, 100), height: this.area.clientHeight};
  }

  /** Show `chart` (one of the data's charts, or of its kind) with these lines. */
  update(chart, lines) {
    Object.assign(this, {chart, lines});
    const log = view.log.has(this.key), wide = view.wide.has(this.key);
    this.figure.classList.toggle("wide", wide);
    patch(this.title, h("h3", {id: `title-${this.key}`}, chart.title, " ", h("small", {}, chart.unit || "")));
    patch(this.tools, h("span", {},
      chart.log && h("button", {type: "button", "data-do": "log", "aria-pressed": String(log)}, log ? "linear" : "log"), " ",
      h("button", {type: "button", "data-do": "wide", "aria-pressed": String(wide), "aria-label": `Enlarge ${chart.title}`}, wide ? "smaller" : "larger")));
    patch(this.legend, h("ul", {class: "legend"}, lines.map((line) => h("li", {},
      h("button", {type: "button", "data-do": line.key, "aria-pressed": String(!this.isOff(line))},
        h("span", {class: `swatch ${line.swatch}`, style: `color: ${line.color}`}), line.label, " ", h("b", {})))),
    (chart.phases || []).map(([name, shade]) => h("li", {},
      h("span", {class: "swatch square", style: `color: ${shade}`}), name, " "))));
    this.sentence.textContent = lines.map((line) => this.summary(line)).join(" ") || "No data.";
    this.draw();
    this.fillTable();
  }

  isOff(line) {
    return view.off.has(`${this.key} ${line.key}`);
  }

  summary(line) {
    const points = line.y.map((value, i) => [value, line.steps[i]]).filter(([value]) => value !== null);
    if (!points.length) return `${line.label}: no values.`;
    const say = ([value, step]) => `${format(value, this.chart)} at ${this.chart.seconds ? duration(step) : `step ${whole(step)}`}`;
    const lowest = points.reduce((a, b) => (b[0] < a[0] ? b : a)), highest = points.reduce((a, b) => (b[0] > a[0] ? b : a));
    return `${line.label}: last ${say(points[points.length - 1])}, lowest ${say(lowest)}, highest ${say(highest)}.`;
  }

  /** The values behind the picture, filled when the reader opens them. */
  fillTable() {
    if (!this.details.open) return;
    const most = 2000, rows = new Map();
    this.lines.forEach((line, column) => line.steps.forEach((step, i) => {
      if (!rows.has(step)) rows.set(step, Array(this.lines.length).fill("–"));
      const error = line.error && line.error[i];
      if (line.y[i] !== null) rows.get(step)[column] = String(Number(line.y[i].toPrecision(6))) + (error ? ` ± ${Number(error.toPrecision(2))}` : "");
    }));
    const every = Math.ceil(rows.size / most);
    const kept = [...rows].sort(([a], [b]) => a - b).filter((_, i) => i % every === 0 || i === rows.size - 1);
    const caption = `${this.chart.title}${every > 1 ? `, every ${every}th of ${whole(rows.size)} rows` : ""}`;
    fill(this.details.lastChild, table(caption, [this.chart.seconds ? "seconds" : "step", ...this.lines.map((line) => line.label)],
      kept.map(([step, cells]) => [String(step), ...cells])));
  }

  // ------------------------------------------------------------------------------------------------- drawing

  /** The columns of the plot: a line is drawn as its band (high, low), its points before smoothing, and itself. */
  columns() {
    const found = [];
    const [low, high] = this.extent(), stack = new Map();
    for (const line of this.lines.filter((each) => !this.isOff(each))) {
      const {x} = line;
      if (this.chart.stacked) {
        const sums = line.y.map((value, i) => (stack.get(x[i]) || 0) + (value || 0));
        x.forEach((at, i) => stack.set(at, sums[i]));
        found.unshift({line, x, y: sums, role: "main"});
        continue;
      }
      if (line.error) {
        const edge = (sign) => line.y.map((value, i) => (value === null ? null : value + sign * (line.error[i] || 0)));
        found.push({line, x, y: edge(1), role: "high"}, {line, x, y: edge(-1), role: "low"});
      }
      const span = view.smoothing && this.group === STEPS && line.kind === "line" && x.length > 40 && (view.smoothing / 100) ** 2 * (high - low) / 10;
      if (span) found.push({line, x, y: line.y, role: "raw"});
      found.push({line, x, y: span ? smooth(x, line.y, span) : line.y, role: "main"});
    }
    return found;
  }

  extent() {
    return this.chart.extent || known.extent;
  }

  draw() {
    const columns = this.columns(), log = view.log.has(this.key);
    this.slots = columns;
    const data = columns.length ? uPlot.join(columns.map(({x, y}) => [x, y])) : [[0], [null]];
    const signature = JSON.stringify([log, view.axis, columns.map(({line, role}) => [line.key, role, line.color])]);
    if (this.plot && signature === this.signature) {
      this.plot.setData(data);
    } else {
      if (this.plot) this.plot.destroy();
      this.plot = new uPlot(this.options(columns, log), data, this.area);
    }
    this.signature = signature;
    this.readOut();
  }

  options(columns, log) {
    const seconds = this.chart.seconds || view.axis === "time", grid = {stroke: () => color("--grid"), width: 1};
    const axis = {stroke: () => color("--muted"), font: FONT, grid, ticks: {...grid, size: 4}, gap: 4};
    const bands = columns.map(({role, line}, i) => role === "high" && {series: [i + 1, i + 2], fill: () => color(line.color, .2)});
    return {
      ...this.size(),
      legend: {show: false},
      padding: [8, several() && !this.chart.stacked && this.group === STEPS ? 18 : 10, 0, 0],
      scales: {
        x: {time: false, range: () => view.zoom[this.group] || this.extent()},
        y: {distr: log ? 3 : 1, range: (_, low, high) => this.range(low, high, log)},
      },
      axes: [
        {...axis, space: 62, size: 26, ...(seconds ? {incrs: SECONDS} : {}),
          values: (_, splits, __, ___, apart) => ticks(splits, apart, {seconds})},
        {...axis, space: 34, size: (_, values) => 14 + 7 * Math.max(2, ...(values || []).map((value) => value.length)),
          ...(log ? {splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits} : {}),
          values: (_, splits, __, ___, apart) => (log ? splits.map((split) => ticks([split], 10 ** Math.floor(Math.log10(split) - .5), this.chart)[0])
            : ticks(splits, apart, this.chart))},
      ],
      series: [{}, ...columns.map((column) => this.series(column))],
      bands: bands.filter(Boolean),
      cursor: {
        y: false, drag: {x: true, y: false, setScale: false, dist: 4},
        hover: {skip: [null, undefined]},
        points: {size: 7, show: (plot, i) => (this.slots[i - 1] && this.slots[i - 1].role === "main" && !this.chart.stacked ? h("div", {style: "width: 7px; height: 7px; margin: -3.5px"}) : null)},
        bind: {dblclick: () => () => setZoom(this.group, null)},
      },
      hooks: {
        drawClear: [(plot) => this.drawBehind(plot)],
        draw: [(plot) => this.drawAbove(plot)],
        setCursor: [(plot) => this.cursorMoved(plot)],
        setSelect: [(plot) => this.selected(plot)],
      },
    };
  }

  series({line, role}) {
    const shade = () => color(line.color);
    if (this.chart.stacked) return {stroke: () => color("--card"), width: 1, fill: shade, points: {show: false}};
    if (role === "high" || role === "low") return {stroke: "transparent", width: 0, points: {show: false}};
    if (role === "raw") return {stroke: () => color(line.color, .3), width: 1, points: {show: false}};
    const points = line.kind === "points" && line.x.length <= 100 ? {show: true, size: 6, fill: shade, stroke: shade} : {fill: shade, stroke: shade};
    return {stroke: shade, width: line.kind === "points" ? 1.5 : 2, dash: line.dash, points};
  }

  /** The vertical range: what is in sight, with the references; from 0 where values are stacked. */
  range(low, high, log) {
    if (low === null || low === undefined || !Number.isFinite(low)) return log ? [.1, 1] : [0, 1];
    const references = this.lines.map((line) => line.reference).filter((value) => typeof value === "number" && (value > 0 || !log));
    [low, high] = [Math.min(low, ...references), Math.max(high, ...references)];
    if (log) return low < high ? [low / (high / low) ** .05, high * (high / low) ** .05] : [low / 2, high * 2];
    return this.chart.stacked ? [0, high * 1.05 || 1] : uPlot.rangeNum(low, high, .1, true);
  }

  drawBehind(plot) {
    const {ctx, bbox} = plot, line = Math.max(1, uPlot.pxRatio);
    if (this.chart.phaseAt) this.drawPhases(plot);
    if (this.group !== STEPS) return;
    ctx.save();
    ctx.lineWidth = line;
    for (const mark of this.visibleMarks(plot)) {
      const at = plot.valToPos(mark.x, "x", true), size = 4 * line;
      ctx.strokeStyle = ctx.fillStyle = color(mark.color);
      ctx.setLineDash([2 * line, 3 * line]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      if (mark.sign === "●") ctx.arc(at, bbox.top, size, 0, 7);
      else [[0, -size], [size, size], [-size, size]].forEach(([dx, dy]) => ctx.lineTo(at + dx, bbox.top + dy));
      ctx.fill();
    }
    ctx.restore();
  }

  visibleMarks(plot) {
    const {min, max} = plot.scales.x;
    return known.marks.filter(({x}) => x >= min && x <= max);
  }

  /** Chance, error bars where points are few, and the letter of each run at the end of its line. */
  drawAbove(plot) {
    const {ctx, bbox} = plot, unit = uPlot.pxRatio, {min, max} = plot.scales.x, right = bbox.left + bbox.width;
    const y = (value) => plot.valToPos(value, "y", true);
    ctx.save();
    ctx.font = FONT.replace("12px", `${12 * unit}px`);
    ctx.lineWidth = unit;
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 8 * unit, bbox.width + 20 * unit, bbox.height + 16 * unit);
    ctx.clip();
    for (const reference of new Set(this.lines.map((line) => line.reference).filter((value) => typeof value === "number"))) {
      ctx.strokeStyle = ctx.fillStyle = color("--muted");
      ctx.setLineDash([4 * unit, 4 * unit]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y(reference));
      ctx.lineTo(right, y(reference));
      ctx.stroke();
      ctx.textAlign = "right";
      ctx.fillText(`chance ${format(reference, this.chart)}`, right - 4 * unit, y(reference) - 5 * unit);
    }
    ctx.setLineDash([]);
    const ends = [];
    for (const {line, role, x, y: values} of this.slots) {
      const seen = x.map((at, i) => [at, values[i], i]).filter(([at, value]) => at >= min && at <= max && value !== null);
      if (role !== "main" || !seen.length) continue;
      if (line.error && seen.length <= 60) {
        ctx.strokeStyle = color(line.color);
        for (const [at, value, i] of seen) {
          const left = plot.valToPos(at, "x", true), error = line.error[i] || 0;
          ctx.beginPath();
          ctx.moveTo(left, y(value - error));
          ctx.lineTo(left, y(value + error));
          ctx.stroke();
        }
      }
      const [at, value] = seen[seen.length - 1];
      ends.push({x: plot.valToPos(at, "x", true), y: y(value), line});
    }
    if (several() && !this.chart.stacked && this.group === STEPS) this.drawLetters(ctx, ends, unit);
    ctx.restore();
  }

  drawLetters(ctx, ends, unit) {
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    let above = -Infinity;
    for (const end of ends.sort((a, b) => a.y - b.y)) {
      above = Math.max(end.y, above + 11 * unit);
      ctx.fillStyle = color(end.line.color);
      ctx.fillText(letter(end.line.run), end.x + 5 * unit, above);
    }
  }

  /** The phase of each pixel's time, behind the curves and, in full colour, as a lane below them. */
  drawPhases(plot) {
    const {ctx, bbox} = plot, lane = 12 * uPlot.pxRatio;
    const from = Math.round(bbox.left), to = Math.round(bbox.left + bbox.width);
    const phases = new Map(this.chart.phases), at = (pixel) => this.chart.phaseAt(plot.posToVal(pixel - bbox.left + .5, "x", true))[0];
    ctx.save();
    ctx.font = FONT.replace("12px", `${11 * uPlot.pxRatio}px`);
    for (let start = from, pixel = from + 1, phase = at(from); pixel <= to; pixel++) {
      const next = pixel < to ? at(pixel) : null;
      if (next === phase) continue;
      if (phase) {
        ctx.fillStyle = color(phases.get(phase), .13);
        ctx.fillRect(start, bbox.top, pixel - start, bbox.height);
        ctx.fillStyle = color(phases.get(phase));
        ctx.fillRect(start, bbox.top + bbox.height - lane, pixel - start, lane);
        ctx.fillStyle = color("--card");
        if (ctx.measureText(phase).width + 6 < pixel - start) ctx.fillText(phase, start + 4, bbox.top + bbox.height - lane / 4);
      }
      [start, phase] = [pixel, next];
    }
    ctx.restore();
  }

  // ------------------------------------------------------------------------------------------------- reading

  cursorMoved(plot) {
    const {left} = plot.cursor;
    const value = left === undefined || left < 0 ? null : plot.posToVal(left, "x");
    for (const chart of charts.values()) {
      if (chart.group !== this.group || !chart.plot) continue;
      const place = value === null ? {left: -10, top: -10} : {left: chart.plot.valToPos(value, "x"), top: 1};
      if (chart !== this) chart.plot.setCursor(place, false);
      chart.readOut();
    }
  }

  /** Write the values at the cursor, or the last ones, into the legend. */
  readOut() {
    const {plot} = this, {idx, left} = plot.cursor, active = idx !== null && idx !== undefined && left >= 0;
    this.lines.forEach((line, row) => {
      const slot = this.slots.findIndex((column) => column.line === line && column.role === "main");
      const index = slot < 0 ? null : active ? plot.cursor.idxs[slot + 1] : undefined;
      const at = index === undefined || index === null ? -1 : line.x.indexOf(plot.data[0][index]);
      const shownAt = active ? at : line.y.length - 1 - [...line.y].reverse().findIndex((value) => value !== null);
      const value = line.y[shownAt], error = line.error && line.error[shownAt];
      const said = slot < 0 ? "" : `${format(value, this.chart)}${error ? ` ± ${format(error, this.chart, 2)}` : ""}`;
      this.legend.children[row].querySelector("b").textContent = said;
    });
    const place = active ? plot.data[0][idx] : null;
    this.at.textContent = active ? this.where(plot, place) : "last values";
    const [min, max] = view.zoom[this.group] || this.extent();
    const values = this.lines.map((line, row) => `${line.label} ${this.legend.children[row].querySelector("b").textContent}`);
    for (const [name, value] of Object.entries({"aria-label": `${this.chart.title}: values along the axis`, "aria-describedby": this.sentence.id,
      "aria-valuemin": min, "aria-valuemax": max, "aria-valuenow": place ?? max,
      "aria-valuetext": `${this.at.textContent}: ${values.join(", ")}`})) this.area.setAttribute(name, value);
  }

  where(plot, place) {
    if (this.chart.phaseAt) {
      const [phase, step] = this.chart.phaseAt(plot.posToVal(plot.cursor.left, "x"));
      return `${place.toFixed(3)} s${phase ? `, ${phase} of step ${whole(step)}` : ""}`;
    }
    const near = this.visibleMarks(plot).filter(({x}) => Math.abs(plot.valToPos(x, "x") - plot.cursor.left) < 6);
    const at = view.axis === "time" ? duration(place) : `${view.axis === "step" ? "step" : "tokens"} ${whole(place)}`;
    return [at, ...near.slice(0, 3).map(({sign, text: words}) => `${sign} ${words}`)].join("  ");
  }

  clicked(button) {
    if (!button) return;
    const sets = {log: view.log, wide: view.wide}, action = button.dataset.do;
    toggle(sets[action] || view.off, sets[action] ? this.key : `${this.key} ${action}`);
    this.update(this.chart, this.lines);
  }

  selected(plot) {
    const {left, width} = plot.select;
    if (width > 3) setZoom(this.group, [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
  }

  pressed(event) {
    const {plot} = this, steps = plot.data[0], {min, max} = plot.scales.x, now = plot.cursor.idx ?? steps.length - 1;
    const jump = event.shiftKey ? 10 : 1, far = Math.max(1, Math.round(steps.length / 10));
    const moves = {ArrowLeft: -jump, ArrowRight: jump, ArrowDown: -jump, ArrowUp: jump, PageDown: -far, PageUp: far, Home: -Infinity, End: Infinity};
    const middle = steps[now] >= min && steps[now] <= max ? steps[now] : (min + max) / 2;
    const zooms = {"+": .5, "=": .5, "-": 2};
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) this.moveTo(Math.min(steps.length - 1, Math.max(0, now + moves[event.key])));
    else if (event.key in zooms) setZoom(this.group, [min, max].map((end) => middle + (end - middle) * zooms[event.key]));
    else if (event.key === "Escape" || event.key === "0") setZoom(this.group, null);
    else return;
    event.preventDefault();
  }

  /** Put the cursor on a row of the data; the zoomed part follows it. */
  moveTo(index) {
    const value = this.plot.data[0][index], {min, max} = this.plot.scales.x;
    const shift = value < min ? value - min : value > max ? value - max : 0;
    if (shift) setZoom(this.group, [min + shift, max + shift]);
    this.plot.setCursor({left: this.plot.valToPos(value, "x"), top: 1});
  }

  /** One finger reads values, two zoom; up and down still scrolls the page. */
  listenToTouch() {
    const fingers = new Map();
    const place = (event) => event.clientX - this.plot.over.getBoundingClientRect().left;
    this.area.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") fingers.set(event.pointerId, this.plot.posToVal(place(event), "x"));
    });
    this.area.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      if (fingers.size === 1) return this.plot.setCursor({left: place(event), top: 1});
      const other = [...fingers].find(([id]) => id !== event.pointerId)[1], own = fingers.get(event.pointerId);
      const still = this.plot.valToPos(other, "x"), scale = (own - other) / (place(event) - still);
      if (scale > 0) setZoom(this.group, [other - still * scale, other + (this.plot.over.clientWidth - still) * scale]);
    });
    for (const end of ["pointerup", "pointercancel"]) this.area.addEventListener(end, (event) => fingers.delete(event.pointerId));
  }
}

function toggle(set, key) {
  if (!set.delete(key)) set.add(key);
}

/** Show [low, high] of the axis in all charts of the group, or everything. */
function setZoom(group, range) {
  const members = [...charts.values()].filter((chart) => chart.group === group && chart.plot);
  if (range) {
    const [low, high] = members[0].extent();
    range = [Math.max(low, range[0]), Math.min(high, range[1])];
    if (range[1] - range[0] < 1e-9 * (high - low) || (range[0] === low && range[1] === high)) range = range[0] === low ? null : view.zoom[group];
  }
  if (range) view.zoom[group] = range; else delete view.zoom[group];
  for (const chart of members) {
    chart.plot.batch(() => chart.plot.setScale("x", {min: 0, max: 1}));  // the range function of the scale gives the zoom
  }
  byId("reset").disabled = !Object.keys(view.zoom).length;
}

/** The lines of one of the data's charts, for these runs. */
function linesOf(chart, runs) {
  return runs.flatMap((run) => chart.series.flatMap((series, i) => {
    const curve = run.curves[series.curve], axis = axisOf(run);
    if (!curve || !curve.x.length || !axis) return [];
    const errors = series.error && run.curves[series.error];
    const errorAt = errors && new Map(errors.x.map((step, j) => [step, errors.y[j]]));
    const shade = several() && !chart.stacked ? runColor(run) : colorOf(i);
    const sparse = series.kind === "points", dash = DASHES[i % 4];
    return [{
      key: `${report.runs.indexOf(run)}/${series.curve}`, run, label: several() && !chart.stacked ? `${letter(run)} ${series.label}` : series.label,
      steps: curve.x, x: curve.x.map(axis), y: curve.y, error: errorAt ? curve.x.map((step) => errorAt.get(step) ?? null) : null,
      color: shade, dash, kind: series.kind, reference: series.reference,
      swatch: chart.stacked ? "square" : sparse ? "point" : ["", "dashed", "dotted", "dashed"][i % 4],
    }];
  }));
}

/** The chart of this key, made and placed when it is first needed. */
function chartOf(key, group, place) {
  if (!charts.has(key)) charts.set(key, new Chart(key, group));
  const chart = charts.get(key);
  if (chart.figure.parentNode !== place) place.append(chart.figure);
  return chart;
}

function drawCharts() {
  const place = document.querySelector("#charts .charts"), drawn = new Set();
  const draw = (key, chart, runs) => {
    const lines = linesOf(chart, runs);
    if (!lines.length) return;
    drawn.add(key);
    chartOf(key, STEPS, place).update(chart, lines);
  };
  for (const chart of report.charts) {
    if (!chart.stacked) draw(chart.id, chart, shown());
    else for (const run of shown()) draw(`${chart.id}-${report.runs.indexOf(run)}`, {...chart, title: several() ? `${chart.title}: ${named(run)}` : chart.title}, [run]);
  }
  for (const [key, chart] of charts) if (chart.group === STEPS) chart.figure.hidden = !drawn.has(key);
  byId("charts").hidden = !drawn.size;
  patch(byId("key"), h("span", {id: "key"}, known.marks.some(({sign}) => sign === "▲") && " ▲ resume.", known.marks.some(({sign}) => sign === "●") && " ● alarm."));
}

/** The watts of each GPU, with the phases of the steps behind them, on the clock of both. */
function drawPower() {
  const place = document.querySelector("#power .charts"), drawn = new Set();
  for (const run of shown().filter(({power}) => power && power.time.length)) {
    const {time, gpus, marks, start} = run.power, key = `power-${report.runs.indexOf(run)}`;
    const names = [...new Set(marks.map(([, phase]) => phase))].filter(Boolean);
    const phaseAt = (seconds) => {
      let low = -1, high = marks.length;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (marks[middle][0] <= seconds) low = middle; else high = middle;
      }
      return low < 0 ? [null, null] : marks[low].slice(1);
    };
    const lines = Object.entries(gpus).map(([gpu, watts], i) => ({
      key: gpu, run, label: `GPU ${gpu}`, steps: time, x: time, y: watts, error: null, color: colorOf(i), dash: DASHES[i % 4], kind: "line",
      swatch: ["", "dashed", "dotted", "dashed"][i % 4],
    }));
    drawn.add(key);
    if (!charts.has(key)) view.wide.add(key);
    const title = `Power${several() ? `: ${named(run)}` : ""}`, unit = `watts, from ${new Date(start * 1000).toLocaleString()}`;
    chartOf(key, key, place).update({title, unit, seconds: true, extent: [time[0], Math.max(last(time), time[0] + 1e-3)], phaseAt,
      phases: names.map((name, i) => [name, colorOf(i + 2)])}, lines);
  }
  for (const [key, chart] of charts) if (chart.group === key) chart.figure.hidden = !drawn.has(key);
  byId("power").hidden = !drawn.size;
}

// ---------------------------------------------------------------------------------------------------- sections

const body = (id) => document.querySelector(`#${id} > .body`);

function tile(label, value, below) {
  return h("div", {}, h("dt", {}, label), h("dd", {class: "value"}, value), below && h("dd", {}, h("small", {}, below)));
}

/** The figures that matter: the last of the validation, each evaluation against chance, and the speed of late. */
function tiles(run) {
  const found = [];
  for (const chart of report.charts) {
    for (const series of chart.series) {
      const curve = run.curves[series.curve], value = curve && last(curve.y);
      if (value === undefined || (series.curve !== "val_loss" && typeof series.reference !== "number")) continue;
      const errors = series.error && run.curves[series.error], error = errors && last(errors.y);
      const best = curve.y.reduce((a, y, i) => (y !== null && (a === null || y < curve.y[a]) ? i : a), null);
      const below = series.curve === "val_loss" ? `best ${format(curve.y[best], chart)} at step ${whole(curve.x[best])}` : `chance ${format(series.reference, chart)}`;
      const label = series.curve === "val_loss" ? "Validation loss" : `${chart.title}${chart.series.length > 1 ? `, ${series.label}` : ""}`;
      found.push(tile(label, [format(value, chart), error ? h("small", {}, ` ± ${format(error, chart, 2)}`) : null], below));
    }
  }
  for (const [name, label, how] of [["tokens_per_second", "Tokens per second", {}], ["mfu", "MFU", {percent: true}]]) {
    const late = run.curves[name] ? run.curves[name].y.filter((value) => value !== null).slice(-21).sort((a, b) => a - b) : [];
    if (late.length) found.push(tile(label, format(late[late.length >> 1], how, 3), "median of late"));
  }
  if (run.goodput) found.push(tile("Goodput", format(run.goodput.share, {percent: true}, 3), `of ${duration(run.goodput.seconds)}`));
  return found.length ? h("dl", {class: "tiles"}, found) : null;
}

function overview() {
  return h("div", {class: "cards"}, report.runs.map((run) => h("article", {class: "card"},
    h("h3", {}, several() && h("span", {class: "swatch square", style: `color: ${runColor(run)}`}), `${named(run)} `,
      h("span", {class: `badge ${run.state}`}, STATES[run.state] || run.state)),
    h("p", {}, run.sentence, run.state === "running" && run.eta_seconds !== null && `, about ${duration(run.eta_seconds)} left`),
    run.max_steps > 0 && h("progress", {max: run.max_steps, value: run.step, "aria-label": `Steps of ${run.name}`}),
    tiles(run),
    run.facts.length > 0 && h("dl", {class: "facts"}, run.facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))))));
}

function comparison() {
  const found = report.comparison, names = report.runs.map(named);
  if (!found) return null;
  const percent = new Set(report.charts.filter((chart) => chart.percent).flatMap((chart) => chart.series.flatMap(({curve, label}) => [curve, label, chart.title])));
  const results = found.results.map(({name, better, cells}) => {
    const how = {percent: percent.has(name)}, values = cells.filter(Boolean).map(({value}) => value);
    const best = values.length > 1 && better && Math[better === "lower" ? "min" : "max"](...values);
    return [`${name}${better ? ` (${better} is better)` : ""}`, ...cells.map((cell) => cell && h("span", {class: cell.value === best && "best"},
      `${format(cell.value, how)}${cell.stderr ? ` ± ${format(cell.stderr, how, 2)}` : ""}`, cell.value === best && h("span", {class: "hidden"}, " (best)"),
      h("small", {}, ` step ${whole(cell.step)}`)))];
  });
  const tests = found.tests.map((test) => h("li", {}, test.sentence));
  const numbers = found.tests.map((test) => [test.name, `${test.a} (step ${whole(test.step_a)})`, `${test.b} (step ${whole(test.step_b)})`, whole(test.n),
    format(test.a_value), format(test.b_value), `${format(test.difference)} ± ${format(test.stderr, {}, 2)}`, format(test.p, {}, 2)]);
  return h("div", {class: "box"},
    tests.length > 0 && [h("h3", {}, "Is one better?"), h("ul", {class: "tests"}, tests),
      h("details", {}, h("summary", {}, "The paired tests in numbers"), table("Paired tests on the same items",
        ["measure", "first run", "second run", "items", "first", "second", "difference", "p"], numbers))],
    results.length > 0 && [h("h3", {}, "Results"), table("Results with standard errors", ["measure", ...names], results)],
    h("h3", {}, "Settings that differ"),
    found.settings.length ? table("Settings that differ", ["setting", ...names], found.settings.map(({name, values}) => [name, ...values.map(text)])) : h("p", {}, "None."));
}

const steps = () => [...new Set(report.runs.flatMap((run) => run.samples.map(({step}) => step)))].sort((a, b) => a - b);

/** Samples of the chosen step, or the newest before it; runs side by side under each prompt. */
function samples() {
  const all = steps(), slider = byId("sample");
  if (!all.length) return null;
  const index = view.sample === null ? all.length - 1 : Math.min(view.sample, all.length - 1), step = all[index];
  [slider.max, slider.value, byId("sampled").textContent] = [all.length - 1, index, whole(step)];
  slider.setAttribute("aria-valuetext", `step ${whole(step)}`);
  const prompts = [...new Set(report.runs.flatMap((run) => run.samples.map(({prompt}) => prompt)))];
  return prompts.map((prompt) => h("div", {class: "box"}, h("h3", {class: "prompt"}, prompt || "(no prompt)"),
    h("div", {class: "texts"}, shown().flatMap((run) => {
      const sample = run.samples.findLast((each) => each.prompt === prompt && each.step <= step);
      return sample ? [h("div", {}, h("small", {}, several() && `${named(run)}, `, `step ${whole(sample.step)}`), h("blockquote", {}, sample.text))] : [];
    }))));
}

function times() {
  return shown().filter((run) => run.goodput || run.segments.length > 1).map((run) => {
    const {goodput} = run, parts = goodput ? goodput.parts.filter(({seconds}) => seconds > 0) : [];
    const share = (seconds) => format(seconds / goodput.seconds, {percent: true}, 3);
    return h("div", {class: "box"}, several() && h("h3", {}, named(run)),
      goodput && [h("p", {}, `${share(goodput.share * goodput.seconds)} of ${duration(goodput.seconds)} went into steps that counted (goodput).`),
        h("div", {class: "bar", "aria-hidden": "true"}, parts.map(({seconds}, i) => h("span", {style: `flex: ${seconds}; color: ${colorOf(partColor(parts[i].name))}`}))),
        h("ul", {class: "parts"}, parts.map(({name, seconds}) => h("li", {}, h("span", {class: "swatch square", style: `color: ${colorOf(partColor(name))}`}),
          `${name}: ${duration(seconds)} (${share(seconds)})`))),
        goodput.interruptions.length > 0 && table("Interruptions", ["when", "at step", "went on from", "reason", "away", "repeated steps"],
          goodput.interruptions.map((each) => [new Date(each.time * 1000).toLocaleString(), whole(each.step), whole(each.resumed_from), each.reason,
            duration(each.away_seconds), whole(each.repeated_steps)]))],
      run.segments.length > 1 && table("Starts of this run", ["from step", "ranks", "what changed"],
        run.segments.map((segment, i) => [whole(segment.step), segment.world_size === null ? "–" : whole(segment.world_size), i ? told(segment) : "the first start"])));
  });
}

const PARTS = ["steps", "repeated steps", "evaluation", "saving", "start-up", "away", "other"];
const partColor = (name) => (PARTS.indexOf(name) + 8) % 8;

function alarms() {
  const rows = shown().flatMap((run) => run.alarms.map(({step, kind, text: words}) => [whole(step), ...(several() ? [named(run)] : []), kind, words]));
  return rows.length ? h("div", {class: "box"}, table(`${rows.length} alarm${rows.length > 1 ? "s" : ""}`, ["step", ...(several() ? ["run"] : []), "kind", "what happened"], rows)) : null;
}

function sources() {
  const columns = [["share", (value) => format(value, {percent: true}, 3)], ["tokens", whole], ["documents", whole], ["epochs", (value) => format(value, {}, 3)]];
  return shown().filter((run) => run.sources.length).map((run) => {
    const used = columns.filter(([name]) => run.sources.some((source) => typeof source[name] === "number"));
    return h("div", {class: "box"}, several() && h("h3", {}, named(run)), table("Sources of the training data", ["source", ...used.map(([name]) => name)],
      run.sources.map((source) => [source.label, ...used.map(([name, how]) => (typeof source[name] === "number" ? how(source[name]) : "–"))])));
  });
}

function settings() {
  return shown().filter((run) => run.settings.length).map((run) => {
    const changed = run.settings.filter((each) => each.changed), rest = run.settings.filter((each) => !each.changed);
    const show = (caption, rows) => rows.length > 0 && table(caption, ["setting", "value", "default", "meaning"],
      rows.map(({name, value, default: usual, meaning}) => [name, text(value), text(usual), meaning]));
    return h("details", {class: "box"}, h("summary", {}, `${several() ? `${named(run)}: ` : ""}${changed.length} set, ${rest.length} at their default`),
      show("Set for this run", changed), show("At their default", rest));
  });
}

// ----------------------------------------------------------------------------------------------------- display

/** Show the report as the reader wants to see it. */
function refresh() {
  known = {extent: findExtent(), marks: findMarks()};
  fill(byId("runs"), several() && report.runs.map((run) => h("label", {}, h("input", {type: "checkbox", "data-run": run.name, checked: !view.away.has(run.name)}),
    h("span", {class: "swatch", style: `color: ${runColor(run)}`}), named(run))));
  for (const option of byId("axis").options) {
    option.disabled = option.value !== "step" && !report.runs.some((run) => run.curves[option.value === "time" ? "time" : "tokens_seen"]);
  }
  for (const [id, content] of Object.entries({overview, comparison, samples, time: times, alarms, sources, settings})) {
    const found = [content()].flat().filter(Boolean);
    byId(id).hidden = !found.length;
    fill(body(id), found);
  }
  drawCharts();
  drawPower();
  fill(byId("contents"), [...document.querySelectorAll("main > section:not([hidden])")].map((section) =>
    h("a", {href: `#${section.id}`}, section.firstElementChild.textContent)));
}

function receive(data) {
  report = data;
  const counts = Object.keys(STATES).map((state) => [state, data.runs.filter((run) => run.state === state).length]).filter(([, count]) => count);
  byId("state").dataset.runs = several() ? counts.map(([state, count]) => `${count} ${state}`).join(", ") : STATES[data.runs[0].state];
  byId("written").textContent = `as of ${new Date(data.generated * 1000).toLocaleString()}`;
  refresh();
  say();
}

/** The state of the runs and of the connection: the only words that a screen reader is told unasked. */
function say(connection) {
  const line = byId("state");
  if (connection !== undefined) line.dataset.connection = connection;
  const said = [line.dataset.runs, line.dataset.connection].filter(Boolean).join(" · ");
  if (line.textContent !== said) line.textContent = said;
}

function redraw() {
  for (const chart of charts.values()) if (chart.plot) chart.plot.redraw(false);
}

function listen() {
  const events = new EventSource("events");
  events.addEventListener("open", () => say("live"));
  events.addEventListener("data", (event) => { say("live"); receive(JSON.parse(event.data)); });
  events.addEventListener("error", () => {
    say("connection lost, retrying");
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 3000);  // after an HTTP error it does not retry by itself
  });
}

byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("controls").addEventListener("input", ({target}) => {
  if (target.dataset.run !== undefined) toggle(view.away, target.dataset.run);
  else if (target.id === "smoothing") view.smoothing = Number(target.value);
  else if (target.id === "axis") { view.axis = target.value; setZoom(STEPS, null); }
  else if (target.id === "theme") { document.documentElement.dataset.theme = target.value; return redraw(); }
  refresh();
});
byId("reset").addEventListener("click", () => Object.keys(view.zoom).forEach((group) => setZoom(group, null)));
byId("sample").addEventListener("input", ({target}) => {
  view.sample = target.value === target.max ? null : Number(target.value);
  fill(body("samples"), samples());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; redraw(); });
addEventListener("afterprint", () => { document.documentElement.dataset.theme = byId("theme").value; redraw(); });
byId("controls").hidden = false;
receive(JSON.parse(byId("report").textContent));
if (document.body.dataset.live === "true") listen();
