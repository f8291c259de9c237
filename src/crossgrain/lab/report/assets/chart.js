// Charts: axes in the width that there is, and marks that differ by more than their colour.
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "4 4", "12 4"];

function ticks(low, high, count) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => span / size <= count);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found.map((value) => Number(value.toPrecision(12)));
}

// An empty chart in a container. Returns the drawing and functions from numbers to places.
function chart(container, options) {
  const width = Math.max(280, Math.min(900, container.clientWidth || 600));
  const height = Math.round(Math.min(360, Math.max(230, width * 0.55)));
  const left = 62, right = options.right ?? 16, top = 14, bottom = 46;
  const [x0, x1] = options.x, [y0, y1] = options.y;
  const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right);
  const Y = (y) => height - bottom - ((y - y0) / (y1 - y0 || 1)) * (height - top - bottom);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${options.title}. ${options.summary}` },
    svg("title", { text: options.title }), svg("desc", { text: options.summary }));
  const steps = ticks(y0, y1, 5);
  for (const y of steps) {
    root.append(svg("line", { class: y === 0 ? "zero" : "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }),
      svg("text", { x: left - 8, y: Y(y) + 4, "text-anchor": "end", text: number(y) }));
  }
  for (const x of ticks(x0, x1, width < 420 ? 4 : 6)) {
    root.append(svg("text", { x: X(x), y: height - bottom + 18, "text-anchor": "middle", text: options.xText ? options.xText(x) : number(x) }));
  }
  root.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", text: options.xLabel }),
    svg("text", { x: 12, y: (top + height - bottom) / 2, "text-anchor": "middle", text: options.yLabel,
      transform: `rotate(-90 12 ${(top + height - bottom) / 2})` }));
  container.replaceChildren(root);
  return { root, X, Y, width, height, left, right, top, bottom };
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// A band between lower and upper ends, where both are known.
function band(drawing, xs, triples, colour) {
  const at = triples.map((triple, i) => [xs[i], triple]).filter(([, triple]) => half(triple) !== null);
  if (at.length < 2) return null;
  const up = at.map(([x, triple]) => [drawing.X(x), drawing.Y(triple[2])]);
  const down = at.map(([x, triple]) => [drawing.X(x), drawing.Y(triple[1])]).reverse();
  return svg("path", { class: "band", "--c": colour, d: `${path([...up, ...down])}Z` });
}

function curve(drawing, xs, triples, colour, dash) {
  return svg("path", { class: "curve", "--c": colour, "stroke-dasharray": dash || null,
    d: path(triples.map((triple, i) => [drawing.X(xs[i]), drawing.Y(triple[0])])) });
}

function marker(x, y, shape, colour, size = 5.5) {
  const around = (count, turn, inner = 1) => Array.from({ length: count }, (_, i) => {
    const angle = turn + (2 * Math.PI * i) / count, radius = size * (i % 2 ? inner : 1) * 1.15;
    return [x + radius * Math.sin(angle), y - radius * Math.cos(angle)];
  });
  const shapes = [null, around(4, 0), around(3, 0), around(4, Math.PI / 4), around(3, Math.PI), around(10, 0, 0.45)];
  const points = shapes[shape % shapes.length];
  return points === null ? svg("circle", { class: "dot", "--c": colour, cx: x, cy: y, r: size })
    : svg("path", { class: "dot", "--c": colour, d: `${path(points)}Z` });
}

// The range of intervals, with zero and some air. Ends that reach far beyond the means are cut.
function range(triples, more = []) {
  const means = triples.map((triple) => triple[0]).concat(more, [0]);
  const span = Math.max(...means) - Math.min(...means) || Math.max(...triples.map((triple) => half(triple) ?? 0)) || 1;
  const clip = (value) => Math.max(Math.min(...means) - span, Math.min(Math.max(...means) + span, value));
  const ends = triples.flatMap((triple) => triple.slice(1).filter(known).map(clip));
  const low = Math.min(...means, ...ends), high = Math.max(...means, ...ends);
  return [low < 0 ? low - 0.04 * (high - low) : 0, high + 0.06 * (high - low || 1)];
}

// Places for labels: as near as possible to where they belong, and not over each other.
function apart(places, distance, low, high) {
  const order = places.map((_, i) => i).sort((a, b) => places[a] - places[b]);
  const found = places.slice();
  let last = -Infinity;
  for (const i of order) last = found[i] = Math.max(found[i], last + distance, low);
  let next = high + distance;
  for (const i of order.reverse()) next = found[i] = Math.min(found[i], next - distance);
  return found;
}

const clipped = (drawing, node) => {
  const id = `clip${document.querySelectorAll("clipPath").length}`;
  drawing.root.append(svg("clipPath", { id }, svg("rect", { x: drawing.left, y: drawing.top, width: drawing.width - drawing.left - drawing.right,
    height: drawing.height - drawing.top - drawing.bottom })));
  node.setAttribute("clip-path", `url(#${id})`);
  return node;
};
