"use strict";
// Sorts tables, folds long ones, and switches between light and dark.
(() => {
  // -- tables

  for (const table of document.querySelectorAll("table.sorts")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const words = head.classList.contains("words");
      // Numbers are asked for the largest first, words from A.
      const ascending = head.ariaSort ? head.ariaSort === "descending" : words;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort;
      const order = words ? (a, b) => a.localeCompare(b) : (a, b) => a - b;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); // empty cells last
        return ascending ? order(x, y) : order(y, x);
      });
      table.tBodies[0].append(...rows);
    }));
  }

  // -- long tables show their first rows, whole, and say how many more there are

  const most = 8;
  for (const table of document.querySelectorAll("main table")) {
    const count = table.tBodies[0].rows.length;
    if (count <= most + 1) continue; // a button for one row saves nothing
    table.classList.add("short");
    const more = document.createElement("button");
    more.type = "button";
    more.className = "more";
    const label = () => {
      const short = table.classList.contains("short");
      more.textContent = short ? `Show all ${count.toLocaleString("en")} rows` : `Show ${most} rows only`;
      more.setAttribute("aria-expanded", String(!short));
    };
    more.addEventListener("click", () => {
      table.classList.toggle("short");
      label();
    });
    label();
    table.closest(".scroll").after(more);
  }

  // -- light and dark; print unfolds what is not too long

  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    const dark = chosen ?? system.matches;
    root.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
  };
  system.addEventListener("change", apply);
  button.addEventListener("click", () => {
    chosen = root.dataset.theme !== "dark";
    apply();
  });
  apply();

  let opened = [];
  addEventListener("beforeprint", () => {
    // A table of hundreds of windows would fill a book.
    opened = [...document.querySelectorAll("details.table:not([open]), details.section:not([open])")]
      .filter((details) => details.querySelectorAll("tbody tr").length <= 60);
    opened.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((details) => { details.open = false; }));
})();
