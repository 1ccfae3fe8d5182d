/* The page of one or several runs. Its data is one JSON object, embedded and, where the page is live, sent
   again as events. An update builds every section and patches the page where it differs. */

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const STATES = {finished: "✓ finished", running: "▶ running", stopped: "■ stopped", failed: "✕ failed",
  unknown: "? unknown"};
const STYLES = [[[], ""], [[7, 4], "dashed"], [[2, 3], "dotted"], [[10, 3, 2, 3], "dashed"]]
  .map(([dash, shape]) => ({dash, shape}));
const LAST_ALARM = "step not finite";  // it ends a run
const DETAILS = " Details: ";  // what follows it in a message is for the curious
const AXES = {step: null, tokens: "tokens_seen", time: "time"};  // curves that convert steps

const view = {axis: "step", smoothing: 25, hidden: new Set(), sample: null, isGrouped: true, sort: [0, 1]};
const charts = new Map();
const details = new Map();  // name of a run: {low, high, curves}, fetched by a live page
let report = null;

const pins = new Set();  // ids of the charts that come first, kept in the browser
try {
  JSON.parse(localStorage.getItem("paddock-pins") ?? "[]").forEach((id) => pins.add(id));
} catch { /* A browser may forbid storage. */ }

// ------------------------------------------------------------------------------------------------------ runs

const isSeveral = () => report.runs.length > 1;
const isMany = () => report.runs.length > 2;
const FEWEST_AVERAGED = 6;  // runs in a mean curve
const MOST_NAMED = 8;  // above the curves
/** Runs that differ only in seeds; those of a single group are told apart as others are. */
function groupsOfSeeds() {
  const groups = (view.isGrouped && report.comparison?.configurations) || [];
  return groups.length > 1 || report.runs.length >= FEWEST_AVERAGED ? groups : [];
}
const shown = () => report.runs.filter((run) => !view.hidden.has(run.name));
const letter = (run) => (isSeveral() ? LETTERS[report.runs.indexOf(run) % 26] : "");
const named = (run) => `${letter(run)} ${run.name}`.trim();
const color = (index) => `var(--color-${index % 8})`;
const groupIndex = (run) => groupsOfSeeds().findIndex(({runs}) => runs.includes(run.name));
const runColor = (run) => color(groupIndex(run) < 0 ? report.runs.indexOf(run) : groupIndex(run));
const change = ({name, before, after}) => `${name} ${before || "–"} → ${after || "–"}`;
const changes = (segment) => segment.changes.map(change).join(", ") || "nothing";
const percent = (value) => format(value, {percent: true}, 3);

/** A time as 2026-11-23 06:08, which is Swedish usage, in the reader's time zone. */
const date = (seconds) =>
  new Date(seconds * 1000).toLocaleString("sv", {dateStyle: "short", timeStyle: "short"});

/** The function from a run's step to its position on the chosen axis; null if the run lacks the curve. */
function axisOf(run) {
  const curve = run.curves[AXES[view.axis]];
  if (view.axis === "step") return (step) => step;
  const zero = view.axis === "time" && curve ? curve.y[0] : 0;
  return curve && curve.x.length ? (step) => interpolate(curve, step) - zero : null;
}

/** The run's first and last step in this range of the axis, extended by one at each end. */
function stepsIn(run, [low, high]) {
  const steps = Object.values(run.curves).reduce((a, {x}) => (x.length > a.length ? x : a), [0]);
  const from = place(steps, low, axisOf(run)), to = place(steps, high, axisOf(run)) + 1;
  return [steps[Math.max(0, from)], steps[Math.min(steps.length - 1, to)]];
}

/** The most detailed curve that covers the visible range: fetched, the fine end, or the whole curve. */
function levelOf(run, name) {
  const curve = run.curves[name], {zoom} = groupOf("steps");
  if (!zoom || !curve.low) return curve;
  const [low, high] = stepsIn(run, zoom), fetched = details.get(run.name);
  if (fetched?.low <= low && fetched.high >= high && fetched.curves[name]) return fetched.curves[name];
  return curve.fine && curve.fine.x[0] <= low ? curve.fine : curve;
}

/** First and last position of the visible runs, including the steps to come of a running one, and marks
    slightly beyond the last step. */
