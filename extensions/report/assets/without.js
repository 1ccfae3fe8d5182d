/* The page of ./paddock without: what was left out, where the runs part, and what differs. */

const data = JSON.parse(byId("report").textContent);
const FIELDS = {rows_crc32: "rows", grad_norm: "gradient norm", updated: "update", tensors: "tensors"};
const signed = (value) => `${value < 0 ? "−" : "+"}${measured(Math.abs(value))[0]}`;
const isShare = ({name}) => /accuracy|match|rouge/i.test(name);
const valueOf = (result, value) => measured(value, 0, {percent: isShare(result)})[0];
/** The size of a difference, and its standard error. */
const differenceOf = (result) => {
  const [scale, how, unit] = isShare(result) ? [100, {places: 1}, " points"] : [1, {}, ""];
  return measured(scale * Math.abs(result.difference), scale * (result.stderr || 0), how).join("") + unit;
};
const pOf = (p) => (p < 1e-4 ? "< 0.0001" : format(p, {}, 2));
const color = (index) => `var(--color-${index % 8})`;
const section = (title, ...children) => h("section", {}, h("h2", {}, title), ...children);
const quoted = (words) => h("blockquote", {class: "box", style: "white-space: pre-wrap; margin: 8px 0"}, words);

/** The validation losses of both arms; those of other seeds are thin. */
function showLosses() {
  const arms = ["the run", "the other arm"], steps = data.curves.flat(2).map(([step]) => step);
  const lines = data.curves.flatMap((pair, seed) => pair.map((curve, arm) => {
    const [x, y] = [0, 1].map((i) => curve.map((point) => point[i]));
    return {key: `${seed} ${arm}`, label: seed ? `${arms[arm]}, seed ${seed + 1}` : arms[arm], steps: x, x, y,
      color: color(arm), alpha: seed ? .4 : 1, dash: arm ? [7, 4] : [], shape: arm ? "dashed" : "",
      sparse: !seed, span: 0, letter: "", how: {places: placesOf(y)}};
  }));
  const first = `step ${data.first.toLocaleString("en")}: the first that differs`;
  const mark = {sign: "▲", color: MUTED, x: data.first, text: first, label: first};
  const extent = [least(steps), Math.max(most(steps), least(steps) + 1)];
  Object.assign(groupOf("steps"), {extent, marks: [mark]});
  const figure = new Chart("loss", groupOf("steps"));
  byId("losses").append(figure.figure);
  figure.update({title: "Validation loss", unit: "nats", axis: "step", falling: true}, lines);
}

const change = data.left_out
  ? [h("p", {}, `Without ${data.left_out}, named by `, data.selectors.map((each, i) => [i ? ", " : "", h("code", {}, each)]), ". They are masked: not trained on, and not visible to other text."),
    h("details", {class: "box"}, h("summary", {}, "Examples"), data.examples.map(quoted))]
  : h("p", {}, `From step ${data.first.toLocaleString("en")} on: `, Object.entries(data.settings).map(([name, value], i) => [i ? ", " : "", h("code", {}, `${name}=${value}`)]), ".");
const parted = data.parted === null ? "All steps that both arms took are equal."
  : `The first step that differs is ${data.parted.toLocaleString("en")}, by ${data.fields.map((name) => FIELDS[name] || name).join(", ")}.`;
const signOf = ({difference}) => (difference < 0 ? "−" : "+");
const rows = data.tests.map((test) => [test.name, valueOf(test, test.a_value), valueOf(test, test.b_value),
  `${signOf(test)}${differenceOf(test)}`, pOf(test.p), test.n.toLocaleString("en")]);
const seedRow = (each) => {
  const side = (values) => values.map((value) => valueOf(each, value)).join(", ");
  return [each.name, side(each.runs), side(each.arms), valueOf(each, each.spread),
    `${signOf(each)}${differenceOf(each)}`, each.sentence];
};

byId("main").replaceChildren(...[
  h("h1", {style: "margin-top: 16px"}, data.title),
  h("p", {class: "health"}, data.answer),
  section("What differs", change, h("p", {}, `The other arm ${data.fork ? `continues the checkpoint of step ${data.fork.toLocaleString("en")}` : "begins at the start"}. ${parted}`)),
  section("What it did", data.curves.flat(2).length > 1 && h("div", {id: "losses", class: "charts"}), rows.length
    ? table("Paired differences of these two models on the same items, at the last step", ["result", "the run", "the other arm", "difference", "p", "items"], rows)
    : h("p", {}, "The arms have no evaluation of the same items in common."),
    h("p", {class: "note"}, "± is one standard error. Losses: paired t-test. Right or wrong answers: exact McNemar test. The p-values of a metric have Holm's correction.")),
  data.seeds.length > 0 && section("Is it chance?",
    table(`Over ${data.curves.length} seeds, which change initial weights, order and dropout of both arms`,
      ["result", "the run, by seed", "the other arm", "spread of seeds", "mean difference", "verdict"],
      data.seeds.map(seedRow)),
    h("p", {class: "note"}, "The spread is the standard deviation of the runs over seeds. The difference is paired by seed. A verdict takes six seeds or more, and is right for 95 % of equal recipes.")),
  data.influence && section("Which examples matter for this answer?",
    h("p", {}, "Prompt: ", h("q", {}, data.influence.prompt), ", answer: ", h("q", {}, data.influence.answer), `; its loss is ${format(data.influence.loss)} nats.`),
    h("p", {}, `${data.influence.screened.toLocaleString("en")} examples were screened (TracIn); the top ones were left out one by one. The rank correlation of estimate and truth is ${format(data.influence.correlation, {}, 2)} over ${data.influence.rows.length}.`),
    table("Rise of the answer's loss without an example: the truth in nats, the estimate up to a factor", ["example", "estimate", "truth"],
      data.influence.rows.map((row) => [row.text.length > 240 ? `${row.text.slice(0, 240)} …` : row.text, signed(row.estimate, 3), signed(row.truth, 3)]))),
  data.prompts.length > 0 && section("Prompts, side by side", table("Greedy continuations or answers", ["prompt", "the run", "the other arm"],
    data.prompts.map((each) => [each.prompt, each.run, each.without]))),
].filter(Boolean));
if (byId("losses")) showLosses();
