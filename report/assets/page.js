/* The page of one or several runs. Its data is one JSON object, embedded and, where the page is live, sent
   again as events. An update builds each section anew and patches the old one with it. */

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const STATES = {finished: "✓ finished", running: "▶ running", stopped: "■ stopped", failed: "✕ failed",
  unknown: "? unknown"};
const PARTS = ["steps", "repeated steps", "evaluation", "saving", "start-up", "away", "other"];
const STYLES = [[[], ""], [[7, 4], "dashed"], [[2, 3], "dotted"], [[10, 3, 2, 3], "dashed"]]
  .map(([dash, shape]) => ({dash, shape}));
const AXES = {step: null, tokens: "tokens_seen", time: "time"};  // the curves that translate a step

const view = {axis: "step", smoothing: 25, away: new Set(), sample: null};
const charts = new Map();
let report = null;

// ------------------------------------------------------------------------------------------------------ runs

const isSeveral = () => report.runs.length > 1;
const shown = () => report.runs.filter((run) => !view.away.has(run.name));
const letter = (run) => (isSeveral() ? LETTERS[report.runs.indexOf(run) % 26] : "");
const named = (run) => `${letter(run)} ${run.name}`.trim();
const color = (index) => `var(--color-${index % 8})`;
const runColor = (run) => color(report.runs.indexOf(run));
const text = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? null));
const date = (seconds) => new Date(seconds * 1000).toLocaleString();
const change = ({name, before, after}) => `${name} ${text(before)} → ${text(after)}`;
const changes = (segment) => segment.changes.map(change).join(", ") || "nothing";
const percent = (value) => format(value, {percent: true}, 3);

/** The function from a step of the run to its place on the chosen axis; null where the run lacks it. */
function axisOf(run) {
  const curve = run.curves[AXES[view.axis]];
  if (view.axis === "step") return (step) => step;
  const zero = view.axis === "time" && curve ? curve.y[0] : 0;
  return curve && curve.x.length ? (step) => interpolate(curve, step) - zero : null;
}

/** First and last place on the axis of the runs shown. */
function extent() {
  const ends = shown().filter(axisOf).flatMap((run) => {
    const curves = Object.values(run.curves).filter(({x}) => x.length);
    return curves.flatMap(({x}) => [x[0], x[x.length - 1]]).map(axisOf(run));
  });
  const low = ends.length ? least(ends) : 0;
  return [low, Math.max(low + 1e-3, most(ends))];
}

/** Resumes and alarms of the runs shown. */
function marks() {
  const [low, high] = extent();
  return shown().filter(axisOf).flatMap((run) => {
    const axis = (step) => Math.min(high, Math.max(low, axisOf(run)(step)));  // a failed step is not logged
    const who = isSeveral() ? `${letter(run)}: ` : "";
    const resumed = run.segments.slice(1).map((each) =>
      ({sign: "▲", color: MUTED, x: axis(each.step), text: `${who}resumed, changed: ${changes(each)}`}));
    const alarming = run.alarms.map(({step, kind, text}) =>
      ({sign: "●", color: "var(--bad)", x: axis(step), text: `${who}step ${whole(step)}, ${kind}: ${text}`}));
    return [...resumed, ...alarming];
  });
}

/** The lines of a chart for these runs; each run has a colour or, where there is only one, each series. */
function linesOf(chart, runs) {
  const isByRun = isSeveral() && !chart.stacked;
  const pairs = runs.filter(axisOf).flatMap((run) => chart.series.map((series, i) => [run, series, i]));
  return pairs.filter(([run, {curve}]) => run.curves[curve]?.x.length).map(([run, series, i]) => {
    const {x: steps, y, low, high} = run.curves[series.curve], errors = run.curves[series.error];
    const errorAt = errors && new Map(errors.x.map((step, j) => [step, errors.y[j]]));
    const sparse = series.kind === "points", {dash, shape} = STYLES[i % 4];
    const scaled = (values) => values && values.map((value) => value && value / (chart.divisor || 1));
    return {
      key: `${report.runs.indexOf(run)} ${series.curve}`,
      label: `${isByRun ? letter(run) : ""} ${series.label}`.trim(),
      steps, x: steps.map(axisOf(run)), y: scaled(y), low: scaled(low), high: scaled(high),
      error: errorAt ? steps.map((step) => errorAt.get(step) ?? null) : null,
      color: isByRun ? runColor(run) : color(i), dash, sparse, span: (view.smoothing / 100) ** 2 / 10,
      shape: chart.stacked ? "square" : `${shape} ${sparse ? "point" : ""}`,
      reference: series.reference, letter: isByRun ? letter(run) : "", how: {percent: chart.percent},
    };
  });
}