function extent() {
  const ends = shown().filter(axisOf).flatMap((run) => {
    const curves = Object.values(run.curves).filter(({x}) => x.length);
    const end = most(curves.map(({x}) => x[x.length - 1]));
    const behind = run.alarms.map(({step}) => step).filter((step) => step > end && step <= 1.1 * end + 10);
    if (run.state === "running" && view.axis === "step") behind.push(Math.max(end, run.max_steps));
    return [...curves.flatMap(({x}) => [x[0], x[x.length - 1]]), ...behind].map(axisOf(run));
  });
  const low = ends.length ? least(ends) : 0;
  return [low, Math.max(low + 1e-3, most(ends))];
}

/** Resumes and alarms of the visible runs. */
function marks() {
  const [low, high] = extent();
  return shown().filter(axisOf).flatMap((run) => {
    const axis = (step) => Math.min(high, Math.max(low, axisOf(run)(step)));  // a failed step is not logged
    const who = isSeveral() ? `${letter(run)}: ` : "";
    const resumed = run.segments.slice(1).map((each) =>
      ({sign: "▲", color: MUTED, x: axis(each.step), text: `${who}resumed, changed: ${changes(each)}`}));
    const alarming = run.alarms.map(({step, kind, text}) =>
      ({sign: "▼", color: "var(--bad)", x: axis(step), text: `${who}step ${whole(step)}, ${kind}: ${text}`,
        label: kind === LAST_ALARM && `${who}step ${whole(step)}: NaN or infinite`}));
    return [...resumed, ...alarming].map((mark) => ({...mark, run}));
  });
}

/** The lines of a chart. Several runs have one colour each; in a single run, each series has one. */
function linesOf(chart, runs) {
  const isByRun = isSeveral() && !chart.stacked;
  const pairs = runs.filter(axisOf).flatMap((run) => chart.series.map((series, i) => [run, series, i]));
  return pairs.filter(([run, {curve}]) => run.curves[curve]?.x.length).map(([run, series, i]) => {
    const {x: steps, y, low, high} = levelOf(run, series.curve), errors = run.curves[series.error];
    const errorAt = errors && new Map(errors.x.map((step, j) => [step, errors.y[j]]));
    const sparse = series.kind === "points", {dash, shape} = STYLES[i % 4];
    const scaled = (values) => values && values.map((value) => value && value / (chart.divisor || 1));
    return {
      run, series, curve: series.curve, key: `${report.runs.indexOf(run)} ${series.curve}`,
      label: !isByRun ? series.label : chart.series.length > 1 ? `${named(run)}, ${series.label}` : named(run),
      steps, x: steps.map(axisOf(run)), y: scaled(y), low: scaled(low), high: scaled(high),
      error: errorAt ? steps.map((step) => errorAt.get(step) ?? null) : null,
      color: isByRun ? runColor(run) : color(i), dash, sparse, span: (view.smoothing / 100) ** 2 / 10,
      shape: chart.stacked ? "square" : `${shape} ${sparse ? "point" : ""}`,
      reference: series.reference, letter: isByRun ? letter(run) : "",
      how: {percent: chart.percent, places: chart.percent ? 1 : placesOf(scaled(y))},
    };
  });
}

/** One line per group of at least six runs that differ only in seeds: mean, and a band from lowest to highest. */
function groupLines(lines) {
  const families = new Map(), groups = groupsOfSeeds();
  for (const line of lines) {
    const index = groupIndex(line.run), key = index < 0 ? line.key : `${index} ${line.curve}`;
    families.set(key, [...(families.get(key) || []), {...line, group: groups[index]}]);
  }
  return [...families].flatMap(([key, family]) => {
    const label = `${family[0].group?.name} ${family[0].series.label}`;
    return family.length < FEWEST_AVERAGED ? family
      : {...combined(family, mean), key, label, letter: "", error: null};
  });
}

/** The longest of these lines with a statistic of all their values, and a band from lowest to highest.
    Rare values, such as those of validations, are combined where all lines have one, never between. */
function combined(lines, statistic) {
  const longest = lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const measuredAt = ({steps, y}, step) => y[steps.indexOf(step)] ?? null;
  const valuesAt = (at, i) => known(lines.map((line) =>
    longest.sparse ? measuredAt(line, longest.steps[i]) : interpolate(line, at)));
  const columns = longest.x.map(valuesAt).map((values) =>
    longest.sparse && values.length < lines.length ? [] : values);
  const each = (pick) => columns.map((values) => (values.length ? pick(values) : null));
  return {...longest, group: lines, y: each(statistic), low: each(least), high: each(most)};
}

// ---------------------------------------------------------------------------------------------------- charts

