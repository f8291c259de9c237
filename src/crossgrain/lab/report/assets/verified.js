// Paired runs: gaps by step, and what they show.
const colourOf = (row) => `var(--s${data.verified.rows.indexOf(row) % 8})`;

function buildVerified() {
  if (!data.verified) return;
  const { rows, baseline, steps, last, seeds, tolerance } = data.verified;
  byId("verified").hidden = false;
  const titles = ["recipe", "loss", "gap", "growth in 100 steps", "verdict", "gaps of the seeds"];
  const cell = (place, text) => el("td", { "data-title": titles[place], text: text ?? "" });
  byId("verified-table").replaceChildren(
    el("thead", {}, el("tr", {}, ...titles.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, el("th", { scope: "row", title: row.recipe ? joined(row.recipe) : "" , text: row.label }),
      cell(1, known(row.loss) ? number(row.loss, 5) : ""), cell(2, row.gap ? interval(row.gap) : ""), cell(3, row.growth), verdictCell(row),
      cell(5, (row.seeds || []).map((gap) => number(gap)).join(", "))))));
  byId("verified-note").textContent = `${plural(seeds, "seed")} of ${steps} steps. Gap: loss minus that of ${baseline} with the same seed and data, mean over the last ${last} steps; ± half of the 95 % interval over seeds.` +
    (known(tolerance) ? ` Tolerance: ${number(tolerance)}.` : "") + (data.verified.interrupted ? " The runs were stopped early: some are missing." : "");
  const drawn = rows.filter((row) => row.curve);
  byId("gaps").hidden = !drawn.length;
  byId("gaps-legend").replaceChildren(...drawn.map((row) => el("label", {}, el("input", { type: "checkbox", checked: true, onchange: (event) => {
    state.hidden[event.target.checked ? "delete" : "add"](row.label);
    drawGaps();
  } }), svg("svg", { width: 34, height: 10, viewBox: "0 0 34 10", "aria-hidden": "true" },
    svg("line", { class: "curve", "--c": colourOf(row), "stroke-dasharray": dashOf(row) || null, x1: 0, x2: 34, y1: 5, y2: 5 })), row.label + (row.grows ? " (grows)" : ""))));
  byId("gaps-note").textContent = `Loss minus that of ${baseline}, smoothed over steps; bands are 95 % intervals over seeds. What accumulates is smaller in a short run than in a long one.`;
}

const dashOf = (row) => DASHES[data.verified.rows.indexOf(row) % DASHES.length];

function verdictCell(row) {
  const text = row.diverged ? `diverged: ${Object.entries(row.diverged).map(([seed, step]) => `seed ${seed} at step ${step}`).join(", ")}` : row.verdict || "";
  const kind = row.diverged || text.startsWith("above") ? "bad" : text.startsWith("not resolved") || text === "one seed" ? "unknown" : text ? "good" : "";
  return el("td", { class: `verdict ${kind}`, "data-title": "verdict", text });
}

function drawGaps() {
  if (!data.verified || byId("gaps").hidden) return;
  const { at, tolerance, baseline } = data.verified;
  const rows = data.verified.rows.filter((row) => row.curve && !state.hidden.has(row.label));
  const [low, high] = range(rows.flatMap((row) => row.curve), known(tolerance) ? [tolerance] : []);
  const widest = Math.max(40, ...rows.map((row) => row.label.length * 7 + 16));
  const drawing = chart(byId("gaps-chart"), {
    title: `Gap to ${baseline} by step`, x: [1, at.at(-1)], y: [low, high], xLabel: "step", yLabel: "gap, nats per token", right: Math.min(170, widest, Math.max(60, 0.28 * byId("gaps-chart").clientWidth)),
    summary: rows.map((row) => `${row.label}: ${number(row.curve[0][0])} at the begin, ${interval(row.curve.at(-1))} at the end${row.grows ? ", grows" : ""}`).join("; ") || "nothing is shown" });
  const inside = clipped(drawing, svg("g", {}));
  drawing.root.append(inside);
  const places = apart(rows.map((row) => drawing.Y(row.curve.at(-1)[0])), 15, drawing.top + 8, drawing.height - drawing.bottom);
  rows.forEach((row, i) => {
    inside.append(...[band(drawing, at, row.curve, colourOf(row))].filter(Boolean), curve(drawing, at, row.curve, colourOf(row), dashOf(row)));
    const longest = Math.floor((drawing.right - 12) / 7);
    const text = row.label.length > longest ? `${row.label.slice(0, longest - 1)}…` : row.label;
    drawing.root.append(svg("text", { class: "name", "--c": colourOf(row), x: drawing.width - drawing.right + 8, y: places[i] + 4, text }));
  });
  if (known(tolerance)) {
    drawing.root.append(svg("line", { class: "tolerance", x1: drawing.left, x2: drawing.width - drawing.right, y1: drawing.Y(tolerance), y2: drawing.Y(tolerance) }),
      svg("text", { class: "tolerance-text", x: drawing.left + 6, y: drawing.Y(tolerance) - 5, text: "tolerance" }));
  }
}
