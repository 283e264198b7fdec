// Wires the page: the form, one answer at a time, the figures beside it.

import { ServerError, currentKey, gauges, servedModel, setKey, streamChat } from "./api.js";
import { BudgetHistory, drawBudget } from "./budget.js";
import { percent } from "./drawing.js";
import { Reliability, drawReliability } from "./reliability.js";
import { AnswerView, addQuestion, clear } from "./transcript.js";
import { drawWindows, stepTitle } from "./windows.js";

const RETRY_MS = 2000;
const LOAD_MS = 3000;
const REDRAW_MS = 150;
const RUNNING = "vllm:num_requests_running";
const WAITING = "vllm:num_requests_waiting";
const SLOTS = "dspark_slots";

const at = (id) => document.getElementById(id);
const [composer, prompt, send, stop] = ["composer", "prompt", "send", "stop"].map(at);
const figures = { windows: at("windows"), reliability: at("reliability"), budget: at("budget") };

const reliability = new Reliability();
const budget = new BudgetHistory();
let messages = [];
let answer = newAnswer(); // the one that is shown beside the chat
let running = null; // AbortController of the answer that is being written

// The server: is it there, what does it serve, how busy is it

async function greet() {
  try {
    const model = await servedModel();
    at("served").textContent = `${model.id}, context of ${model.max_model_len} tokens`;
    showError("");
    pollLoad();
  } catch (error) {
    if (error.status === 401) {
      askForKey(error.message);
      return; // goes on when there is a key
    }
    at("served").textContent = error.status === 503 ? `Not ready: ${error.message}` : error.message;
    setTimeout(greet, RETRY_MS);
  }
}

function askForKey(message) {
  at("served").textContent = "This server wants an API key.";
  at("key-row").hidden = false;
  if (currentKey()) showError(message);
}

let loadTimer = 0;

/** Shows the load while the page is seen. A server that does not tell it is not asked again. */
async function pollLoad() {
  clearTimeout(loadTimer);
  if (!document.hidden) {
    try {
      const load = await gauges([RUNNING, WAITING, SLOTS]);
      at("load").textContent = `Load: ${load[RUNNING]} of ${load[SLOTS]} running, ${load[WAITING]} waiting`;
      at("load").hidden = load[RUNNING] === undefined; // the scheduler is away
    } catch (error) {
      at("load").hidden = true;
      if (error.status) return;
    }
  }
  loadTimer = setTimeout(pollLoad, LOAD_MS);
}

