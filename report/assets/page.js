/* The page of one or several runs. Its data is one JSON object, embedded and, where the page is live, sent again as events.
   An update builds each section anew and patches the old one with it. */

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const STATES = {finished: "✓ finished", running: "▶ running", stopped: "■ stopped", failed: "✕ failed", unknown: "? unknown"};
const PARTS = ["steps", "repeated steps", "evaluation", "saving", "start-up", "away", "other"];
const STYLES = [{dash: [], shape: ""}, {dash: [7, 4], shape: "dashed"}, {dash: [2, 3], shape: "dotted"}, {dash: [10, 3, 2, 3], shape: "dashed"}];
const AXES = {step: null, tokens: "tokens_seen", time: "time"};  // the curves that translate a step

const view = {axis: "step", smoothing: 25, away: new Set(), sample: null};
const charts = new Map();
let report = null;

// -------------------------------------------------------------------------------------------------------- runs

const isSeveral = () => report.runs.length > 1;
const shown = () => report.runs.filter((run) => !view.away.has(run.name));
const letter = (run) => (isSeveral() ? LETTERS[report.runs.indexOf(run) % 26] : "");
const named = (run) => `${letter(run)} ${run.name}`.trim();
const color = (index) => `var(--color-${index % 8})`;
const runColor = (run) => color(report.runs.indexOf(run));
const text = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? null));
const date = (seconds) => new Date(seconds * 1000).toLocaleString();
const changes = (segment) => segment.changes.map(({name, before, after}) => `${name} ${text(before)} → ${text(after)}`).join(", ") || "nothing";

/** The function from a step of the run to its place on the chosen axis; null where the run does not tell it. */
function axisOf(run) {
  const curve = run.curves[AXES[view.axis]];
  if (view.axis === "step") return (step) => step;
  const zero = view.axis === "time" && curve ? curve.y[0] : 0;
  return curve && curve.x.length ? (step) => interpolate(curve, step) - zero : null;
}

/** First and last place on the axis of the runs shown. */
function extent() {
  const ends = shown().flatMap((run) => {
    const axis = axisOf(run) || (() => []);
    return Object.values(run.curves).filter(({x}) => x.length).flatMap(({x}) => [axis(x[0]), axis(x[x.length - 1])].flat());
  });
  const low = ends.length ? Math.min(...ends) : 0;
  return [low, Math.max(low + 1e-3, ...ends)];
}

/** Resumes and alarms of the runs shown. */
function marks() {
  return shown().filter(axisOf).flatMap((run) => {
    const axis = axisOf(run), who = isSeveral() ? `${letter(run)}: ` : "";
    return [
      ...run.segments.slice(1).map((each) => ({sign: "▲", color: MUTED, x: axis(each.step), text: `${who}resumed, changed: ${changes(each)}`})),
      ...run.alarms.map((each) => ({sign: "●", color: "var(--bad)", x: axis(each.step), text: `${who}${each.kind}: ${each.text}`}))];
  });
}

/** The lines of one of the data's charts for these runs, a colour for each run or, of a single one, for each series. */
function linesOf(chart, runs) {
  const each = runs.filter(axisOf).flatMap((run) => chart.series.map((series, i) => [run, series, i, run.curves[series.curve]]));
  return each.filter(([, , , curve]) => curve && curve.x.length).map(([run, series, i, curve]) => {
    const byRun = isSeveral() && !chart.stacked, sparse = series.kind === "points", {dash, shape} = STYLES[i % 4];
    const errors = run.curves[series.error], errorAt = errors && new Map(errors.x.map((step, j) => [step, errors.y[j]]));
    return {
      key: `${report.runs.indexOf(run)} ${series.curve}`, label: `${byRun ? letter(run) : ""} ${series.label}`.trim(), steps: curve.x,
      x: curve.x.map(axisOf(run)), y: curve.y.map((value) => value && value / (chart.divisor || 1)),
      error: errorAt ? curve.x.map((step) => errorAt.get(step) ?? null) : null, color: byRun ? runColor(run) : color(i), dash,
      shape: chart.stacked ? "square" : `${shape} ${sparse ? "point" : ""}`, sparse, span: (view.smoothing / 100) ** 2 / 10,
      reference: series.reference, letter: byRun ? letter(run) : "", how: {percent: chart.percent},
    };
  });
}

