// Drafts verified in a step over all requests, against how many requests the step served.

import { draw, fillTable, label, shape, widthOf } from "./drawing.js";

const HEIGHT = 110;
const LEFT = 24;
const [MIN_STEP, MAX_STEP] = [3, 12]; // pixels
const MAX_STEPS = 2000;

/** Budget and rows of the steps seen. */
export class BudgetHistory {
  steps = [];
  #byRows = new Map();

  add(step) {
    this.steps.push({ budget: step.budget, rows: step.rows });
    if (this.steps.length > MAX_STEPS) this.steps.shift();
    const seen = this.#byRows.get(step.rows) ?? { count: 0, budget: 0 };
    this.#byRows.set(step.rows, { count: seen.count + 1, budget: seen.budget + step.budget });
  }

  /** [rows, steps, mean budget] by rows. */
  get byRows() {
    const sorted = [...this.#byRows].sort(([a], [b]) => a - b);
    return sorted.map(([rows, { count, budget }]) => [rows, count, budget / count]);
  }
}

export function drawBudget(figure, history) {
  const width = widthOf(figure);
  const shown = history.steps.slice(-Math.floor((width - LEFT) / MIN_STEP));
  const wide = Math.min(MAX_STEP, (width - LEFT) / Math.max(1, shown.length));
  const top = Math.max(4, ...shown.map((step) => Math.max(step.budget, step.rows)));
  const y = (value) => HEIGHT - 4 - (value / top) * (HEIGHT - 16);
  let bars = "";
  let line = "";
  shown.forEach((step, index) => {
    const x = LEFT + index * wide;
    bars += `M${x} ${y(0)}V${y(step.budget)}h${wide - 1}V${y(0)}z`;
    line += `${index ? "L" : "M"}${x} ${y(step.rows)}h${wide}`;
  });
  const shapes = [
    shape("path", { d: `M${LEFT} ${y(top)}V${y(0)}H${width}`, class: "axis" }),
    label(LEFT - 4, y(top) + 4, top, "end"),
    label(LEFT - 4, y(0), 0, "end"),
    shape("path", { d: bars, class: "bars" }),
    shape("path", { d: line, class: "line" }),
  ];
  const means = history.byRows.map(([rows, count, mean]) => [rows, count, mean.toFixed(1), (mean / rows).toFixed(1)]);
  const words = means.map(([rows, , mean]) => `${mean} at ${rows === 1 ? "1 request" : `${rows} requests`}`);
  const description = means.length ? `Drafts verified a step, on average: ${words.join(", ")}` : "No steps yet";
  draw(figure, width, HEIGHT, description, shapes);
  fillTable(figure, description, ["Requests in the step", "Steps", "Mean budget", "Per request"], means);
}