// ---------------------------------------------------------------------------------------------------- charts

function drawChart(key, groupName, place, chart, lines) {
  if (!charts.has(key)) charts.set(key, new Chart(key, groupOf(groupName)));
  const figure = charts.get(key).figure;
  if (!figure.parentNode) place.append(figure);
  figure.hidden = !lines.length;
  place.parentNode.hidden = false;  // a plot takes the size of its place
  if (lines.length) charts.get(key).update(chart, lines);
}

function drawCharts() {
  const group = Object.assign(groupOf("steps"), {extent: extent(), marks: marks()});
  const place = document.querySelector("#charts .charts");
  const axis = {seconds: view.axis === "time", axis: view.axis === "step" ? "step" : "tokens"};
  for (const chart of report.charts) {
    const bytes = chart.unit === "bytes" ? {divisor: 2 ** 30, unit: "GiB"} : chart.percent ? {unit: ""} : {};
    const full = {...chart, ...axis, ...bytes};
    if (!chart.stacked) drawChart(chart.id, "steps", place, full, linesOf(full, shown()));
    else for (const [i, run] of report.runs.entries()) {
      const title = isSeveral() ? `${chart.title}: ${named(run)}` : chart.title;
      const lines = linesOf(full, shown().filter((each) => each === run));
      drawChart(`${chart.id}-${i}`, "steps", place, {...full, title}, lines);
    }
  }
  const signs = new Set(group.marks.map(({sign}) => sign));
  fill(byId("key"), ["▲ resume.", "● alarm."].filter((words) => signs.has(words[0])).join(" "));
  byId("charts").hidden = group.charts.every(({figure}) => figure.hidden);
}

/** The function from a time to [phase, step]; where marks stop, a phase ends after ten times its median. */
function phasesOf(turns) {
  const lengths = new Map();
  for (let i = 0; i + 1 < turns.length; i++) {
    const [[start, phase], [end]] = turns.slice(i);
    lengths.set(phase, (lengths.get(phase) || []).concat(end - start));
  }
  const limit = (all) => 10 * all.sort((a, b) => a - b)[all.length >> 1];
  const limits = new Map([...lengths].map(([phase, all]) => [phase, limit(all)]));
  return (seconds) => {
    const [start, phase, step] = turns[place(turns, seconds, ([at]) => at)] || [];
    return seconds - start <= (limits.get(phase) || 0) ? [phase, step] : [null, null];
  };
}

/** The watts of each GPU over the phases of the steps, on the clock of both. */
function drawPower() {
  for (const [index, run] of report.runs.entries()) {
    const {time, gpus, marks: turns, start} = run.power || {time: []}, key = `power-${index}`;
    if (!time.length) continue;
    const lines = Object.entries(gpus).map(([gpu, y], i) => ({
      key: gpu, label: /^\d+$/.test(gpu) ? `GPU ${gpu}` : gpu, steps: time, x: time, y, color: color(i),
      ...STYLES[i % 4], how: {},
    }));
    const names = [...new Set(turns.map(([, phase]) => phase))].filter(Boolean), isNew = !charts.has(key);
    const chart = {
      title: isSeveral() ? named(run) : "Power of the GPUs", unit: `watts, from ${date(start)}`,
      seconds: true, phaseAt: phasesOf(turns), phases: names.map((name, i) => [name, color(i + 2)]),
    };
    groupOf(key).extent = [time[0], Math.max(last(time), time[0] + 1e-3)];
    drawChart(key, key, document.querySelector("#power .charts"), chart, shown().includes(run) ? lines : []);
    if (isNew) charts.get(key).clicked({dataset: {do: "wide"}});
  }
  byId("power").hidden = ![...document.querySelectorAll("#power figure")].some(({hidden}) => !hidden);
}

