// llama.cpp through node-llama-cpp's prebuilt binary, as a peer of `dspark bench peers`.
//
//     node llama.mjs '{"module": "…/node-llama-cpp/dist/index.js", "version": "…", "model": "….gguf", "threads": 2,
//                      "concurrency": 16, "context": 2048, "lookup": false}'
//
// Speaks the lines of JSON that engines.py describes.

import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const options = JSON.parse(process.argv[2]);
const {getLlama, InputLookupTokenPredictor, LlamaLogLevel} = await import(pathToFileURL(options.module));

const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, maxThreads: options.threads, logLevel: LlamaLogLevel.error
});
const model = await llama.loadModel({modelPath: options.model});
const context = await model.createContext({
    sequences: options.concurrency,
    contextSize: options.context,
    batchSize: 512,
    threads: {ideal: options.threads, min: options.threads}
});
const sequences = Array.from({length: options.concurrency}, () => context.getSequence(
    options.lookup ? {tokenPredictor: new InputLookupTokenPredictor()} : {}
));

function say(message) {
    process.stdout.write(JSON.stringify(message) + "\n");
}

/** One greedy answer of exactly `maxTokens` tokens, with seconds since the call. */
async function complete(sequence, promptIds, maxTokens) {
    const started = performance.now();
    const seconds = () => (performance.now() - started) / 1000;
    const answer = {token_ids: [], first_s: 0, last_s: 0};
    await sequence.clearHistory();
    sequence.tokenPredictor?.updateInputTokens(promptIds);
    for await (const token of sequence.evaluate(promptIds, {temperature: 0, yieldEogToken: true})) {
        answer.token_ids.push(token);
        answer.last_s = seconds();
        answer.first_s ||= answer.last_s;
        if (answer.token_ids.length === maxTokens)
            break;
    }
    return answer;
}

say({
    ready: {
        versions: {"node-llama-cpp": options.version, "llama.cpp": llama.llamaCppRelease.release},
        dtype: `GGUF ${model.typeDescription}`,
        threads: context.currentThreads,
        cpu: llama.systemInfo
    }
});

for await (const line of createInterface({input: process.stdin})) {
    const {prompts, max_tokens: maxTokens} = JSON.parse(line);
    try {
        const answers = await Promise.all(prompts.map((ids, i) => complete(sequences[i], ids, maxTokens)));
        say({answers});
    } catch (error) {
        say({error: String(error)});
    }
}
process.exit(0);