function drawChart(key, groupName, place, chart, lines) {
  if (!charts.has(key)) charts.set(key, new Chart(key, groupOf(groupName)));
  const figure = charts.get(key).figure;
  if (!figure.parentNode) place.append(figure);
  figure.hidden = !lines.length;
  place.parentNode.hidden = false;  // a plot takes the size of its parent
  if (lines.length) charts.get(key).update(chart, lines);
}

const isFound = ({title, series}) => [title, ...series.flatMap(({label, curve}) => [label, curve])]
  .some((words) => words.toLowerCase().includes(byId("find").value.trim().toLowerCase()));

/** Pin a chart above the others, or put it back. */
function pin({chart: {id}, tools}) {
  if (!pins.delete(id)) pins.add(id);
  document.querySelectorAll("#charts figure").forEach((figure) => figure.remove());
  drawCharts();
  try {
    localStorage.setItem("paddock-pins", JSON.stringify([...pins]));
  } catch { /* A browser may forbid storage. */ }
  tools.querySelector("[data-do=pin]").focus();
}

function drawCharts() {
  const group = Object.assign(groupOf("steps"), {extent: extent(), marks: marks()});
  const place = document.querySelector("#charts .charts");
  const axis = {seconds: view.axis === "time", axis: view.axis === "step" ? "step" : "tokens"};
  for (const chart of [...report.charts].sort((a, b) => pins.has(b.id) - pins.has(a.id))) {
    const bytes = chart.unit === "bytes" ? {divisor: 2 ** 30, unit: "GiB"} : chart.percent ? {unit: ""} : {};
    const full = {...chart, ...axis, ...bytes, isFloating: isMany()};
    const runs = isFound(chart) ? shown() : [];
    if (!chart.stacked) drawChart(chart.id, "steps", place, full, groupLines(linesOf(full, runs)));
    else if (!isMany()) for (const [i, run] of report.runs.entries()) {
      const title = isSeveral() ? `${chart.title}: ${named(run)}` : chart.title;
      const lines = linesOf(full, runs.filter((each) => each === run));
      drawChart(`${chart.id}-${i}`, "steps", place, {...full, title, run}, lines);
    }
  }
  const signs = new Set(group.marks.map(({sign}) => sign));
  fill(byId("key"), ["▲ resume.", "▼ alarm."].filter((words) => signs.has(words[0])).join(" "));
  place.querySelector("figure:not([hidden])")?.after(byId("facts"));
  byId("charts").hidden = group.charts.every(({figure}) => figure.hidden);
}

// -------------------------------------------------------------------------------------------------- sections

const box = (...children) => h("div", {class: "box"}, children);
const headOf = (run) => isSeveral() && h("h3", {}, swatch(runColor(run)), named(run));

/** A curve in 60 by 20 pixels, without its steep start. */
function sparkline({x, y}) {
  const points = pointsOf({x, y}), recent = points.slice(points.length > 20 ? points.length >> 4 : 0);
  const some = recent.filter((_, i) => (recent.length - 1 - i) % Math.ceil(recent.length / 60) === 0);
  if (some.length < 2) return null;
  const [[start], [end]] = [some[0], last(some)], values = some.map(([, value]) => value);
  const low = least(values), high = Math.max(most(values), low + 1e-9 * Math.abs(low) + 1e-12);
  const across = (at) => 1 + 58 * (at - start) / (end - start),
    up = (value) => 18 - 16 * (value - low) / (high - low);
  const path = some.map(([at, value]) => `${across(at).toFixed(1)},${up(value).toFixed(1)}`).join("L");
  return svg("svg", {class: "spark", viewBox: "0 0 60 20", width: 60, height: 20, "aria-hidden": "true"},
    svg("path", {d: `M${path}`}));
}

function tile(label, [value, error = ""], below, curve) {
  return h("div", {}, h("dt", {}, label),
    h("dd", {class: "value"}, value, h("small", {}, error), curve && sparkline(curve)),
    h("dd", {}, h("small", {}, below)));
}

/** The last of the result by which the run is judged, or accuracy with its chance level; null for others. */
function resultTile(run, chart, series) {
  const curve = run.curves[series.curve], {headline} = run, isMain = series.curve === headline.curve;
  if (!known(curve?.y || []).length || !(isMain || (series.error && series.reference))) return null;
  const [best, at] = run.best || [], error = last(run.curves[series.error]?.y || []);
  const below = isMain
    ? `${headline.higher ? "highest" : "lowest"} ${measured(best, error, chart)[0]} at step ${whole(at)}`
    : `chance ${format(series.reference, chart)}`;
  const newest = measured(curve.y.at(-1), error, chart);
  return tile(isMain ? headline.title : `Accuracy, ${series.label}`, newest, below, curve);
}