// -------------------------------------------------------------------------------------------------- sections

const box = (...children) => h("div", {class: "box"}, children);
const headOf = (run) => isSeveral() && h("h3", {}, swatch(runColor(run)), named(run));

function tile(label, value, below) {
  const note = h("dd", {}, h("small", {}, below));
  return h("div", {}, h("dt", {}, label), h("dd", {class: "value"}, value), note);
}

/** The last of the validation loss or of an evaluation with its chance; null for other series. */
function resultTile(run, chart, series) {
  const values = known(run.curves[series.curve]?.y || []), isLoss = series.curve === "val_loss";
  if (!values.length || !(isLoss || (series.error && typeof series.reference === "number"))) return null;
  const error = last(run.curves[series.error]?.y || []), [best, at] = run.best || [];
  const below = isLoss ? `best ${format(best)} at step ${whole(at)}`
    : `chance ${format(series.reference, chart)}`;
  return tile(isLoss ? "Validation loss" : `${chart.title}, ${series.label}`, format(last(values), chart),
    (error ? `± ${format(error, chart, 2)}, ` : "") + below);
}

/** The figures that matter: validation, evaluations, the speed of late, goodput. */
function tiles(run) {
  const speed = (name, label, say) =>
    name in run.recent && tile(label, say(run.recent[name]), "recent median");
  const found = [
    ...report.charts.flatMap((chart) => chart.series.map((series) => resultTile(run, chart, series))),
    speed("tokens_per_second", "Tokens per second", whole), speed("mfu", "MFU", percent),
    run.goodput && tile("Goodput", percent(run.goodput.share), `of ${duration(run.goodput.seconds)}`),
  ].filter(Boolean);
  return found.length > 0 && h("dl", {class: "tiles"}, found);
}

/** Why a run failed, what is left of it, and how to examine the step. */
function failure({failure: {where, reason, saved, command}, max_steps: steps}) {
  const line = (label, value) => value && h("div", {}, h("dt", {}, label), h("dd", {}, value));
  return h("div", {class: "failure", role: "alert"},
    h("h3", {}, `✕ Failed ${where}`, steps > 0 && ` of ${whole(steps)}`), h("p", {}, reason),
    h("dl", {}, line("saved", saved), line("examine the step with", command && h("code", {}, command))));
}

function overview() {
  const fact = ([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value));
  const badge = (state) => h("span", {class: `badge ${state}`}, STATES[state]);
  const left = ({eta_seconds: eta}) => typeof eta === "number" && `, about ${duration(eta)} left`;
  return h("div", {class: "cards"}, report.runs.map((run) => h("article", {class: "card"},
    isSeveral() && h("h3", {}, swatch(runColor(run)), `${named(run)} `, badge(run.state)),
    run.failure ? failure(run) : h("p", {}, run.sentence, left(run)),
    run.max_steps > 0
      && h("progress", {max: run.max_steps, value: run.step, "aria-label": `Steps of ${run.name}`}),
    tiles(run), run.facts.length > 0 && h("dl", {class: "facts"}, run.facts.map(fact)))));
}

/** A row of the results; the best cell is marked. */
function resultRow({name, better, cells, percent: isShare}) {
  const how = {percent: isShare ?? /accuracy|exact|rouge|bleu|mfu|hfu/i.test(name)};
  const given = cells.filter(Boolean);
  const sign = better === "lower" ? 1 : -1, best = sign * least(given.map(({value}) => sign * value));
  const isSameStep = new Set(given.map(({step}) => step)).size < 2;
  return [`${name}${better ? `, ${better} is better` : ""}`, ...cells.map((cell) => {
    if (!cell) return "–";
    const isBest = better && given.length > 1 && cell.value === best;
    const error = cell.stderr ? ` ± ${format(cell.stderr, how, 2)}` : "";
    return h("span", {class: isBest && "best"}, format(cell.value, how), error, isBest && aside(" (best)"),
      !isSameStep && h("small", {}, ` at step ${whole(cell.step)}`));
  })];
}

