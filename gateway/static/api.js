// The gateway's API as this page uses it: one stream at a time, and what the server says of itself.

export class ServerError extends Error {
  /** @param {string} message  @param {number} status HTTP status; 0 when the server could not be reached */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const STORED_KEY = "dspark-api-key";
let apiKey = sessionStorage.getItem(STORED_KEY) ?? "";

export function currentKey() {
  return apiKey;
}

/** Kept for this tab, until it is closed. */
export function setKey(key) {
  apiKey = key.trim();
  if (apiKey) sessionStorage.setItem(STORED_KEY, apiKey);
  else sessionStorage.removeItem(STORED_KEY);
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(apiKey ? { authorization: `Bearer ${apiKey}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 200);
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not the API's own answer: shown as it is
  }
  throw new ServerError(message || `HTTP ${response.status}`, response.status);
}

/** @returns {Promise<{id: string, max_model_len: number}>} the model served by default */
export async function servedModel() {
  return (await (await request("v1/models")).json()).data[0];
}

/** Gauges by name, of those metrics that are named. */
export async function gauges(names) {
  const found = {};
  for (const line of (await (await request("metrics")).text()).split("\n")) {
    const [, name, value] = /^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line) ?? [];
    if (names.includes(name)) found[name] = (found[name] ?? 0) + Number(value);
  }
  return found;
}

/** Chunks of a streamed answer, as they come. Throws ServerError; AbortError when `signal` is raised. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  try {
    for await (const data of dataOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, response.status);
      yield chunk;
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // a TypeError is how a broken connection shows
  }
  throw new ServerError("The connection was lost before the answer was complete.", 0);
}

/** The data of server-sent events. Comments (keep-alives) are skipped. */
async function* dataOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading also ends the generation
  }
}