/** Whether a run is long enough for its goodput to say something. */
const isLong = ({goodput: spent}) => spent?.seconds >= 600;

/** Key figures: validation, evaluations, recent speed and goodput. */
function tiles(run) {
  const speed = (name, label, how) =>
    name in run.recent && tile(label, measured(run.recent[name], 0, how), "recent median", run.curves[name]);
  const found = [
    ...report.charts.flatMap((chart) => chart.series.map((series) => resultTile(run, chart, series))),
    speed("tokens_per_second", "Tokens per second"), speed("mfu", "MFU", {percent: true}),
    isLong(run) && tile("Goodput", measured(run.goodput.share, 0, {percent: true}),
      `of ${duration(run.goodput.seconds)}`),
  ].filter(Boolean);
  return found.length > 0 && h("dl", {class: "tiles"}, found);
}

/** Why a run failed, what helps, and in `details` the rest of the message and earlier alarms. */
function failure(run) {
  const {where, reason, saved, command} = run.failure, [why, more] = reason.split(DETAILS);
  const sentences = (why[0].toUpperCase() + why.slice(1)).replace(/\.?$/, ".");
  const earlier = alarmItems(run.alarms.filter(({kind}) => kind !== LAST_ALARM));
  return h("div", {class: "failure", role: "alert"},
    h("h3", {}, `✕ Failed ${where}`, run.max_steps > 0 && ` of ${whole(run.max_steps)}`),
    h("p", {}, sentences),
    command && h("p", {class: "command"}, "Examine the step with ", h("code", {}, command), " ",
      h("button", {type: "button", "data-copy": command}, "Copy")),
    h("details", {}, h("summary", {}, "Details"), h("p", {}, `Newest checkpoint: ${saved}.`),
      more && h("p", {}, more), earlier.length > 0 && h("ul", {}, earlier)));
}

function health({health: sentences = [], sentence}) {
  const isUsual = /^(finished|running|failed)/.test(sentence) || isSeveral();
  const sign = {true: "✓", false: "✕", null: "•"}, kind = {true: "good", false: "bad", null: ""};
  return h("div", {class: "health"}, !isUsual && h("p", {}, `• ${sentence}`), sentences.map(([good, text]) =>
    h("p", {class: kind[good]}, h("span", {"aria-hidden": "true"}, `${sign[good]} `), text)));
}

const badge = ({state}) => h("span", {class: `badge ${state}`}, STATES[state]);
const timeLeft = ({eta_seconds: eta}) => (typeof eta === "number" ? `about ${duration(eta)} left` : "");

const toggle = (run) => h("label", {},
  h("input", {type: "checkbox", "data-run": run.name, checked: !view.hidden.has(run.name)}),
  swatch(runColor(run)), named(run));

/** The columns of the table of runs: title, and a function from a run to [cell, sort key]. */
function columnsOfRuns() {
  const task = report.charts.flatMap(({series}) => series).find(({error, reference}) => error && reference);
  const ofCurve = (name, errorName, how) => (run) => {
    const value = run.curves[name]?.y.at(-1);
    return [measured(value, last(run.curves[errorName]?.y || []), how).join(""), value ?? null];
  };
  const ofSetting = ({name, values}) => [name, (run) => {
    const value = values[report.runs.indexOf(run)], isNumber = value && !Number.isNaN(Number(value));
    return [value ?? "–", isNumber ? Number(value) : value];
  }];
  const has = (name) => report.runs.some((run) => run.curves[name]);
  return [
    ["run", (run) => [toggle(run), report.runs.indexOf(run)]],
    ["stage", ({stage}) => [stage, stage]],
    ["state", (run) => [badge(run), run.state]],
    ["step", (run) => [whole(run.step), run.step]],
    has("val_loss") && ["validation loss", ofCurve("val_loss", "val_loss_stderr")],
    has("val_reward") && ["held-out reward", ofCurve("val_reward", "val_reward_stderr")],
    has("val_reward_accuracy") && ["preference accuracy",
      ofCurve("val_reward_accuracy", "val_reward_accuracy_stderr", {percent: true})],
    task && [`${task.label} accuracy`, ofCurve(task.curve, task.error, {percent: true})],
    has("tokens_per_second") && ["tokens/s",
      ({recent: {tokens_per_second: speed}}) => [measured(speed)[0], speed]],
    ...report.comparison.settings.slice(0, 8).map(ofSetting),
  ].filter(Boolean);
}

