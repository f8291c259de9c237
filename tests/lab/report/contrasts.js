const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

function rgba(colour) {
  paint.clearRect(0, 0, 1, 1);
  paint.fillStyle = colour;
  paint.fillRect(0, 0, 1, 1);
  return [...paint.getImageData(0, 0, 1, 1).data];
}

function luminance(colour) {
  const [r, g, b] = rgba(colour).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function behind(node) {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (rgba(colour)[3] === 255) return colour;
  }
  return "white";
}

const found = {};
for (const node of document.querySelectorAll("body *")) {
  const hasText = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim());
  if (!hasText || !node.checkVisibility()) continue;
  const style = getComputedStyle(node);
  const text = luminance(node.namespaceURI.endsWith("svg") ? style.fill : style.color), ground = luminance(behind(node));
  const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
  if (ratio < 4.5) found[`${node.tagName} ${node.className.baseVal ?? node.className}: ${node.textContent.slice(0, 40)}`] = ratio;
}
return found;
