/* What a live page does besides: it follows the runs, and fetches more points of the part in sight. */

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

/** Fetch the points of the steps in sight for each run that has only coarse ones there. */
async function fetchPoints() {
  const group = groupOf("steps"), {zoom} = group;
  if (!zoom) return;
  for (const [index, run] of report.runs.entries()) {
    const [low, high] = stepsIn(run, zoom), known = details.get(run.name);
    const isCoarse = Object.values(run.curves).some(({low: range}) => range);
    if (!isCoarse || !shown().includes(run) || (known && known.low <= low && known.high >= high)) continue;
    const answer = await fetch(`points?run=${index}&low=${low}&high=${high}`).catch(() => null);
    if (answer?.ok) details.set(run.name, {low, high, curves: await answer.json()});
  }
  if (group.zoom === zoom) drawCharts();
}

groupOf("steps").zoomed.push(() => setTimeout(fetchPoints, 150));
listen();