function comparison() {
  if (!report.comparison) return [];
  const {settings: differing, results, tests, refused, configurations = []} = report.comparison;
  const names = report.runs.map(named);
  const sentences = [...tests.map((test) => test.sentence), ...refused];
  const numbers = tests.map((test) => [
    test.name, whole(test.step), test.a, test.b, whole(test.n), format(test.a_value), format(test.b_value),
    `${format(test.difference)} ± ${format(test.stderr, {}, 2)}`, format(test.p, {}, 2)]);
  const head = ["measure", "step", "first", "second", "items", "first value", "second value", "difference",
    "p"];
  const overSeeds = configurations.map(({name, runs, results: [first], difference, p}) => [
    name, whole(runs.length),
    first && format(first.mean) + (first.stderr ? ` ± ${format(first.stderr, {}, 2)}` : ""),
    difference === null ? "–" : format(difference), p === null ? "–" : format(p, {}, 2)]);
  const values = differing.map((each) => [each.name, ...each.values.map(text)]);
  return [box(
    sentences.length > 0 && [h("h3", {}, "Is one better than the other?"),
      h("ul", {class: "tests"}, sentences.map((sentence) => h("li", {}, sentence))),
      tests.length > 0 && h("details", {}, h("summary", {}, "In numbers"),
        table("Paired tests on the same items", head, numbers))],
    overSeeds.length > 0 && table(
      "Over seeds, ± standard error; p by paired t-tests with Holm's correction",
      ["configuration", "runs", results[0]?.name ?? "result", "against the first", "p"], overSeeds),
    results.length > 0 && table("Results, ± standard error", ["measure", ...names], results.map(resultRow)),
    values.length ? table("Settings that differ", ["setting", ...names], values)
      : h("p", {}, "The settings are the same."))];
}

/** The samples of the chosen step or, of a run that has none there, its newest before; runs side by side. */
function samples() {
  const all = report.runs.flatMap((run) => run.samples), slider = byId("sample");
  const steps = [...new Set(all.map(({step}) => step))].sort((a, b) => a - b);
  if (!steps.length) return [];
  const index = Math.min(view.sample ?? Infinity, steps.length - 1), step = steps[index];
  [slider.max, slider.value, byId("sampled").textContent] = [steps.length - 1, index, whole(step)];
  slider.setAttribute("aria-valuetext", `step ${whole(step)}`);
  const ofRun = (prompt) => (run) => {
    const sample = run.samples.findLast((each) => each.prompt === prompt && each.step <= step);
    const head = () => h("small", {}, isSeveral() && `${named(run)}, `, `step ${whole(sample.step)}`);
    return sample && h("div", {}, head(), h("blockquote", {}, sample.text));
  };
  const prompts = [...new Set(all.map(({prompt}) => prompt))];
  return prompts.map((prompt) => box(h("h3", {class: "prompt"}, prompt || "(no prompt)"),
    h("div", {class: "texts"}, shown().map(ofRun(prompt)))));
}

/** Where the time of a run went, as a bar with its legend. */
function goodput({share, seconds, parts}) {
  const seen = parts.filter((part) => part.seconds > 1e-4 * seconds)
    .map((part) => ({...part, color: color(Math.max(0, PARTS.indexOf(part.name)))}));
  const say = (part) => `${part.name}: ${duration(part.seconds)} (${percent(part.seconds / seconds)})`;
  return [h("p", {}, `${percent(share)} of ${duration(seconds)} went into steps that counted (goodput).`),
    h("div", {class: "bar", "aria-hidden": "true"},
      seen.map((part) => h("span", {style: `flex: ${part.seconds}; color: ${part.color}`}))),
    h("ul", {class: "parts"}, seen.map((part) => h("li", {}, swatch(part.color), say(part))))];
}