function showError(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

// Asking

/** Times are performance.now(), 0 before there is one. */
function newAnswer() {
  return { started: performance.now(), first: 0, last: 0, numTokens: 0, numAtFirst: 0, text: "", steps: [], offReason: "" };
}

function numberIn(id) {
  return at(id).value === "" ? undefined : Number(at(id).value);
}

function requestBody() {
  const system = at("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    dspark: { pieces: true, steps: true },
    temperature: numberIn("temperature"),
    seed: numberIn("seed"),
    max_tokens: numberIn("max-tokens"),
    speculation: at("speculate").checked ? undefined : { enabled: false },
  };
}

async function ask() {
  const text = prompt.value.trim();
  if (running || !text) return;
  if (!composer.checkValidity()) {
    at("settings").open = true;
    composer.reportValidity();
    return;
  }
  showError("");
  messages.push({ role: "user", content: text });
  addQuestion(text);
  prompt.value = "";
  const mine = new AbortController();
  const asked = messages;
  setRunning(mine);
  const view = new AnswerView();
  const growing = newAnswer();
  answer = growing;
  let reason = "";
  try {
    for await (const chunk of streamChat(requestBody(), mine.signal)) reason = take(chunk, view, growing) ?? reason;
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else {
      reason = "failed";
      showError(error.message);
      if (error.status === 401) askForKey(error.message);
      if (!(error instanceof ServerError)) console.error(error);
    }
  }
  view.end(noteOn(growing, reason));
  if (growing.text) asked.push({ role: "assistant", content: growing.text });
  else {
    asked.pop(); // nothing was answered: the question can be sent again
    if (!prompt.value && asked === messages) prompt.value = text;
  }
  if (running === mine) setRunning(null);
  redraw();
}

/** Takes in a chunk; returns the finish reason if it tells it. */
function take(chunk, view, growing) {
  if (chunk.dspark?.speculation_off_reason) growing.offReason = chunk.dspark.speculation_off_reason;
  if (chunk.usage) growing.numTokens = chunk.usage.completion_tokens;
  const choice = chunk.choices[0];
  if (!choice) return undefined;
  const { pieces = [], step } = choice.dspark ?? {};
  if (step) {
    growing.steps.push(step);
    growing.last = performance.now();
    if (!growing.first) {
      growing.first = growing.last;
      growing.numAtFirst = growing.numTokens;
    }
    reliability.add(step);
    budget.add(step);
  }
  growing.text += choice.delta.content ?? "";
  view.addStep(pieces, step && stepTitle(step, growing.steps.length));
  scheduleRedraw();
  return choice.finish_reason ?? undefined;
}

function setRunning(controller) {
  running = controller;
  if ([send, stop].includes(document.activeElement)) prompt.focus(); // a button that is disabled loses the focus
  stop.disabled = !running;
  send.disabled = Boolean(running);
}

// Figures

function total(steps, name) {
  return steps.reduce((sum, step) => sum + step[name], 0);
}

function speedOf({ first, last, numTokens, numAtFirst }) {
  return last > first ? ((numTokens - numAtFirst) * 1000) / (last - first) : null;
}

function noteOn(ended, reason) {
  const speed = speedOf(ended);
  return [
    `${ended.numTokens} tokens`,
    `${total(ended.steps, "accepted")} from accepted drafts`,
    ...(speed ? [`${speed.toFixed(1)} tokens per second`] : []),
    ...(ended.first ? [`first after ${Math.round(ended.first - ended.started)} ms`] : []),
    ...(reason && reason !== "stop" ? [reason === "length" ? "cut at the limit of tokens" : reason] : []),
  ].join(", ");
}

function showFigures() {
  const speed = speedOf(answer);
  at("speed").textContent = speed ? speed.toFixed(1) : "–";
  at("first").textContent = answer.first ? `${Math.round(answer.first - answer.started)} ms` : "–";
  const numVerified = total(answer.steps, "verified");
  const later = answer.numTokens - answer.numAtFirst;
  at("per-step").textContent = answer.steps.length > 1 ? (later / (answer.steps.length - 1)).toFixed(2) : "–";
  at("rate").textContent = numVerified ? percent(total(answer.steps, "accepted") / numVerified) : "–";
  at("off-reason").textContent = answer.offReason ? `Nothing was drafted: ${answer.offReason}.` : "";
  at("off-reason").hidden = !answer.offReason;
}

function redraw() {
  showFigures();
  drawWindows(figures.windows, answer.steps);
  drawReliability(figures.reliability, reliability);
  drawBudget(figures.budget, budget);
}

let isRedrawDue = false;

/** Redraws soon: a step may take a few milliseconds, eyes are slower. */
function scheduleRedraw() {
  if (isRedrawDue) return;
  isRedrawDue = true;
  setTimeout(() => {
    isRedrawDue = false;
    requestAnimationFrame(redraw);
  }, REDRAW_MS);
}

// Events

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
at("new-chat").addEventListener("click", () => {
  running?.abort();
  setRunning(null);
  messages = [];
  answer = newAnswer();
  clear();
  showError("");
  redraw();
  prompt.focus();
});
at("api-key").value = currentKey();
at("api-key").addEventListener("change", (event) => {
  setKey(event.target.value);
  showError("");
  greet();
});
at("mark").addEventListener("change", (event) => document.body.classList.toggle("unmarked", !event.target.checked));
for (const figure of Object.values(figures)) figure.querySelector("details").addEventListener("toggle", redraw);
window.addEventListener("resize", scheduleRedraw);
document.addEventListener("visibilitychange", () => document.hidden || (loadTimer && pollLoad()));

redraw();
greet();
