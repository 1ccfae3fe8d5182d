/* Live pages only: follow the runs, and fetch more points of the visible range. */

function listen() {
  const events = new EventSource("events");
  events.addEventListener("open", () => say("live"));
  events.addEventListener("data", (event) => receive(JSON.parse(event.data)));
  events.addEventListener("error", () => {
    say("connection lost, retrying");
    // An EventSource does not reconnect after an HTTP error.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  });
}

/** Fetch the visible points of each run whose curves are coarse there. */
async function fetchPoints() {
  const group = groupOf("steps"), {zoom} = group;
  if (!zoom) return;
  for (const [index, run] of report.runs.entries()) {
    const [low, high] = stepsIn(run, zoom), known = details.get(run.name);
    const isCoarse = Object.values(run.curves).some(({low: range}) => range);
    if (!isCoarse || !shown().includes(run) || (known && known.low <= low && known.high >= high)) continue;
    const answer = await fetch(`points/${index}/${low}/${high}`).catch(() => null);
    if (answer?.ok) details.set(run.name, {low, high, curves: await answer.json()});
  }
  if (group.zoom === zoom) drawCharts();
}

groupOf("steps").zoomed.push(() => setTimeout(fetchPoints, 150));
listen();