// ------------------------------------------------------------------------------------------------------ charts

function drawChart(key, groupName, place, chart, lines) {
  if (!charts.has(key)) charts.set(key, new Chart(key, groupOf(groupName)));
  const figure = charts.get(key).figure;
  if (!figure.parentNode) place.append(figure);
  figure.hidden = !lines.length;
  if (lines.length) charts.get(key).update(chart, lines);
}

function drawCharts() {
  const group = Object.assign(groupOf("steps"), {extent: extent(), marks: marks()}), place = document.querySelector("#charts .charts");
  const common = {seconds: view.axis === "time", axis: view.axis === "step" ? "step" : "tokens"};
  for (const chart of report.charts) {
    const bytes = chart.unit === "bytes" ? {divisor: 2 ** 30, unit: "GiB"} : chart.percent ? {unit: ""} : {};
    const full = {...chart, ...common, ...bytes};
    if (!chart.stacked) drawChart(chart.id, "steps", place, full, linesOf(full, shown()));
    else report.runs.forEach((run, i) => {
      const title = isSeveral() ? `${chart.title}: ${named(run)}` : chart.title;
      drawChart(`${chart.id}-${i}`, "steps", place, {...full, title}, linesOf(full, shown().filter((each) => each === run)));
    });
  }
  fill(byId("key"), ["▲ resume.", "● alarm."].filter((sign) => group.marks.some((mark) => mark.sign === sign[0])).join(" "));
  byId("charts").hidden = group.charts.every(({figure}) => figure.hidden);
}

/** The function from a time to [phase, step]. A phase ends with the next mark, or after ten times its median where marks stop. */
function phasesOf(marks) {
  const lengths = new Map();
  marks.slice(1).forEach(([end], i) => lengths.set(marks[i][1], [...(lengths.get(marks[i][1]) || []), end - marks[i][0]]));
  const most = new Map([...lengths].map(([phase, all]) => [phase, 10 * all.sort((a, b) => a - b)[all.length >> 1]]));
  return (seconds) => {
    const [start, phase, step] = marks[place(marks, seconds, ([at]) => at)] || [];
    return seconds - start <= (most.get(phase) || 0) ? [phase, step] : [null, null];
  };
}

/** The watts of each GPU over the phases of the steps, on the clock of both. */
function drawPower() {
  report.runs.forEach((run, index) => {
    const {time, gpus, marks: turns, start} = run.power || {time: []}, key = `power-${index}`;
    if (!time.length) return;
    const names = [...new Set(turns.map(([, phase]) => phase))].filter(Boolean);
    const phaseAt = phasesOf(turns);
    const lines = Object.entries(gpus).map(([gpu, y], i) => ({key: gpu, label: /^\d+$/.test(gpu) ? `GPU ${gpu}` : gpu, steps: time, x: time, y,
      color: color(i), ...STYLES[i % 4], how: {}}));
    const isNew = !charts.has(key), group = groupOf(key);
    group.extent = [time[0], Math.max(last(time), time[0] + 1e-3)];
    drawChart(key, key, document.querySelector("#power .charts"), {title: isSeveral() ? named(run) : "Power of the GPUs",
      unit: `watts, from ${date(start)}`, seconds: true, phaseAt, phases: names.map((name, i) => [name, color(i + 2)])},
    shown().includes(run) ? lines : []);
    if (isNew) charts.get(key).clicked({dataset: {do: "wide"}});
  });
  byId("power").hidden = ![...charts.values()].some((chart) => chart.key.startsWith("power-") && !chart.figure.hidden);
}