/** The table of runs, sorted by the selected column. */
function runTable() {
  const columns = columnsOfRuns(), [by, sign] = view.sort, [, sorted] = columns[by] || columns[0];
  const key = (run) => sorted(run)[1] ?? null, order = (a, b) =>
    a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -sign : sign;
  const runs = [...report.runs].sort((a, b) => order(key(a), key(b)));
  const element = table("Runs", columns.map(([title], i) =>
    h("button", {type: "button", "data-sort": i}, title, by === i && (sign > 0 ? " ▲" : " ▼"))),
  runs.map((run) => columns.map(([, cell]) => cell(run)[0])));
  element.querySelectorAll("thead th")[by]?.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  return [box(element), report.runs.filter((run) => run.failure && shown().includes(run)).map((run) =>
    [h("p", {}, h("b", {}, named(run))), failure(run)])];
}

function overview() {
  if (isMany() || report.overview) return runTable();
  const steps = (run) => [run.sentence, timeLeft(run)].filter(Boolean).join(", ");
  return h("div", {class: "cards"}, report.runs.map((run) => h("article", {class: isSeveral() ? "card" : ""},
    isSeveral() && h("h3", {}, swatch(runColor(run)), `${named(run)} `, badge(run)),
    run.failure ? failure(run) : isSeveral() && h("p", {}, steps(run)),
    health(run), tiles(run))));
}

/** Machine, versions and counts of each run. */
function facts() {
  return shown().filter((run) => run.facts.length).map((run) => [headOf(run), h("dl", {class: "facts"},
    run.facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value))))]);
}

const isShare = (name) => /accuracy|exact|rouge|bleu|mfu|hfu/i.test(name);

/** A row of results; what a test says to be better is highlighted. */
function resultRow({name, better, cells, percent}) {
  const how = {percent: percent ?? isShare(name)};
  const given = cells.filter((cell) => cell && cell.value !== null);
  const isSameStep = new Set(given.map(({step}) => step)).size < 2;
  return [`${name}${better ? `, ${better} is better` : ""}`, ...cells.map((cell) => {
    if (!cell) return "–";
    return h("span", {class: cell.is_better && "best"}, measured(cell.value, cell.stderr, how),
      cell.is_better && aside(" (better)"),
      !isSameStep && h("small", {}, ` at step ${whole(cell.step)}`));
  })];
}

/** What seeds, or the items of an evaluation, say; of ./paddock decide, also the sequence of its pairs. */
function answer() {
  const {sentences = [], sequence} = report.comparison ?? {};
  if (!sentences.length || report.overview) return [];
  const [first, ...others] = sentences;
  return [box(h("p", {class: "answer"}, first),
    others.length > 0 && h("ul", {class: "tests"}, others.map((each) => h("li", {}, each))),
    sequence && table("The sequence: results of all arms, after each seed", sequence.columns, sequence.rows))];
}

function comparison() {
  if (!report.comparison) return [];
  const {settings: differing, results, refused, configurations = []} = report.comparison;
  const names = report.runs.map(named);
  const how = {places: placesOf([configurations[0]?.mean ?? 1])};
  const overSeeds = configurations.map(({name, runs, n, mean, stderr}) =>
    [name, n === runs.length ? whole(n) : `${whole(n)} of ${whole(runs.length)}`,
      n && mean === null ? "not finite" : format(mean, how) + (stderr ? ` ± ${format(stderr, how)}` : "")]);
  const values = differing.map((each) => [each.name, ...each.values.map((value) => value ?? "–")]);
  const tables = [
    results.length > 0 && table("Results, ± standard error", ["measure", ...names], results.map(resultRow)),
    values.length ? table("Settings that differ", ["setting", ...names], values)
      : h("p", {}, "The settings are the same.")];
  return [box(
    overSeeds.length > 0 && table("Over seeds, ± standard error",
      ["configuration", "runs", results[0]?.name ?? "result"], overSeeds),
    refused.length > 0 && h("details", {open: !isMany()}, h("summary", {}, "Runs without a test"),
      h("ul", {class: "tests"}, refused.map((sentence) => h("li", {}, sentence)))),
    isMany() ? h("details", {}, h("summary", {}, "All results and settings that differ"), tables) : tables)];
}

