// Streams an answer over gRPC: node text_client.mjs PROTO_FOLDER "Why is the sky blue?" [ADDRESS] [API_KEY]
//
// Needs Node.js 18 or newer and the packages @grpc/grpc-js and @grpc/proto-loader. PROTO_FOLDER is the repository's
// proto/, read when the program starts: nothing is generated.
import { credentials, loadPackageDefinition, Metadata } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const [protoFolder, prompt, address = "127.0.0.1:8001", apiKey = ""] = process.argv.slice(2);
if (!protoFolder || !prompt) {
  console.error('usage: node text_client.mjs PROTO_FOLDER "PROMPT" [ADDRESS] [API_KEY]');
  process.exit(2);
}

const definition = loadSync("dspark/v1/gateway.proto", { includeDirs: [protoFolder], keepCase: true, oneofs: true });
const { TextService } = loadPackageDefinition(definition).dspark.v1;
const client = new TextService(address, credentials.createInsecure());

const metadata = new Metadata();
if (apiKey) metadata.set("authorization", `Bearer ${apiKey}`);

const call = client.GenerateText({ messages: [{ role: "user", content: prompt }], max_tokens: 256 }, metadata);
call.on("data", (response) => {
  if (response.event === "chunk") {
    process.stdout.write(response.chunk.pieces.map((piece) => piece.text).join(""));
  } else {
    const { num_completion_tokens: tokens, speculation } = response.summary;
    console.log(`\n[${tokens} tokens, ${speculation?.num_accepted ?? 0} of them accepted drafts]`);
  }
});
call.on("error", (error) => {
  console.error(error.message); // code, then the server's words
  process.exitCode = 1;
});
