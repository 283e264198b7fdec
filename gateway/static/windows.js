// What was drafted, verified and accepted in each step of an answer.

import { draw, fillTable, label, shape, widthOf } from "./drawing.js";

const CELL = 10; // pixels, gap of 2 included
const BASE = 4; // height of what marks a plain step
const LEFT = 16;

/** One line about a step. */
export function stepTitle(step, number) {
  if (!step.drafted) return `Step ${number}: nothing drafted`;
  return `Step ${number}: ${step.drafted} drafted, ${step.verified} verified, ${step.accepted} accepted`;
}

function square(x, y) {
  return `M${x} ${y}h8v8h-8z`;
}

/** @param {object[]} steps `dspark.step` of each step of the answer */
export function drawWindows(figure, steps) {
  const width = widthOf(figure);
  const numSlots = Math.max(4, ...steps.map((step) => step.drafted));
  const height = numSlots * CELL + BASE;
  const shown = steps.slice(-Math.floor((width - LEFT) / CELL));
  const first = steps.length - shown.length;
  const paths = { accepted: "", rejected: "", cross: "", trimmed: "", plain: "" };
  const columns = [];
  shown.forEach((step, column) => {
    const x = LEFT + column * CELL;
    if (!step.drafted) paths.plain += `M${x} ${height - BASE}h8v2h-8z`;
    for (let slot = 0; slot < step.drafted; slot += 1) {
      const y = height - BASE - (slot + 1) * CELL + 2;
      if (slot < step.accepted) paths.accepted += square(x, y);
      else if (slot < step.verified) {
        paths.rejected += square(x, y);
        paths.cross += `M${x + 1} ${y + 1}l6 6M${x + 7} ${y + 1}l-6 6`;
      } else paths.trimmed += `M${x + 0.5} ${y + 0.5}h7v7h-7z`;
    }
    columns.push(
      shape("rect", { x, y: 0, width: CELL, height, class: "hit" }, stepTitle(step, first + column + 1)),
    );
  });
  const cells = Object.entries(paths).map(([kind, d]) => shape("path", { d, class: `cell-${kind}` }));
  const ticks = [1, numSlots].map((slot) => label(LEFT - 4, height - BASE - slot * CELL + 10, slot, "end"));
  draw(figure, width, height, describe(steps), [...ticks, ...cells, ...columns]);
  fillTable(
    figure,
    `Verify windows of the last answer, ${steps.length} steps`,
    ["Step", "Drafted", "Verified", "Accepted", "Confidences"],
    steps.map((step, index) => [
      index + 1,
      step.drafted,
      step.verified,
      step.accepted,
      step.confidences.map((value) => (value === null ? "?" : value.toFixed(2))).join(" "),
    ]),
  );
}

function describe(steps) {
  const sum = (name) => steps.reduce((total, step) => total + step[name], 0);
  return steps.length
    ? `${steps.length} steps: ${sum("drafted")} drafts drafted, ${sum("verified")} verified, ${sum("accepted")} accepted`
    : "No steps yet";
}
