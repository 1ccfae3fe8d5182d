/* The page of ./paddock without: what was left out, where the runs part, and what differs. */

const data = JSON.parse(byId("report").textContent);
const FIELDS = {rows_crc32: "rows", grad_norm: "gradient norm", updated: "update", tensors: "tensors"};
const signed = (value, digits = 4) => `${value < 0 ? "−" : "+"}${format(Math.abs(value), {}, digits)}`;
const pOf = (p) => (p < 1e-4 ? "< 0.0001" : format(p, {}, 2));
const section = (title, ...children) => h("section", {}, h("h2", {}, title), ...children);
const quoted = (words) => h("blockquote", {class: "box", style: "white-space: pre-wrap; margin: 8px 0"}, words);

/** Validation losses of both arms; those of other seeds are thin. */
function chart() {
  const points = data.curves.flat(2), width = 640, height = 260, left = 56, bottom = 30;
  if (points.length < 2) return null;
  const [xs, ys] = [0, 1].map((i) => points.map((point) => point[i]));
  const [low, high, from, to] = [Math.min(...ys), Math.max(...ys), Math.min(...xs), Math.max(...xs)];
  const x = (step) => left + (width - left - 10) * (step - from) / Math.max(1, to - from);
  const y = (loss) => 10 + (height - bottom - 20) * (high - loss) / Math.max(1e-9, high - low);
  const lines = data.curves.flatMap((pair, seed) => pair.map((curve, arm) => svg("polyline", {
    points: curve.map(([step, loss]) => `${x(step)},${y(loss)}`).join(" "), fill: "none",
    stroke: `var(--color-${arm})`, "stroke-width": seed ? 1 : 2.5, "stroke-opacity": seed ? 0.45 : 1,
    "stroke-dasharray": arm ? "7 4" : "none"})));
  const label = (at, words, anchor) => svg("text", {...at, fill: "currentColor", "font-size": 12, "text-anchor": anchor}, words);
  const border = x(data.first);
  return h("div", {class: "box"}, svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", width: "100%",
    "aria-label": `Validation loss of both arms from step ${from} to ${to}; the table below has the differences`},
    lines, svg("line", {x1: border, x2: border, y1: 10, y2: height - bottom, stroke: "var(--muted)", "stroke-dasharray": "2 3"}),
    [high, low].map((loss) => label({x: left - 6, y: y(loss) + 4}, format(loss), "end")),
    [from, to].map((step, i) => label({x: x(step), y: height - 8}, `${i ? "step " : ""}${step.toLocaleString("en")}`, i ? "end" : "start"))),
    h("p", {}, "Validation loss: ", swatch("var(--color-0)"), " the run, ", swatch("var(--color-1)"),
      ` the other arm (dashed)${data.curves.length > 1 ? "; thin: other seeds" : ""}. The dotted line is the first step that differs.`));
}

const change = data.left_out
  ? [h("p", {}, `Without ${data.left_out}, named by `, data.selectors.map((each, i) => [i ? ", " : "", h("code", {}, each)]), ". They stay in their rows, but are neither targets nor attended to."),
    h("details", {class: "box"}, h("summary", {}, `The first ${data.examples.length} of them`), data.examples.map(quoted))]
  : h("p", {}, `From step ${data.first.toLocaleString("en")} on: `, Object.entries(data.settings).map(([name, value], i) => [i ? ", " : "", h("code", {}, `${name}=${value}`)]), ".");
const parted = data.parted === null ? "All steps that both arms took are equal."
  : `The first step that differs is ${data.parted.toLocaleString("en")}, by ${data.fields.map((name) => FIELDS[name] || name).join(", ")}.`;
const rows = data.tests.map((test) => {
  const isShare = /accuracy|match|ROUGE/.test(test.name), how = {percent: isShare, places: isShare ? 1 : 4}, unit = isShare ? " points" : "";
  const size = (value) => format(isShare ? 100 * value : value, {places: isShare ? 1 : 4});
  return [test.name, format(test.a_value, how), format(test.b_value, how),
    `${test.difference < 0 ? "−" : "+"}${size(Math.abs(test.difference))} ± ${size(test.stderr)}${unit}`, pOf(test.p), test.n.toLocaleString("en")];
});

const seedRow = (each) => {
  const isShare = /accuracy|match|rouge/.test(each.name), shown = (value) => format(isShare ? 100 * value : value, isShare ? {places: 1} : {});
  const side = (values) => values.map(shown).join(", ") + (isShare ? " %" : "");
  return [each.name, side(each.runs), side(each.arms), `± ${shown(each.spread)}`,
    `${each.difference < 0 ? "−" : "+"}${shown(Math.abs(each.difference))} ± ${shown(each.stderr)}`, pOf(each.p)];
};

byId("main").replaceChildren(...[
  h("h1", {style: "margin-top: 16px"}, data.title),
  section("What differs", change, h("p", {}, `The other arm ${data.fork ? `continues the checkpoint of step ${data.fork.toLocaleString("en")}` : "begins at the start"}. ${parted}`)),
  section("What it did", chart(), rows.length
    ? table("Paired differences of the other arm on the same items, at the last step", ["result", "the run", "the other arm", "difference", "p", "items"], rows)
    : h("p", {}, "The arms have no evaluation of the same items in common."),
    h("p", {class: "note"}, "Losses: paired t-test. Right or wrong answers: exact McNemar test. The p-values of a metric have Holm's correction.")),
  data.seeds.length > 0 && section("Is it chance?",
    table(`Over ${data.curves.length} seeds, which change initial weights, order and dropout of both arms`,
      ["result", "the run, by seed", "the other arm", "spread of seeds", "mean difference", "p"],
      data.seeds.map(seedRow)),
    h("p", {class: "note"}, "The spread is the standard deviation of the runs over seeds. The difference is paired by seed.")),
  data.influence && section("Which examples matter for this answer?",
    h("p", {}, "Prompt: ", h("q", {}, data.influence.prompt), ", answer: ", h("q", {}, data.influence.answer), `; its loss is ${format(data.influence.loss)} nats.`),
    h("p", {}, `${data.influence.screened.toLocaleString("en")} examples were screened (TracIn); the top ones were left out one by one. The rank correlation of estimate and truth is ${format(data.influence.correlation, {}, 2)} over ${data.influence.rows.length}.`),
    table("Rise of the answer's loss without an example: the truth in nats, the estimate up to a factor", ["example", "estimate", "truth"],
      data.influence.rows.map((row) => [row.text.length > 240 ? `${row.text.slice(0, 240)} …` : row.text, signed(row.estimate, 3), signed(row.truth, 3)]))),
  data.prompts.length > 0 && section("Prompts, side by side", table("Greedy continuations or answers", ["prompt", "the run", "the other arm"],
    data.prompts.map((each) => [each.prompt, each.run, each.without]))),
].filter(Boolean));
