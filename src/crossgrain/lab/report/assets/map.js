// The heat map: a row for each layer, a column for each GEMM, blocks that can be closed.
const MANY_LAYERS = 48; // with more, blocks begin closed
const blockOf = (name) => (name.match(/^(?:.*?\.)?\d+(?=\.|$)/) || [""])[0];

// The unit of a quantity over all candidates, so that they can be compared: its largest mean, a factor, and its name.
const scales = Object.fromEntries(Object.keys(QUANTITIES).map((quantity) => {
  const means = data.effects.flatMap((effects) => Object.entries(effects)
    .filter(([key]) => key.endsWith(`.${quantity}`)).flatMap(([, values]) => values).filter(Boolean).map((triple) => triple[0]));
  const top = Math.max(0, ...means.filter(known));
  const unit = QUANTITIES[quantity].unit;
  const power = quantity === "loss" ? (top >= 1 || top === 0 ? 0 : Math.min(12, 3 * Math.ceil(-Math.log10(top) / 3))) : top >= 1e-3 || top === 0 ? 2 : 6;
  const superscript = [...String(power)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
  const name = quantity === "loss" ? (power ? `10⁻${superscript} ${unit}` : unit) : power === 2 ? `% ${unit}` : `10⁻⁶ ${unit}`;
  const factor = 10 ** power;
  return [quantity, { top, factor, name }];
}));

// Mean and half of the interval in the unit of a scale, as in `aligned`, but with at most four decimals.
function scaled(triple, scale) {
  const mean = triple[0] * scale.factor, width = half(triple) === null ? null : half(triple) * scale.factor;
  const decimals = Math.max(0, Math.min(4, width > 0 ? 1 - Math.floor(Math.log10(width)) : 4));
  return [mean, width].map((value) => (value === null ? "?" : minus(value.toFixed(decimals).replace(/^-(0\.?0*)$/, "$1"))));
}
const shade = (value, scale) => (scale.top ? Math.sqrt(Math.min(1, Math.max(0, value) / scale.top)) : 0).toFixed(3);

const cells = []; // by site: {button, layer, gemm, ...}
const blocks = []; // {name, layers, toggle, cells}

function buildMap() {
  const table = byId("heat");
  table.tHead.append(el("tr", {}, el("th", { scope: "col", text: "layer" }),
    ...data.gemms.map((gemm) => el("th", { scope: "col" }, gemm, el("span", { class: "unit", id: `unit-${gemm}` })))));
  const groups = [];
  data.layers.forEach(([name], layer) => {
    const block = blockOf(name);
    if (!groups.length || groups.at(-1).block !== block || !block) groups.push({ block, layers: [] });
    groups.at(-1).layers.push(layer);
  });
  const foldable = groups.filter((group) => group.layers.length > 1).length > 1;
  byId("blocks").hidden = !foldable;
  for (const { block, layers } of groups) table.append(groupOf(foldable && layers.length > 1 ? block : "", layers));
  for (const candidate of data.candidates) byId("candidate").append(el("option", { text: candidate.label }));
  byId("candidate").selectedIndex = state.candidate;
  table.addEventListener("keydown", moveFocus);
  table.addEventListener("focusin", (event) => { if (event.target.tabIndex !== 0) focusOn(event.target); });
  for (const kind of ["pointerover", "focusin"]) table.addEventListener(kind, (event) => showTip(event.target.closest(".cell")));
  for (const kind of ["pointerleave", "focusout"]) table.addEventListener(kind, () => showTip(null));
  const first = table.querySelector("tbody button");
  if (first) first.tabIndex = 0;
}

function groupOf(block, layers) {
  const body = el("tbody");
  const rows = layers.map((layer) => {
    const [name] = data.layers[layer];
    const inside = block ? name.slice(block.length + 1) || name : name;
    const row = el("tr", { class: block ? "inside" : "" }, el("th", { scope: "row", title: name }, ...breakable(inside)));
    data.gemms.forEach((gemm, column) => {
      const button = el("button", { type: "button", class: "cell", tabindex: -1, onclick: () => openDetails(layer, gemm) });
      cells[layer * data.gemms.length + column] = { button, layer, gemm, row };
      row.append(el("td", {}, button));
    });
    return row;
  });
  if (block) {
    const open = data.layers.length <= MANY_LAYERS;
    const toggle = el("button", { type: "button", tabindex: -1, "aria-expanded": String(open) }, ...breakable(block), " ", el("span", { text: plural(layers.length, "layer") }));
    const found = { name: block, layers, rows, toggle, cells: data.gemms.map((gemm) => ({ gemm, box: el("div", { class: "cell" }) })) };
    toggle.addEventListener("click", () => { fold(found, toggle.getAttribute("aria-expanded") !== "true"); paintBlocks(); });
    body.append(el("tr", { class: "block" }, el("th", { scope: "rowgroup" }, toggle), ...found.cells.map(({ box }) => el("td", {}, box))));
    blocks.push(found);
    fold(found, open);
  }
  body.append(...rows);
  return body;
}

function fold(block, open) {
  block.toggle.setAttribute("aria-expanded", String(open));
  for (const row of block.rows) row.hidden = !open;
  for (const { box } of block.cells) box.hidden = open;
}

// ---- what the cells say ----

function choiceAt(site) {
  const point = data.points[state.point];
  const letter = point ? point.chosen[site] : ".";
  return letter === "." ? null : letter.charCodeAt(0) - 97;
}
const isMoved = (candidate) => candidate !== null && data.candidates[candidate].label !== data.base;

function fill(box, triple, gemm, extra) {
  const quantity = quantityOf(gemm), scale = scales[quantity], [mean, width] = triple ? scaled(triple, scale) : [];
  box.className = `cell hue-${quantity}${extra.class || ""}${triple ? "" : " empty"}${triple && contains(triple, 0) ? " unclear" : ""}`;
  box.style.setProperty("--t", triple ? shade(triple[0], scale) : 0);
  box.replaceChildren(...(triple ? [el("span", { class: "mean", text: mean }), el("span", { class: "half", text: `± ${width}` })] : [el("span", { text: "–" })]),
    ...(extra.mark ? [el("span", { class: "mark", "aria-hidden": "true", text: extra.mark })] : []));
}

function describe(cell, triple) {
  const quantity = QUANTITIES[quantityOf(cell.gemm)], choice = choiceAt(cells.indexOf(cell));
  const value = triple ? `${quantity.long} ${interval(triple)} ${quantity.unit}` : "not measured";
  const clear = triple && contains(triple, 0) ? "\nthe interval contains 0" : "";
  const moved = data.points.length ? `\n${isMoved(choice) ? `moves to ${data.candidates[choice].label}` : `stays in ${data.base}`} at this budget` : "";
  return `${data.layers[cell.layer][0]}, ${cell.gemm} in ${data.candidates[state.candidate].label}\n${value}${clear}${moved}`;
}

function paintMap() {
  byId("map-title").textContent = `What each GEMM costs in ${data.candidates[state.candidate].label}`;
  for (const gemm of data.gemms) {
    const quantity = quantityOf(gemm);
    byId(`unit-${gemm}`).textContent = `${QUANTITIES[quantity].name}, ${scales[quantity].name}`;
  }
  cells.forEach((cell, site) => {
    const triple = effect(state.candidate, cell.layer, cell.gemm, quantityOf(cell.gemm)), choice = choiceAt(site);
    fill(cell.button, triple, cell.gemm, isMoved(choice) ? { class: " moved", mark: SHAPES[choice % SHAPES.length] } : {});
    cell.text = describe(cell, triple);
    cell.button.setAttribute("aria-label", cell.text.replaceAll("\n", "; "));
  });
  paintBlocks();
  paintLegend();
}

// A closed block shows the largest of its layers, and how many of them move.
function paintBlocks() {
  for (const block of blocks) {
    block.cells.forEach(({ gemm, box }, column) => {
      const quantity = quantityOf(gemm);
      const triples = block.layers.map((layer) => effect(state.candidate, layer, gemm, quantity)).filter(Boolean);
      const largest = triples.length ? triples.reduce((a, b) => (b[0] > a[0] ? b : a)) : null;
      const count = block.layers.filter((layer) => isMoved(choiceAt(layer * data.gemms.length + column))).length;
      fill(box, largest, gemm, count ? { mark: `${markOf(block, column)} ${count}/${block.layers.length}` } : {});
    });
  }
}

function markOf(block, column) {
  const found = new Set(block.layers.map((layer) => choiceAt(layer * data.gemms.length + column)).filter(isMoved));
  return [...found].map((candidate) => SHAPES[candidate % SHAPES.length]).join("");
}

const used = new Set(data.points.flatMap((point) => [...point.chosen])); // letters of candidates

function paintLegend() {
  const shown = [...new Set(data.gemms.map(quantityOf))];
  const marks = data.candidates.map((candidate, i) => [candidate, i]).filter(([, i]) => isMoved(i) && used.has(String.fromCharCode(97 + i)));
  byId("legend").replaceChildren(
    ...shown.map((quantity) => el("span", { class: `scale hue-${quantity}` }, `${QUANTITIES[quantity].name}: 0`, el("span", { class: "ramp" }),
      `${number(scales[quantity].top * scales[quantity].factor)} ${scales[quantity].name.startsWith("10") ? "· " : ""}${scales[quantity].name}`)),
    ...marks.map(([candidate, i]) => el("span", { class: "scale" }, `${SHAPES[i % SHAPES.length]} and a frame: moves to ${candidate.label} at this budget`)),
    ...(blocks.length ? [el("span", { class: "scale", text: "A closed block shows its largest layer, and how many move." })] : []),
    el("span", { class: "scale" }, el("span", { class: "dotted", text: "dotted" }), "the interval contains 0"));
}

// ---- focus and tip ----

// One stop of the tab key for the whole table. A row of a block has one button, that of a layer has one for each GEMM.
let column = 0;

function moveFocus(event) {
  const rows = [...byId("heat").querySelectorAll("tbody tr")].filter((row) => !row.hidden).map((row) => [...row.querySelectorAll("button")]);
  const at = rows.findIndex((row) => row.includes(event.target));
  if (at < 0) return;
  const last = rows[at].length - 1, far = 10;
  if (last > 0) column = rows[at].indexOf(event.target);
  const row = (index) => rows[Math.max(0, Math.min(rows.length - 1, index))];
  const target = { ArrowRight: rows[at][Math.min(column + 1, last)], ArrowLeft: rows[at][Math.max(0, column - 1)], Home: rows[at][0], End: rows[at][last],
    ArrowDown: row(at + 1), ArrowUp: row(at - 1), PageDown: row(at + far), PageUp: row(at - far) }[event.key];
  if (target === undefined) return;
  event.preventDefault();
  focusOn(Array.isArray(target) ? target[Math.min(column, target.length - 1)] : target);
}

function focusOn(button) {
  for (const one of byId("heat").querySelectorAll('button[tabindex="0"]')) one.tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
}

function showTip(button) {
  const tip = byId("tip"), cell = button && cells.find((one) => one.button === button);
  tip.hidden = !cell;
  if (!cell) return;
  tip.textContent = cell.text;
  const box = button.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const above = box.top - size.height - 8;
  tip.style.left = `${Math.max(8, Math.min(innerWidth - size.width - 8, box.left))}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}
