// The slider: one point of the frontier, its recipe, and the frontier itself.
function buildBudget() {
  const slider = byId("slider");
  byId("budget").hidden = byId("frontier").hidden = !data.points.length;
  if (!data.points.length) return;
  slider.max = data.points.length - 1;
  slider.value = state.point = data.found ?? nearestTo(0.8 * data.points.at(-1).saving);
  slider.addEventListener("input", () => { state.point = Number(slider.value); paintPoint(); });
  byId("copy").addEventListener("click", copy);
  byId("enlarge").addEventListener("click", () => {
    state.enlarged = !state.enlarged;
    byId("enlarge").setAttribute("aria-pressed", String(state.enlarged));
    drawFrontier();
  });
  const parts = Object.keys(data.calibration);
  byId("predicted-note").textContent = parts.length
    ? `Predicted: the sum over forward GEMMs, and ${parts.join(" and ")} by what a paired run has shown their noise to be worth.`
    : "Predicted: the sum over forward GEMMs. Noise and bias of dgrad and wgrad are not in it: no paired run has shown how many nats they are worth.";
}

function nearestTo(saving) {
  const distances = data.points.map((point) => Math.abs(point.saving - saving));
  return distances.indexOf(Math.min(...distances));
}

const verifiedAt = (place) => (data.verified ? data.verified.rows.find((row) => row.point === place && row.gap) : null);

function paintPoint() {
  const point = data.points[state.point];
  if (!point) return;
  const text = joined(point.recipe), verified = verifiedAt(state.point);
  byId("saving").textContent = percent(point.saving);
  byId("short").textContent = `${percent(point.saving)}, gap ${interval(point.predicted)}`;
  byId("predicted").replaceChildren(...figure(point.predicted));
  byId("verified-here").replaceChildren(...(verified ? [...figure(verified.gap), el("span", { class: "unit", text: verified.verdict || "" })] : ["–", el("span", { class: "unit", text: "not run" })]));
  byId("recipe").value = byId("recipe-printed").textContent = text;
  byId("copied").textContent = "";
  measureSlide();
  const counts = data.gemms.map((gemm, column) => {
    const moved = data.layers.filter((_, layer) => isMoved(choiceAt(layer * data.gemms.length + column))).length;
    return `${moved} of ${data.layers.length} ${gemm}`;
  });
  byId("moved").textContent = `Moved: ${counts.join(", ")}. ${data.found === state.point ? "This is the recipe that the search chose." : ""}`;
  const slider = byId("slider");
  slider.setAttribute("aria-valuetext", `saves ${percent(point.saving)}; predicted gap ${interval(point.predicted)} nats per token`);
  paintMap();
  drawFrontier();
}

// How much room the slider takes where it stays in sight, for the head of the table below it.
const measureSlide = () => document.documentElement.style.setProperty("--slide", `${document.querySelector(".slide").offsetHeight}px`);

function figure(triple) {
  if (half(triple) === null) return [number(triple[0]), el("span", { class: "unit", text: "no interval" })];
  const [mean, width] = aligned(triple);
  return [mean, el("span", { class: "unit", text: `± ${width} nats` })];
}

async function copy() {
  const area = byId("recipe");
  let done = false;
  try {
    await navigator.clipboard.writeText(area.value);
    done = true;
  } catch (error) {
    area.select();
    done = document.execCommand("copy"); // where pages from a disk may not use the clipboard
  }
  byId("copied").textContent = done ? "Copied." : "The browser does not allow copying: select the text and copy it.";
}

function drawFrontier() {
  const points = data.points, rows = data.verified ? data.verified.rows.filter((row) => known(row.saving) && row.gap) : [];
  const all = [...points.map((point) => point.predicted), ...rows.map((row) => row.gap)];
  const savings = [...points.map((point) => point.saving), ...rows.map((row) => row.saving)];
  const here = points[state.point];
  const y = range(all), small = 3 * Math.max(here.predicted[2] ?? here.predicted[0], data.verified?.tolerance ?? 0, 1e-9);
  if (state.enlarged) y[1] = Math.min(y[1], small);
  const drawing = chart(byId("frontier-chart"), {
    title: "Frontier: predicted gap by saving", x: [Math.min(0, ...savings), Math.max(...savings) * 1.02 || 1], y,
    summary: `From ${percent(points[0].saving)} with a predicted gap of ${interval(points[0].predicted)} to ${percent(points.at(-1).saving)} with ${interval(points.at(-1).predicted)}. ` +
      (rows.length ? `Verified: ${rows.map((row) => `${row.label} ${interval(row.gap)}`).join("; ")}.` : "No recipe on it was verified."),
    xLabel: "saving", yLabel: "gap, nats per token", xText: (x) => `${number(100 * x)} %` });
  const { root, X, Y } = drawing, xs = points.map((point) => point.saving), triples = points.map((point) => point.predicted);
  const inside = clipped(drawing, svg("g", {}));
  root.append(inside);
  inside.append(...[band(drawing, xs, triples, "var(--s1)")].filter(Boolean), curve(drawing, xs, triples, "var(--s1)", ""));
  root.append(svg("line", { class: "guide", x1: X(here.saving), x2: X(here.saving), y1: drawing.top, y2: drawing.height - drawing.bottom }),
    svg("circle", { class: "here", cx: X(here.saving), cy: Y(here.predicted[0]), r: 7 }));
  if (known(data.verified?.tolerance)) inside.append(svg("line", { class: "tolerance", x1: drawing.left, x2: drawing.width, y1: Y(data.verified.tolerance), y2: Y(data.verified.tolerance) }));
  const places = apart(rows.map((row) => Y(row.gap[0])), 15, drawing.top + 8, drawing.height - drawing.bottom - 4);
  rows.forEach((row, i) => {
    const colour = colourOf(row), x = X(row.saving);
    if (half(row.gap) !== null) inside.append(svg("line", { class: "bar", "--c": colour, x1: x, x2: x, y1: Y(row.gap[1]), y2: Y(row.gap[2]) }));
    if (row.gap[0] > y[1]) return; // beyond the part that is enlarged
    const left = x > drawing.width * 0.6;
    root.append(marker(x, Y(row.gap[0]), data.verified.rows.indexOf(row), colour),
      svg("text", { class: "name", "--c": colour, x: x + (left ? -10 : 10), y: places[i] + 4, "text-anchor": left ? "end" : "start", text: row.label }));
  });
  root.addEventListener("click", (event) => {
    const box = root.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * drawing.width;
    const distances = points.map((point) => Math.abs(X(point.saving) - x));
    byId("slider").value = state.point = distances.indexOf(Math.min(...distances));
    paintPoint();
  });
  const missing = data.verified ? data.verified.rows.filter((row) => row.gap && !known(row.saving)).map((row) => row.label) : [];
  byId("frontier-note").textContent = "Line and band: predicted gap with its 95 % interval. Ring: this budget. Marks with bars: paired runs, with 95 % intervals over seeds. A click moves the slider." +
    (known(data.verified?.tolerance) ? " Dotted: the tolerance." : "") + (state.enlarged ? " Larger gaps are not shown." : "") +
    (missing.length ? ` Not drawn, because their saving is not known: ${missing.join(", ")}.` : "");
}
