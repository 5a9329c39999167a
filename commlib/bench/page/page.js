"use strict";
const value = (row, column) => {
  const cell = row.cells[column];
  const number = Number(cell.dataset.v ?? NaN);
  return Number.isNaN(number) ? cell.textContent.trim() : number;
};
const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
for (const table of document.querySelectorAll("table.sortable")) {
  const titles = [...table.tHead.rows[0].cells];
  titles.forEach((title, column) => {
    title.tabIndex = 0;
    const sort = () => {
      const descending = title.getAttribute("aria-sort") === "ascending";
      titles.forEach((other) => other.removeAttribute("aria-sort"));
      title.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (descending ? -1 : 1) * compare(value(a, column), value(b, column)));
      table.tBodies[0].append(...rows);
    };
    title.addEventListener("click", sort);
    title.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
}
for (const input of document.querySelectorAll("input.filter")) {
  const table = input.closest("section").querySelector('table[data-name="cases"]');
  const texts = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [row, text] of texts) row.hidden = !words.every((word) => text.includes(word));
  });
}
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
