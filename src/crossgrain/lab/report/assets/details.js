// The details of one site: all candidates with intervals, and how the tensors that its GEMM reads are distributed.
const READS = {
  fprop: [["input", "rowwise"], ["weight", "rowwise"]],
  dgrad: [["grad_output", "rowwise"], ["weight", "columnwise"]],
  wgrad: [["grad_output", "columnwise"], ["input", "columnwise"]],
};
const TENSORS = { input: "x", weight: "W", grad_output: "dy" };

function openDetails(layer, gemm) {
  const [name, type, inputs, outputs, tokens, experts] = data.layers[layer];
  byId("details-title").textContent = `${name}, ${gemm}`;
  const size = `${type.replace("_", " ")}, K = ${inputs}, N = ${outputs}, ${plural(tokens, "row")} in a batch${experts > 1 ? `, ${experts} experts` : ""}`;
  const body = byId("details-body");
  body.replaceChildren(el("p", { class: "small", text: size }));
  for (const quantity of gemm === "fprop" ? ["loss"] : ["noise", "bias"]) body.append(...candidateTable(layer, gemm, quantity));
  if (gemm !== "fprop" && !data.calibration[gemm]) {
    body.append(el("p", { class: "small", text: "Noise averages out over steps, bias accumulates. Neither is a loss." }));
  }
  body.append(...distributionsOf(layer, gemm));
  showTip(null);
  byId("details").showModal();
  byId("details-title").focus();
}

function candidateTable(layer, gemm, quantity) {
  const choice = choiceAt(layer * data.gemms.length + data.gemms.indexOf(gemm)), { long, unit } = QUANTITIES[quantity];
  const triples = data.candidates.map((_, i) => effect(i, layer, gemm, quantity));
  const top = Math.max(1e-300, ...triples.filter(Boolean).map((triple) => Math.max(triple[0], triple[2] ?? 0)));
  const low = Math.min(0, ...triples.filter(Boolean).map((triple) => triple[1] ?? 0), -0.02 * top);
  const titles = ["candidate", "format", "mean", "interval"];
  const rows = data.candidates.map((candidate, i) => el("tr", {},
    el("th", { scope: "row" }, candidate.label, isMoved(choice) && i === choice ? ` ${SHAPES[i % SHAPES.length]} chosen` : ""),
    el("td", { "data-title": titles[1], text: candidate.formats[gemm] || "" }),
    el("td", { "data-title": titles[2], text: interval(triples[i]) }),
    el("td", { "data-title": titles[3] }, triples[i] ? intervalBar(triples[i], low, top, quantity) : null)));
  return [el("h3", { text: `${long[0].toUpperCase()}${long.slice(1)}, ${unit === "nats per token" ? unit : `as a share ${unit}`}` }),
    el("table", { class: "stacked" }, el("thead", {}, el("tr", {}, ...titles.map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, ...rows))];
}

function intervalBar(triple, low, top, quantity) {
  const X = (value) => 4 + (112 * (value - low)) / (top - low);
  const root = svg("svg", { width: 120, height: 18, viewBox: "0 0 120 18", role: "img", "aria-label": interval(triple) },
    svg("line", { class: "zero", x1: X(0), x2: X(0), y1: 2, y2: 16 }));
  const colour = quantity === "loss" ? "var(--s0)" : quantity === "noise" ? "var(--s1)" : "var(--s3)";
  if (half(triple) !== null) root.append(svg("line", { class: "bar", "--c": colour, x1: X(triple[1]), x2: X(triple[2]), y1: 9, y2: 9 }));
  root.append(marker(X(triple[0]), 9, 0, colour, 4));
  return root;
}

function distributionsOf(layer, gemm) {
  if (!data.distributions) return [el("p", { class: "small", text: "No distributions of tensors were recorded for this report." })];
  const here = data.distributions.filter((one) => one.layer === layer);
  const read = ([tensor, direction]) => here.filter((one) => one.tensor === tensor && one.direction === direction);
  const first = READS[gemm].flatMap(read), others = here.filter((one) => !first.includes(one));
  const parts = [el("h3", { text: `What ${gemm} reads` })];
  if (!first.length) parts.push(el("p", { class: "small", text: "No distributions of these tensors were recorded." }));
  parts.push(...first.map(histogram));
  if (others.length) {
    parts.push(el("details", {}, el("summary", { text: "Other tensors and directions of this layer" }), ...others.map(histogram)));
  }
  return parts;
}

function histogram(one) {
  const title = `${TENSORS[one.tensor] || one.tensor}, ${one.direction}`;
  const facts = el("dl", { class: "facts" }, ...Object.entries(one.statistics).filter(([, value]) => known(value)).map(([name, value]) =>
    el("div", {}, el("dt", { text: name }), el("dd", { text: typeof value === "number" ? number(value) : value }))));
  const box = el("div", { class: "chart histogram" });
  const total = one.counts.reduce((a, b) => a + b, 0);
  if (total) {
    const width = 600, height = 150, bottom = 34, count = one.counts.length, most = Math.max(...one.counts), step = (width - 20) / Math.max(count, 6);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `${title}: ${one.counted}; from 2 to the power of ${one.first} to 2 to the power of ${one.first + count - 1}` });
    one.counts.forEach((value, i) => {
      const size = ((height - bottom - 14) * value) / most;
      root.append(svg("rect", { x: 10 + i * step + 1, width: Math.max(1, step - 2), y: height - bottom - size, height: size },
        svg("title", { text: `2^${one.first + i}: ${value} (${percent(value / total)})` })));
      if (i % Math.ceil(count / 12) === 0) {
        root.append(svg("text", { x: 10 + (i + 0.5) * step, y: height - bottom + 16, "text-anchor": "middle" }, "2",
          svg("tspan", { dy: -5, "font-size": 9, text: minus(String(one.first + i)) })));
      }
    });
    box.append(root);
  }
  return el("figure", { style: "margin:12px 0 0" }, el("figcaption", {}, el("b", { text: title }), el("span", { class: "small", text: total ? `  ${one.counted}` : "" })), box, facts);
}

byId("close").addEventListener("click", () => byId("details").close());
byId("details").addEventListener("click", (event) => { if (event.target === byId("details")) byId("details").close(); });
