// The conversation on the page. Everything a model or a user wrote goes in as text, never as markup.

const turns = document.getElementById("turns");
const conversation = document.getElementById("conversation");
const announcer = document.getElementById("announcer");

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Runs `change`; a reader who is at the end of the conversation stays there. */
function following(change) {
  const isAtEnd = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 40;
  change();
  if (isAtEnd) conversation.scrollTop = conversation.scrollHeight;
}

function addTurn(kind, speaker) {
  const turn = element("li", `turn ${kind}`);
  const text = element("div", "text");
  turn.append(element("h3", "speaker", speaker), text);
  following(() => turns.append(turn));
  return { turn, text };
}

export function clear() {
  turns.replaceChildren();
  announcer.replaceChildren();
}

export function addQuestion(text) {
  addTurn("user", "You").text.textContent = text;
  conversation.scrollTop = conversation.scrollHeight;
}

/** An answer that grows. */
export class AnswerView {
  #turn;
  #text;
  #unspoken = "";

  constructor() {
    const { turn, text } = addTurn("assistant", "Answer");
    this.#turn = turn;
    this.#text = text;
    this.#turn.setAttribute("aria-busy", "true");
    announcer.replaceChildren();
  }

  /** Text of one step, a run of tokens of the same origin at a time; `title` says what the step did. */
  addStep(pieces, title) {
    const step = element("span", "step");
    if (title) step.title = title;
    let run;
    for (const [text, isAcceptedDraft] of pieces) {
      if (!text) continue;
      if (run?.isAcceptedDraft === isAcceptedDraft) run.node.textContent += text;
      else {
        run = { isAcceptedDraft, node: element("span", isAcceptedDraft ? "accepted" : "own", text) };
        step.append(run.node);
      }
    }
    if (!run) return;
    following(() => this.#text.append(step));
    this.#speak(step.textContent);
  }

  /** Ends the answer with a line about it. */
  end(note) {
    following(() => this.#turn.append(element("p", "note", note)));
    this.#turn.removeAttribute("aria-busy");
    const last = [this.#unspoken.trim(), `End of the answer. ${note}`].filter(Boolean);
    announcer.replaceChildren(...last.map((text) => element("p", "", text)));
  }

  /** Screen readers get whole sentences: single tokens would be noise. */
  #speak(text) {
    this.#unspoken += text;
    const end = /^[^]*(?:[.!?:…]["”’)\]]*\s|\n)/.exec(this.#unspoken)?.[0].length ?? 0;
    if (end) {
      const sentence = this.#unspoken.slice(0, end).trim();
      if (sentence) announcer.append(element("p", "", sentence));
      this.#unspoken = this.#unspoken.slice(end);
    }
  }
}
