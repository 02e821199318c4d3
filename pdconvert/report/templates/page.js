"use strict";

// Tables: a click on a column's title sorts by it, and another one the other way round.
function sortTable(button) {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const column = [...head.parentNode.children].indexOf(head);
  const ascending = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)], [m, n] = [Number(x), Number(y)];
    const order = x !== "" && y !== "" && !isNaN(m) && !isNaN(n) ? m - n : x.localeCompare(y, "en", { numeric: true });
    return ascending ? order : -order;
  };
  body.append(...[...body.rows].sort(compare));
}
for (const head of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  button.addEventListener("click", () => sortTable(button));
  head.append(button);
}

// Tooltips: the <title> of what the pointer is on, at once and by touch too.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
let shown = null;
function showTip(event) {
  const owner = event.target.closest?.("svg.plot :has(> title)");
  if (shown && shown !== owner) {
    shown.querySelector(":scope > title").textContent = tip.textContent;
    shown = null;
  }
  tip.hidden = !owner;
  if (!owner) return;
  if (shown !== owner) {
    const title = owner.querySelector(":scope > title");
    tip.textContent = title.textContent;
    title.textContent = ""; // the browser shows it too, late and small
    shown = owner;
  }
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, event.clientX - width / 2), document.documentElement.clientWidth - width - 8);
  const above = event.clientY - height - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : event.clientY + 18}px`;
}
document.addEventListener("pointermove", showTip);
document.addEventListener("pointerdown", showTip);
document.addEventListener("scroll", () => { if (!shown) tip.hidden = true; }, { passive: true });

// Weights and codes: a plot for each grid is drawn once, with bars of full height; a choice scales them.
const chooser = document.getElementById("matrix");
if (chooser) {
  const matrices = JSON.parse(document.getElementById("matrices").textContent);
  const plots = [...document.querySelectorAll("[data-grid]")];
  const bars = [...document.querySelectorAll("[data-name]")];
  const ranges = new Map(bars.map((bar) => [bar, bar.querySelector("title").textContent]));
  const choose = () => {
    const matrix = matrices[Number(chooser.value)];
    for (const plot of plots) plot.hidden = plot.dataset.grid !== matrix.grid;
    for (const bar of bars) {
      const [kind, index] = bar.dataset.name.split("-"), share = matrix[kind]?.[Number(index)] ?? 0;
      bar.querySelector("path").style.transform = `scaleY(${share / 100})`;
      bar.querySelector("title").textContent = `${ranges.get(bar)}: ${share} % of the fullest bin`;
    }
    document.getElementById("matrix-facts").textContent = matrix.facts;
  };
  chooser.addEventListener("change", choose);
  choose();
}
