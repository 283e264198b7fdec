// How sure the drafter was of the drafts that were verified, against how many of them were accepted.

import { draw, fillTable, label, percent, shape } from "./drawing.js";

const NUM_BINS = 10;
const SIZE = 200;
const MARGIN = 44;
const Z = 1.96; // 95 %

/** Outcomes of confidences, gathered in bins. */
export class Reliability {
  bins = Array.from({ length: NUM_BINS }, () => ({ count: 0, sum: 0, accepted: 0 }));

  /** Takes in a step. Of drafts behind the first that was not accepted, nothing is known. */
  add(step) {
    step.confidences.slice(0, step.uncut_accepted + 1).forEach((confidence, index) => {
      if (confidence === null) return;
      const bin = this.bins[Math.min(NUM_BINS - 1, Math.floor(confidence * NUM_BINS))];
      bin.count += 1;
      bin.sum += confidence;
      bin.accepted += index < step.uncut_accepted;
    });
  }

  get count() {
    return this.bins.reduce((total, bin) => total + bin.count, 0);
  }

  /** Expected calibration error: mean distance between confidence and share, weighted by count. */
  get error() {
    return this.bins.reduce((total, bin) => total + Math.abs(bin.sum - bin.accepted), 0) / Math.max(1, this.count);
  }
}

/** Wilson's interval of a share. */
function interval(share, count) {
  const centre = share + Z ** 2 / (2 * count);
  const half = Z * Math.sqrt((share * (1 - share)) / count + Z ** 2 / (4 * count ** 2));
  const scale = 1 + Z ** 2 / count;
  return [(centre - half) / scale, (centre + half) / scale];
}

export function drawReliability(figure, reliability) {
  const x = (value) => MARGIN + value * SIZE;
  const y = (value) => 8 + (1 - value) * SIZE;
  const shapes = [
    shape("path", { d: `M${x(0)} ${y(1)}V${y(0)}H${x(1)}`, class: "axis" }),
    shape("path", { d: `M${x(0)} ${y(0)}L${x(1)} ${y(1)}`, class: "diagonal" }),
    ...[0, 0.5, 1].map((value) => label(x(value), y(0) + 14, percent(value), "middle")),
    ...[0.5, 1].map((value) => label(x(0) - 4, y(value) + 4, percent(value), "end")),
    label(x(0.5), y(0) + 28, "confidence", "middle"),
    label(x(0) + 6, y(1) + 4, "accepted"),
  ];
  const rows = [];
  reliability.bins.forEach((bin, index) => {
    const range = `${percent(index / NUM_BINS)} to ${percent((index + 1) / NUM_BINS)}`;
    if (!bin.count) {
      rows.push([range, 0, "–", "–"]);
      return;
    }
    const [confidence, share] = [bin.sum / bin.count, bin.accepted / bin.count];
    const [low, high] = interval(share, bin.count);
    const words = `${bin.count} drafts with confidence ${percent(confidence)}: ${percent(share)} accepted`;
    shapes.push(
      shape("path", { d: `M${x(confidence)} ${y(low)}V${y(high)}`, class: "whisker" }),
      shape("circle", { cx: x(confidence), cy: y(share), r: 3 + Math.min(5, Math.log2(bin.count) / 2), class: "dot" }, words),
    );
    rows.push([range, bin.count, percent(confidence), percent(share)]);
  });
  const description = reliability.count
    ? `${reliability.count} verified drafts; confidence and outcome are ${percent(reliability.error)} apart on average`
    : "No verified drafts yet";
  draw(figure, SIZE + 2 * MARGIN, SIZE + 44, description, shapes);
  fillTable(figure, description, ["Confidence", "Drafts", "Mean confidence", "Accepted"], rows);
}
