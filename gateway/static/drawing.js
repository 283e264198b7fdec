// Helpers of the three drawings: SVG by hand, and the table that says the same.

import { element } from "./transcript.js";

const SVG = "http://www.w3.org/2000/svg";

export function shape(tag, attributes, title) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (title) {
    const words = document.createElementNS(SVG, "title");
    words.textContent = title;
    made.append(words);
  }
  return made;
}

export function label(x, y, text, anchor = "start") {
  const made = shape("text", { x, y, "text-anchor": anchor, class: "axis-text" });
  made.textContent = text;
  return made;
}

/** Puts a drawing of that size into the figure, described in words for those who do not see it. */
export function draw(figure, width, height, description, shapes) {
  const svg = shape("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": description,
  });
  const hidden = shape("g", { "aria-hidden": "true" }); // the description and the table say it
  hidden.append(...shapes);
  svg.append(hidden);
  figure.querySelector(".drawing").replaceChildren(svg);
}

/** Room for a drawing, in pixels. */
export function widthOf(figure) {
  return Math.max(200, Math.floor(figure.querySelector(".drawing").clientWidth));
}

/** Fills the figure's table, unless it is folded away. While an answer grows, a table that is being read stands still. */
export function fillTable(figure, caption, heads, rows) {
  const table = figure.querySelector("table");
  if (!figure.querySelector("details").open) return;
  if (table.rows.length && document.querySelector("[aria-busy]")) return;
  const head = element("tr");
  head.append(...heads.map((text) => Object.assign(element("th", "", text), { scope: "col" })));
  const body = rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((text) => element("td", "", String(text))));
    return row;
  });
  const [thead, tbody] = [element("thead"), element("tbody")];
  thead.append(head);
  tbody.append(...body);
  table.replaceChildren(element("caption", "", caption), thead, tbody);
}

export function percent(share) {
  return `${(100 * share).toFixed(0)} %`;
}
