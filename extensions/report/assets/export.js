/* Charts as CSV, SVG and PNG, for files and printing. */

/** The visible chart as an SVG with title and legend. */
function drawingOf({plot, slots, chart, lines, off}) {
  const unit = uPlot.pxRatio, [left, top, width, height] = ["left", "top", "width", "height"]
    .map((name) => plot.bbox[name] / unit), above = 26, muted = ink(MUTED), end = left + width;
  const at = (x, y) => [left + plot.valToPos(x, "x"), top + plot.valToPos(y, "y")]
    .map((each) => each.toFixed(1)).join(",");
  const words = (x, y, anchor, text, color = muted) =>
    svg("text", {x, y, "text-anchor": anchor, fill: color, "font-size": 12}, text);
  const path = (points) => points.map(([x, y]) => at(x, y)).join("L");
  const shapes = slots.flatMap((slot, i) => {
    const {line, role} = slot, points = pointsOf(slot), color = ink(line.color);
    if (!points.length || role === "low") return [];
    if (role === "high") {
      const band = [...points, ...pointsOf(slots[i + 1]).reverse()];
      return svg("path", {d: `M${path(band)}Z`, fill: color, "fill-opacity": .15});
    }
    const d = `M${path(points)}`, ends = [last(points), points[0]].map(([x]) => left + plot.valToPos(x, "x"));
    const floor = ends.map((x) => `L${x},${top + height}`).join("");
    const width = points.length > 1 ? 0 : 40;  // of a bar
    if (chart.stacked) return svg("path", {d: d + floor, fill: color, stroke: color, "stroke-width": width});
    return svg("path", {d, fill: "none", stroke: color, "stroke-opacity": role === "raw" ? .3 : 1,
      "stroke-width": 1.5, "stroke-dasharray": line.dash.join(" ")});
  });
  const [across, up] = plot.axes.map(({_splits, _values}) => _splits.map((value, i) => [value, _values[i]]));
  const grid = (d) => svg("path", {d, stroke: ink("var(--grid)"), fill: "none"});
  const named = lines.filter(({key}) => !off.has(key));
  const legend = named.map((line, i) =>
    words(left, above + plot.height + 16 * (i + 1), "start", `— ${line.label}`, ink(line.color)));
  const size = [plot.width, above + plot.height + 16 * named.length + 8];
  return svg("svg", {viewBox: `0 0 ${size.join(" ")}`, width: size[0], height: size[1],
    "font-family": "sans-serif"},
    svg("rect", {width: "100%", height: "100%", fill: ink(CARD)}),
    words(8, 17, "start", [chart.title, chart.unit].filter(Boolean).join(", "), ink("var(--text)")),
    svg("g", {transform: `translate(0 ${above})`},
      across.map(([value, label]) => {
        const x = left + plot.valToPos(value, "x");
        return [grid(`M${x},${top}V${top + height}`), words(x, top + height + 17, "middle", label ?? "")];
      }).flat(),
      up.map(([value, label]) => {
        const y = top + plot.valToPos(value, "y");
        return [grid(`M${left},${y}H${end}`), words(left - 6, y + 4, "end", label ?? "")];
      }).flat(),
      svg("svg", {x: left, y: top, width, height, viewBox: [left, top, width, height].join(" ")}, shapes)),
    legend);
}

const svgText = (drawing) => new XMLSerializer().serializeToString(drawing);
const svgAddress = (drawing) => `data:image/svg+xml,${encodeURIComponent(svgText(drawing))}`;

/** Save a chart as "csv", "svg" or "png". */
async function saveChart(chart, kind) {
  const name = `${chart.key}.${kind}`;
  if (kind === "csv") {
    const cell = (words) => (/[",\n]/.test(words) ? `"${words.replaceAll('"', '""')}"` : words);
    const rows = chart.rows("", ({y}, i) => String(y[i]));
    return download(name, "text/csv", rows.map((row) => `${row.map(cell).join(",")}\n`).join(""));
  }
  const drawing = drawingOf(chart), image = new Image(), canvas = h("canvas", {});
  if (kind === "svg") return download(name, "image/svg+xml", svgText(drawing));
  image.src = svgAddress(drawing);
  await image.decode();
  [canvas.width, canvas.height] = [3 * image.width, 3 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(name, blob.type, blob));
}