// ---------------------------------------------------------------------------------------------------- sections

const box = (...children) => h("div", {class: "box"}, children);
const headOf = (run) => isSeveral() && h("h3", {}, swatch(runColor(run)), named(run));

/** The figures that matter: the last of the validation, evaluations against chance, the speed of late. */
function tiles(run) {
  const found = [], add = (label, value, below) => found.push(h("div", {}, h("dt", {}, label), h("dd", {class: "value"}, value), h("dd", {}, h("small", {}, below))));
  for (const chart of report.charts) {
    for (const series of chart.series) {
      const curve = run.curves[series.curve], isLoss = series.curve === "val_loss", value = curve && last(curve.y);
      if (typeof value !== "number" || !(isLoss || (series.error && typeof series.reference === "number"))) continue;
      const errors = run.curves[series.error], error = errors && last(errors.y), i = curve.y.indexOf(Math.min(...curve.y.filter((y) => y !== null)));
      const below = isLoss ? `best ${format(curve.y[i])} at step ${whole(curve.x[i])}` : `chance ${format(series.reference, chart)}`;
      add(isLoss ? "Validation loss" : `${chart.title}, ${series.label}`, format(value, chart), (error ? `± ${format(error, chart, 2)}, ` : "") + below);
    }
  }
  for (const [name, label, how] of [["tokens_per_second", "Tokens per second", {}], ["mfu", "MFU", {percent: true}]]) {
    const late = run.curves[name] ? run.curves[name].y.filter((value) => value !== null).slice(-21).sort((a, b) => a - b) : [];
    if (late.length) add(label, format(late[late.length >> 1], how, 3), "recent median");
  }
  if (run.goodput) add("Goodput", format(run.goodput.share, {percent: true}, 3), `of ${duration(run.goodput.seconds)}`);
  return found.length > 0 && h("dl", {class: "tiles"}, found);
}

function overview() {
  return h("div", {class: "cards"}, report.runs.map((run) => h("article", {class: "card"},
    isSeveral() && h("h3", {}, swatch(runColor(run)), `${named(run)} `, h("span", {class: `badge ${run.state}`}, STATES[run.state])),
    h("p", {}, run.sentence, typeof run.eta_seconds === "number" && `, about ${duration(run.eta_seconds)} left`),
    run.max_steps > 0 && h("progress", {max: run.max_steps, value: run.step, "aria-label": `Steps of ${run.name}`}), tiles(run),
    run.facts.length > 0 && h("dl", {class: "facts"}, run.facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))))));
}

function comparison() {
  if (!report.comparison) return [];
  const {settings: differing, results, tests} = report.comparison, names = report.runs.map(named);
  const cell = (how, better, values) => (each) => each && h("span", {class: each.value === better && "best"},
    `${format(each.value, how)}${each.stderr ? ` ± ${format(each.stderr, how, 2)}` : ""}`, each.value === better && h("span", {class: "hidden"}, " (best)"),
    new Set(values.map(({step}) => step)).size > 1 && h("small", {}, ` at step ${whole(each.step)}`));
  const rows = results.map(({name, better, cells, percent}) => {
    const values = cells.filter(Boolean), best = values.length > 1 && better && Math[better === "lower" ? "min" : "max"](...values.map(({value}) => value));
    const how = {percent: percent ?? /accuracy|exact|rouge|bleu|mfu|hfu/i.test(name)};
    return [`${name}${better ? `, ${better} is better` : ""}`, ...cells.map(cell(how, best, values))];
  });
  const numbers = tests.map((test) => [test.name, `${test.a}, step ${whole(test.step_a)}`, `${test.b}, step ${whole(test.step_b)}`, whole(test.n),
    format(test.a_value), format(test.b_value), `${format(test.difference)} ± ${format(test.stderr, {}, 2)}`, format(test.p, {}, 2)]);
  return [box(tests.length > 0 && [h("h3", {}, "Is one better than the other?"), h("ul", {class: "tests"}, tests.map((test) => h("li", {}, test.sentence))),
    h("details", {}, h("summary", {}, "In numbers"), table("Paired tests on the same items",
      ["measure", "first", "second", "items", "value of the first", "of the second", "difference", "p"], numbers))],
  rows.length > 0 && table("Results, ± standard error", ["measure", ...names], rows),
  differing.length ? table("Settings that differ", ["setting", ...names], differing.map(({name, values}) => [name, ...values.map(text)]))
    : h("p", {}, "The settings are the same."))];
}