/** Samples at or before the selected step, with runs side by side. */
function samples() {
  const all = report.runs.flatMap((run) => run.samples), slider = byId("sample");
  const steps = [...new Set(all.map(({step}) => step))].sort((a, b) => a - b);
  if (!steps.length) return [];
  const index = Math.min(view.sample ?? Infinity, steps.length - 1), step = steps[index];
  [slider.max, slider.value, byId("sampled").textContent] = [steps.length - 1, index, whole(step)];
  slider.setAttribute("aria-valuetext", `step ${whole(step)}`);
  const answer = (text, who) => h("div", {}, h("small", {}, who), h("blockquote", {}, text));
  const ofRun = (prompt, how, note) => (run) => {
    const sample = run.samples.findLast((each) => each.prompt === prompt && each.how === how && each.step <= step);
    const who = isSeveral() ? `${named(run)}, ` : "";
    return sample?.step > 0 && answer(sample.text, `${who}step ${whole(sample.step)}${note}`);
  };
  // Before the first step, the base has answered.
  const bases = (prompt, how) => [...new Set(shown().flatMap((run) => run.samples.filter(
    (each) => each.prompt === prompt && each.how === how && !each.step).map(({text}) => text)))];
  const prompts = [...new Set(all.map(({prompt}) => prompt))];
  return prompts.map((prompt) => {
    const hows = [...new Set(all.filter((each) => each.prompt === prompt).map(({how}) => how))];
    return box(h("h3", {class: "prompt"}, prompt || "(no prompt)"), h("div", {class: "texts"}, hows.map((how) => {
      const note = hows.length > 1 ? `, ${how}` : "";
      return [bases(prompt, how).map((text) => answer(text, `before training${note}`)),
        shown().map(ofRun(prompt, how, note))];
    })));
  });
}

const bar = (shares, label) => h("div", {class: "bar", role: "img", "aria-label": label},
  shares.map((share, i) => h("span", {style: `flex: ${share}; color: ${color(i)}`})));
const legendOf = (labels) => h("ul", {class: "parts"},
  labels.map((label, i) => label && h("li", {}, swatch(color(i)), label)));

/** How a run spent its time, as a bar with a legend. */
function goodput({share, seconds, parts}) {
  const said = `${percent(share)} of ${duration(seconds)} was spent on steps that count (goodput).`;
  const shares = parts.map((part) => part.seconds / seconds), isSeen = (part) => part > 1e-4;
  const say = (part) => `${part.name}: ${duration(part.seconds)} (${percent(part.seconds / seconds)})`;
  return [h("p", {}, said), bar(shares, said),
    legendOf(parts.map((part, i) => isSeen(shares[i]) && say(part)))];
}

/** The phases of each run's steps, as bars of equal length. */
function phaseBars() {
  const chart = report.charts.find(({stacked}) => stacked);
  if (!isMany() || !chart) return [];
  const labels = chart.series.map(({label}) => label);
  const rows = shown().map((run) => {
    const seconds = chart.series.map(({curve}) => mean(known(run.curves[curve]?.y || [])) || 0);
    const all = seconds.reduce((a, b) => a + b), shares = seconds.map((part) => part / all);
    return all > 0 && [h("p", {}, `${named(run)}: ${format(all, {}, 3)} s per step`),
      bar(shares, labels.map((label, i) => `${label} ${percent(shares[i])}`).join(", "))];
  });
  return [box(h("h3", {}, chart.title), rows, legendOf(labels))];
}

function time() {
  const interruption = (each) => [date(each.time), whole(each.step), whole(each.resumed_from),
    each.reason.split(DETAILS)[0], duration(each.downtime_seconds), whole(each.repeated_steps)];
  const start = (each, i) => [whole(each.step), whole(each.world_size), i ? changes(each) : "first start"];
  const isNotable = (run) => isLong(run) || run.goodput?.interruptions.length || run.segments.length > 1;
  const runs = shown().filter(isNotable);
  return [...phaseBars(), ...runs.map((run) => box(
    headOf(run), isLong(run) && goodput(run.goodput),
    run.goodput?.interruptions.length > 0 && table("Interruptions",
      ["when", "at step", "resumed from", "reason", "downtime", "repeated steps"],
      run.goodput.interruptions.map(interruption)),
    run.segments.length > 1
      && table("Starts", ["from step", "ranks", "changes"], run.segments.map(start))))];
}

const alarmItems = (alarms, ...of) => alarms.map(({step, kind, text: words}) =>
  h("li", {}, h("b", {}, of, `step ${whole(step)}, ${kind}: `), words));

