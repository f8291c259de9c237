return [...document.querySelectorAll("#heat tr:not(.block) .cell")].map((cell) => ({
  mean: cell.querySelector(".mean")?.textContent.replace("−", "-"),
  half: cell.querySelector(".half")?.textContent,
  moved: cell.classList.contains("moved"),
  mark: cell.querySelector(".mark")?.textContent,
  label: cell.ariaLabel,
}));