/** The samples of the chosen step or, of a run that has none there, its newest before; runs side by side. */
function samples() {
  const steps = [...new Set(report.runs.flatMap((run) => run.samples.map(({step}) => step)))].sort((a, b) => a - b), slider = byId("sample");
  if (!steps.length) return [];
  const index = Math.min(view.sample ?? Infinity, steps.length - 1), step = steps[index];
  [slider.max, slider.value, byId("sampled").textContent] = [steps.length - 1, index, whole(step)];
  slider.setAttribute("aria-valuetext", `step ${whole(step)}`);
  const prompts = [...new Set(report.runs.flatMap((run) => run.samples.map(({prompt}) => prompt)))];
  return prompts.map((prompt) => box(h("h3", {class: "prompt"}, prompt || "(no prompt)"), h("div", {class: "texts"}, shown().map((run) => {
    const sample = run.samples.findLast((each) => each.prompt === prompt && each.step <= step);
    return sample && h("div", {}, h("small", {}, `${isSeveral() ? `${named(run)}, ` : ""}step ${whole(sample.step)}`), h("blockquote", {}, sample.text));
  }).filter(Boolean))));
}

function time() {
  return shown().filter((run) => run.goodput || run.segments.length > 1).map((run) => {
    const {share, seconds, parts, interruptions} = run.goodput || {parts: [], interruptions: []}, part = (value) => format(value, {percent: true}, 3);
    const known = parts.filter((each) => each.seconds > 1e-4 * seconds).map((each) => ({...each, color: color(Math.max(0, PARTS.indexOf(each.name)))}));
    return box(headOf(run), run.goodput && [
      h("p", {}, `${part(share)} of ${duration(seconds)} went into steps that counted (goodput).`),
      h("div", {class: "bar", "aria-hidden": "true"}, known.map((each) => h("span", {style: `flex: ${each.seconds}; color: ${each.color}`}))),
      h("ul", {class: "parts"}, known.map((each) => h("li", {}, swatch(each.color), `${each.name}: ${duration(each.seconds)} (${part(each.seconds / seconds)})`)))],
    interruptions.length > 0 && table("Interruptions", ["when", "at step", "resumed from", "reason", "away", "repeated steps"], interruptions.map((each) =>
      [date(each.time), whole(each.step), whole(each.resumed_from), each.reason, duration(each.away_seconds), whole(each.repeated_steps)])),
    run.segments.length > 1 && table("Starts", ["from step", "ranks", "what changed"], run.segments.map((each, i) =>
      [whole(each.step), each.world_size ? whole(each.world_size) : "–", i ? changes(each) : "first start"])));
  });
}

function alarms() {
  const rows = shown().flatMap((run) => run.alarms.map((each) => [whole(each.step), ...(isSeveral() ? [named(run)] : []), each.kind, each.text]));
  return rows.length ? [box(table(`Alarms: ${rows.length}`, ["step", ...(isSeveral() ? ["run"] : []), "kind", "what happened"], rows))] : [];
}

function sources() {
  const columns = [["share", (value) => format(value, {percent: true}, 3)], ["tokens", whole], ["documents", whole], ["epochs", (value) => format(value, {}, 3)]];
  return shown().filter((run) => run.sources.length).map((run) => {
    const used = columns.filter(([name]) => run.sources.some((source) => typeof source[name] === "number"));
    return box(headOf(run), table("Sources of the training data", ["source", ...used.map(([name]) => name)], run.sources.map((source) =>
      [source.label, ...used.map(([name, say]) => (typeof source[name] === "number" ? say(source[name]) : "–"))])));
  });
}