function alarmList(runs) {
  const items = runs.flatMap((run) => alarmItems(run.alarms, isSeveral() && `${named(run)}, `));
  const attributes = {class: "scroll", tabindex: 0, role: "group", "aria-label": "Alarms"};
  return items.length > 0 && box(h("div", attributes, h("ul", {}, items)));
}

/** Alarms of runs without a failure banner, which has its own list. */
const alarms = () => [alarmList(shown().filter((run) => !run.failure))].filter(Boolean);

/** One table of all runs' sources; runs with the same ones share its rows. */
function sources() {
  const columns = {share: percent, tokens: whole, documents: whole, epochs: (value) => format(value, {}, 3)};
  const groups = new Map();
  for (const run of shown().filter((each) => each.sources.length)) {
    const key = JSON.stringify(run.sources);
    groups.set(key, [...(groups.get(key) || []), run]);
  }
  const all = [...groups.values()].flatMap((runs) => runs[0].sources.map((source) => ({source, runs})));
  const names = Object.keys(columns).filter((name) => all.some(({source}) => source[name] > 0));
  const isDivided = groups.size > 1, users = (runs) => runs.map(named).join(", ");
  return all.length ? [box(table("Sources of the training data",
    ["source", ...names, ...isDivided ? ["runs"] : []], all.map(({source, runs}) => [source.label,
      ...names.map((name) => columns[name](source[name])), ...isDivided ? [users(runs)] : []])))] : [];
}

function settings() {
  const row = (each) => [each.name, each.value ?? "–", each.default ?? "–", each.meaning];
  const list = (caption, rows) => rows.length > 0
    && table(caption, ["setting", "value", "default", "meaning"], rows.map(row));
  return shown().filter((run) => run.settings.length).map((run) => {
    const those = (changed) => run.settings.filter((each) => each.changed === changed);
    const [set, usual] = [those(true), those(false)];
    const summary = `${set.length} changed, ${usual.length} at their defaults`;
    return h("details", {class: "box"}, h("summary", {}, isSeveral() && `${named(run)}: `, summary),
      list("Changed for this run", set), list("At their defaults", usual));
  });
}

// --------------------------------------------------------------------------------------------------- display

const SECTIONS = {answer, overview, comparison, facts, samples, time, alarms, sources, settings};

/** Draw the report with the current display options. */
function refresh() {
  for (const [id, section] of Object.entries(SECTIONS)) {
    const found = [section()].flat();
    byId(id).hidden = !found.length;
    fill(byId(id).lastElementChild, found);
  }
  drawCharts();
  fill(byId("runs"), isSeveral() && !report.overview && report.runs.length <= MOST_NAMED && report.runs.map(toggle));
  byId("grouping").hidden = !report.comparison?.configurations?.length;
  for (const option of byId("axis").options) {
    option.disabled = option.value !== "step" && !report.runs.some((run) => run.curves[AXES[option.value]]);
  }
  fill(byId("contents"), [...document.querySelectorAll("main > section:not([hidden])")].map((section) =>
    h("a", {href: `#${section.id}`}, section.firstElementChild.textContent)));
}

/** Show the state of the runs and the connection, the only text that screen readers announce. */
function say(connection) {
  const line = byId("state"), count = (state) => report.runs.filter((run) => run.state === state).length;
  const states = Object.keys(STATES).filter(count), [run] = report.runs;
  const said = isSeveral() ? states.map((state) => `${count(state)} ${state}`).join(", ") : STATES[run.state];
  line.dataset.connection = connection ?? line.dataset.connection ?? "";
  line.className = states.length > 1 ? "" : states[0];
  fill(line, [said, line.dataset.connection].filter(Boolean).join(" · "));
  const done = run.max_steps > 0 && Math.floor(100 * run.step / run.max_steps);
  const tab = isSeveral() ? said : `${STATES[run.state][0]}${done === false ? "" : ` ${done} %`}`;
  setIcon(line.className);
  document.title = `${tab} · ${report.title}`;
}

/** The icon of the browser's tab: a falling curve in the colour of the state. */
function setIcon(state) {
  const inks = {failed: "var(--bad)", running: "var(--strong)", finished: "var(--color-2)"};
  document.querySelector("link[rel=icon]").href = svgAddress(svg("svg", {viewBox: "0 0 32 32"},
    svg("rect", {width: 32, height: 32, fill: ink(inks[state] || MUTED)}),
    svg("path", {d: "M6 5Q8 26 27 26", stroke: "white", "stroke-width": 4, fill: "none"})));
}