function time() {
  const interruption = (each) => [date(each.time), whole(each.step), whole(each.resumed_from), each.reason,
    each.away_seconds === null ? "–" : duration(each.away_seconds), whole(each.repeated_steps)];
  const start = (each, i) => [whole(each.step), each.world_size ? whole(each.world_size) : "–",
    i ? changes(each) : "first start"];
  return shown().filter((run) => run.goodput || run.segments.length > 1).map((run) => box(
    headOf(run), run.goodput && goodput(run.goodput),
    run.goodput?.interruptions.length > 0 && table("Interruptions",
      ["when", "at step", "resumed from", "reason", "away", "repeated steps"],
      run.goodput.interruptions.map(interruption)),
    run.segments.length > 1
      && table("Starts", ["from step", "ranks", "what changed"], run.segments.map(start))));
}

function alarms() {
  const who = (name) => (isSeveral() ? [name] : []);
  const rows = shown().flatMap((run) => run.alarms.map((alarm) =>
    [whole(alarm.step), ...who(named(run)), alarm.kind, alarm.text]));
  const head = ["step", ...who("run"), "kind", "what happened"];
  return rows.length ? [box(table(`Alarms: ${rows.length}`, head, rows))] : [];
}

function sources() {
  const columns = {share: percent, tokens: whole, documents: whole, epochs: (value) => format(value, {}, 3)};
  return shown().filter((run) => run.sources.length).map((run) => {
    const isGiven = (source, name) => typeof source[name] === "number";
    const names = Object.keys(columns).filter((name) => run.sources.some((source) => isGiven(source, name)));
    const cell = (source) => (name) => (isGiven(source, name) ? columns[name](source[name]) : "–");
    return box(headOf(run), table("Sources of the training data", ["source", ...names],
      run.sources.map((source) => [source.label, ...names.map(cell(source))])));
  });
}

function settings() {
  const row = (each) => [each.name, text(each.value), text(each.default), each.meaning];
  const list = (caption, rows) => rows.length > 0
    && table(caption, ["setting", "value", "default", "meaning"], rows.map(row));
  return shown().filter((run) => run.settings.length).map((run) => {
    const those = (changed) => run.settings.filter((each) => each.changed === changed);
    const [set, usual] = [those(true), those(false)];
    const summary = `${set.length} set, ${usual.length} at their default`;
    return h("details", {class: "box"}, h("summary", {}, isSeveral() && `${named(run)}: `, summary),
      list("Set for this run", set), list("At their default", usual));
  });
}

// --------------------------------------------------------------------------------------------------- display

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
  const isShown = (run) => !view.away.has(run.name);
  const toggle = (run) => h("label", {},
    h("input", {type: "checkbox", "data-run": run.name, checked: isShown(run)}),
    swatch(runColor(run), ""), named(run));
  fill(byId("runs"), isSeveral() && report.runs.map(toggle));
  for (const option of byId("axis").options) {
    option.disabled = option.value !== "step" && !report.runs.some((run) => run.curves[AXES[option.value]]);
  }
  fill(byId("contents"), [...document.querySelectorAll("main > section:not([hidden])")].map((section) =>
    h("a", {href: `#${section.id}`}, section.firstElementChild.textContent)));
}

/** The state of the runs and of the connection: the only words that a screen reader hears unasked. */
function say(connection) {
  const line = byId("state"), count = (state) => report.runs.filter((run) => run.state === state).length;
  const counts = Object.keys(STATES).filter(count).map((state) => `${count(state)} ${state}`).join(", ");
  line.dataset.connection = connection ?? line.dataset.connection ?? "";
  const said = [isSeveral() ? counts : STATES[report.runs[0].state], line.dataset.connection];
  fill(line, said.filter(Boolean).join(" · "));
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
    // After an HTTP error it does not try again.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
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