function settings() {
  return shown().filter((run) => run.settings.length).map((run) => {
    const [set, usual] = [true, false].map((changed) => run.settings.filter((each) => each.changed === changed));
    const list = (caption, rows) => rows.length > 0 && table(caption, ["setting", "value", "default", "meaning"],
      rows.map((each) => [each.name, text(each.value), text(each.default), each.meaning]));
    return h("details", {class: "box"}, h("summary", {}, `${isSeveral() ? `${named(run)}: ` : ""}${set.length} set, ${usual.length} at their default`),
      list("Set for this run", set), list("At their default", usual));
  });
}

// ----------------------------------------------------------------------------------------------------- display

const SECTIONS = {overview, comparison, samples, time, alarms, sources, settings};

/** Show the report as the reader wants to see it. */
function refresh() {
  for (const [id, section] of Object.entries(SECTIONS)) {
    const found = [section()].flat();
    byId(id).hidden = !found.length;
    fill(byId(id).lastElementChild, found);
  }
  drawCharts();
  drawPower();
  fill(byId("runs"), isSeveral() && report.runs.map((run) => h("label", {},
    h("input", {type: "checkbox", "data-run": run.name, checked: !view.away.has(run.name)}), swatch(runColor(run), ""), named(run))));
  for (const option of byId("axis").options) {
    option.disabled = option.value !== "step" && !report.runs.some((run) => run.curves[AXES[option.value]]);
  }
  fill(byId("contents"), [...document.querySelectorAll("main > section:not([hidden])")].map((section) =>
    h("a", {href: `#${section.id}`}, section.firstElementChild.textContent)));
}

/** The state of the runs and of the connection: the only words that a screen reader hears unasked. */
function say(connection) {
  const line = byId("state"), counts = Object.keys(STATES).map((state) => [state, report.runs.filter((run) => run.state === state).length]);
  const states = isSeveral() ? counts.filter(([, count]) => count).map(([state, count]) => `${count} ${state}`).join(", ") : STATES[report.runs[0].state];
  line.dataset.connection = connection ?? line.dataset.connection ?? "";
  fill(line, [states, line.dataset.connection].filter(Boolean).join(" · "));
}

function receive(data) {
  report = data;
  fill(byId("written"), `as of ${date(data.generated)}`);
  refresh();
  say();
}

function listen() {
  const events = new EventSource("events");
  events.addEventListener("open", () => say("live"));
  events.addEventListener("data", (event) => receive(JSON.parse(event.data)));
  events.addEventListener("error", () => {
    say("connection lost, retrying");
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 3000);  // after an HTTP error it does not try again
  });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const {plot} of charts.values()) if (plot) plot.redraw(false);
}

byId("controls").addEventListener("input", ({target}) => {
  if (target.id === "theme") return setTheme(target.value);
  if (target.id === "smoothing") view.smoothing = Number(target.value);
  else if (target.id === "axis") [view.axis, groupOf("steps").zoom] = [target.value, null];
  else if (!view.away.delete(target.dataset.run)) view.away.add(target.dataset.run);
  refresh();
});
byId("reset").addEventListener("click", () => groups.forEach((group) => zoom(group, null)));
byId("sample").addEventListener("input", ({target}) => {
  view.sample = target.value === target.max ? null : Number(target.value);
  fill(byId("samples").lastElementChild, samples());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(byId("theme").value));
addEventListener("beforeprint", () => setTheme("light"));
addEventListener("afterprint", () => setTheme(byId("theme").value));
byId("controls").hidden = false;
receive(JSON.parse(byId("report").textContent));
if (document.body.dataset.live === "true") listen();