function receive(data) {
  // Of a sweep, show only the first 8; the runs of ./paddock decide are few arms.
  if (!report && !data.comparison?.sequence) data.runs.slice(MOST_NAMED).forEach(({name}) => view.hidden.add(name));
  report = data;
  // Of a comparison: the sentence, curves, tables.
  if (isSeveral() && !report.overview) byId("charts").after(byId("overview"));
  const [run] = data.runs, all = run.max_steps > 0 ? ` / ${whole(run.max_steps)}` : "";
  const isRunning = run.state === "running" && run.max_steps > 0;
  fill(byId("progress"), !isSeveral() && [
    isRunning && h("progress", {max: run.max_steps, value: run.step, "aria-label": "Steps taken"}),
    [`step ${whole(run.step)}${all}`, timeLeft(run)].filter(Boolean).join(" · ")]);
  fill(byId("written"), `as of ${date(data.generated)}`);
  refresh();
  say();
}

/** The address of this page with the current display options. */
function linkToView() {
  const options = {...view, hidden: [...view.hidden], zoom: groupOf("steps").zoom, theme: byId("theme").value};
  return `${location.href.split("#")[0]}#view?${encodeURIComponent(JSON.stringify(options))}`;
}

/** Restore the display options in the address. */
function readLink() {
  if (!location.hash.startsWith("#view?")) return;
  let options = {};
  try { options = {...JSON.parse(decodeURIComponent(location.hash.slice(6)))}; } catch { /* cut off */ }
  for (const id of ["axis", "smoothing", "theme"]) {
    const box = byId(id), before = box.value;
    box.value = options[id];
    if (box.value !== String(options[id])) box.value = before;  // not one of its values
  }
  const hidden = [options.hidden ?? []].flat(), range = [options.zoom].flat();
  Object.assign(view, {axis: byId("axis").value, smoothing: Number(byId("smoothing").value), hidden: new Set(hidden)});
  setTheme(byId("theme").value);
  refresh();
  if (range.length === 2 && range.every(Number.isFinite)) zoom(groupOf("steps"), range);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const {plot} of charts.values()) if (plot) plot.redraw(false);
}

addEventListener("input", ({target}) => {
  if (target.id === "theme") return setTheme(target.value);
  if (target.id === "find") return drawCharts();
  if (target.id === "group") view.isGrouped = target.checked;
  else if (target.id === "smoothing") view.smoothing = Number(target.value);
  else if (target.id === "axis") [view.axis, groupOf("steps").zoom] = [target.value, null];
  else if (!target.dataset.run) return;
  else if (!view.hidden.delete(target.dataset.run)) view.hidden.add(target.dataset.run);
  refresh();
});
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("reset").addEventListener("click", () => groups.forEach((group) => zoom(group, null)));
byId("sample").addEventListener("input", ({target}) => {
  view.sample = target.value === target.max ? null : Number(target.value);
  fill(byId("samples").lastElementChild, samples());
});
groupOf("steps").zoomed.push(() => drawCharts());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(byId("theme").value));
addEventListener("beforeprint", () => {
  setTheme("light");
  for (const chart of charts.values()) {
    if (chart.figure.hidden) continue;
    chart.plot.batch(() => chart.plot.setSize(chart.size(720)));
    chart.figure.append(drawingOf(chart));
  }
  document.querySelectorAll("main > section > details, .body > details, #facts")
    .forEach((each) => each.setAttribute("open", ""));
});
addEventListener("afterprint", () => {
  setTheme(byId("theme").value);
  document.querySelectorAll("figure > svg").forEach((each) => each.remove());
  charts.forEach((chart) => chart.plot?.setSize(chart.size()));
});
byId("display").addEventListener("click", ({currentTarget: button}) =>
  button.setAttribute("aria-expanded", byId("controls").classList.toggle("open")));
addEventListener("click", ({target}) => {
  const button = target.closest("[data-copy]"), heading = target.closest("[data-sort]");
  if (heading) {
    const column = Number(heading.dataset.sort), [by, sign] = view.sort;
    view.sort = [column, by === column ? -sign : 1];
    refresh();
  }
  if (target.id === "link") navigator.clipboard.writeText(linkToView()).then(() => fill(target, "Copied"));
  if (button) navigator.clipboard.writeText(button.dataset.copy).then(() => fill(button, "Copied"));
});
byId("display").hidden = byId("controls").hidden = false;
receive(JSON.parse(byId("report").textContent));
readLink();
