// Start.
buildMap();
buildBudget();
buildVerified();
paintMap();
paintPoint();
drawGaps();

byId("candidate").addEventListener("change", (event) => { state.candidate = event.target.selectedIndex; paintMap(); });
byId("backward").addEventListener("change", (event) => { state.backward = event.target.value; paintMap(); });
byId("expand").addEventListener("click", () => { blocks.forEach((block) => fold(block, true)); });
byId("collapse").addEventListener("click", () => { blocks.forEach((block) => fold(block, false)); paintBlocks(); });

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // phones resize when their address bar goes away
  width = innerWidth;
  if (data.points.length) drawFrontier();
  measureSlide();
  drawGaps();
});
