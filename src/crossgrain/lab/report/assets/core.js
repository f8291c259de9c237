// Helpers: the data, elements, numbers as text.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const SHAPES = ["◆", "▲", "■", "●", "★", "✚", "▼", "◖"]; // of candidates, by number
const QUANTITIES = {
  loss: { name: "loss", unit: "nats per token", long: "rise of the loss" },
  noise: { name: "noise", unit: "of a batch's noise", long: "noise added to the gradient" },
  bias: { name: "bias²", unit: "of a batch's noise", long: "squared bias of the gradient" },
};

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);

const joined = (numbers) => numbers.map((number) => data.pieces[number]).join("");
const known = (value) => value !== null && value !== undefined;
const half = (triple) => (known(triple[1]) && known(triple[2]) ? (triple[2] - triple[1]) / 2 : null);
const plural = (count, name, end = "s") => `${count} ${name}${count === 1 ? "" : end}`;
const minus = (text) => text.replace("-", "−");

function number(value, digits = 3) {
  if (!known(value)) return "–";
  const rounded = Number(value.toPrecision(digits));
  return minus(rounded !== 0 && Math.abs(rounded) < 1e-4 ? rounded.toExponential() : String(rounded));
}

// "0.00312 ± 0.0004": mean, and half of the interval.
function interval(triple) {
  if (!triple || !known(triple[0])) return "–";
  return half(triple) === null ? `${number(triple[0])} (no interval)` : aligned(triple).join(" ± ");
}

// Mean and half of the interval, with as many decimals as two digits of the latter have.
function aligned(triple) {
  const width = half(triple), decimals = width > 0 ? Math.max(0, 1 - Math.floor(Math.log10(width))) : 99;
  return decimals > 7 ? [number(triple[0]), number(width, 2)] : [minus(triple[0].toFixed(decimals)), width.toFixed(decimals)];
}

// A name that may be broken after its dots and underscores.
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part) => [part, el("wbr")]);

const contains = (triple, value) => half(triple) === null || (triple[1] <= value && value <= triple[2]);
const percent = (share) => `${number(100 * share)} %`;
const quantityOf = (gemm) => (gemm === "fprop" ? "loss" : state.backward);
const effect = (candidate, layer, gemm, quantity) => data.effects[candidate][`${gemm}.${quantity}`]?.[layer] ?? null;

// What the reader has chosen. The base is a candidate, too; the first other one is shown first.
const firstOther = data.candidates.findIndex((candidate) => candidate.label !== data.base);
const state = { candidate: Math.max(0, firstOther), backward: "noise", point: 0, hidden: new Set(), enlarged: false };
