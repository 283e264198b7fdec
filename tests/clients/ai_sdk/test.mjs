// Vercel's AI SDK against a running server: node test.mjs BASE_URL MODEL [API_KEY]
// What is checked holds for any model: shapes, schemas, and that pieces add up to the whole.
import assert from "node:assert/strict";
import test from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, modelName, apiKey] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "dspark",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(modelName);
const common = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
const oneCall = { providerOptions: { dspark: { parallel_tool_calls: false } } }; // small models do not stop calling

const weather = {
  description: "Tells the weather of a city",
  inputSchema: z.object({ city: z.enum(["Berlin", "Paris"]), days: z.number().int().min(1).max(9) }),
};

test("chat", async () => {
  const { text, usage, finishReason } = await generateText({ ...common, prompt: "Say hello.", maxOutputTokens: 16 });
  assert.ok(text.length > 0);
  assert.ok(["stop", "length"].includes(finishReason));
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0 && usage.outputTokens <= 16);
});

test("streaming", async () => {
  const result = streamText({ ...common, prompt: "Say hello.", maxOutputTokens: 16 });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  assert.equal(text, await result.text);
  assert.ok(text.length > 0);
  assert.ok((await result.usage).outputTokens > 0);
});

test("a tool is called, and its result goes back", async () => {
  const inputs = [];
  const { steps } = await generateText({
    ...common,
    ...oneCall,
    prompt: "How is the weather in Paris?",
    tools: { weather: tool({ ...weather, execute: async (input) => (inputs.push(input), { sky: "blue" }) }) },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
    stopWhen: stepCountIs(2),
  });
  assert.equal(steps.length, 2);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.deepEqual(steps[0].toolCalls.map((call) => call.input), inputs);
  for (const input of inputs) weather.inputSchema.parse(input);
  assert.ok(inputs.length > 0 && steps[1].text.length > 0);
});

test("tool calls are streamed", async () => {
  const result = streamText({
    ...common,
    ...oneCall,
    prompt: "How is the weather in Paris?",
    tools: { weather: tool(weather) },
    toolChoice: "required",
  });
  const streamed = {};
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "tool-input-start") streamed[part.id] = "";
    if (part.type === "tool-input-delta") streamed[part.id] += part.delta;
  }
  const calls = await result.toolCalls;
  assert.ok(calls.length > 0);
  for (const call of calls) {
    assert.equal(call.toolName, "weather");
    assert.deepEqual(weather.inputSchema.parse(JSON.parse(streamed[call.toolCallId])), call.input);
  }
  assert.equal(await result.finishReason, "tool-calls");
});

test("structured output", async () => {
  const schema = z.object({ city: z.enum(["Berlin", "Paris"]), sunny: z.boolean() });
  const whole = await generateText({ ...common, prompt: "Pick a city.", output: Output.object({ schema }) });
  schema.parse(whole.output);
  const result = streamText({ ...common, prompt: "Pick a city.", output: Output.object({ schema }) });
  let last;
  for await (const partial of result.partialOutputStream) last = partial;
  assert.deepEqual(schema.parse(last), whole.output);
});

test("errors carry their status and text", async () => {
  const unknown = generateText({ ...common, model: provider("nobody"), prompt: "Hi" });
  await assert.rejects(unknown, (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /served/);
    return true;
  });
  await assert.rejects(generateText({ ...common, temperature: 9, prompt: "Hi" }), (error) => error.statusCode === 400);
});

test("a stream can be aborted", async () => {
  const abort = new AbortController();
  const result = streamText({ ...common, prompt: "Count.", maxOutputTokens: 1000, abortSignal: abort.signal });
  const kinds = [];
  for await (const part of result.fullStream) {
    kinds.push(part.type);
    if (part.type === "text-delta") abort.abort();
  }
  assert.equal(kinds.at(-1), "abort");
});
