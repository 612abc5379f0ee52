// Makes the calls of tests/e2e/sdks/test_ollama_clients.py with Ollama's client for JavaScript.
// Arguments: the path of the client, the server's URL, its key, its model. Prints what came back,
// as JSON.

const [path, host, key, model] = process.argv.slice(2);
const { Ollama } = await import(path);
const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } });
const options = { temperature: 0 };
const told = {};

told.list = (await client.list()).models.map((row) => row.name);
told.show = await client.show({ model });
told.ps = (await client.ps()).models.map((row) => row.name);
told.version = await client.version();

const parts = [];
const hello = [{ role: "user", content: "Hello" }];
for await (const part of await client.chat({ model, messages: hello, stream: true, options })) {
  parts.push(part);
}
told.text = parts.map((part) => part.message.content).join("");
told.last = parts.at(-1);

const tools = [
  {
    type: "function",
    function: {
      name: "check_weather",
      description: "Check the weather.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  },
];
const messages = [{ role: "user", content: "Check the weather with city Lisbon." }];
const called = await client.chat({ model, messages, tools, options });
told.calls = called.message.tool_calls;
messages.push(called.message, {
  role: "tool",
  tool_name: "check_weather",
  content: "The temperature is 17.",
});
told.answer = (await client.chat({ model, messages, tools, options })).message.content;

const generated = await client.generate({ model, prompt: "Hello", think: true, options });
told.generated = { response: generated.response, thinking: generated.thinking };

const embedder = told.list.at(-1);
told.embedded = (await client.embed({ model: embedder, input: ["one", "two"] })).embeddings;

const stream = await client.chat({ model, messages: hello, stream: true, options });
told.aborted = "";
setImmediate(() => stream.abort());
try {
  for await (const part of stream) told.last_before_abort = part.message.content;
} catch (error) {
  told.aborted = error.name;
}

try {
  await client.pull({ model: "llama3.2" });
} catch (error) {
  told.pull = { message: error.message, status: error.status_code };
}

console.log(JSON.stringify(told));
