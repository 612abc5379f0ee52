// Calls the server's API; if API keys are set, the sign-in's cookie identifies the user.

const API = "/chat/api";
const SIGN_IN = "/chat/sign-in";
const PAGE = { "x-hearth-page": "1" };

export class ApiError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function asked(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path, { ...options, headers: { ...PAGE, ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running?", { code: "unreachable" });
  }
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

async function refusal(reply) {
  const text = await reply.text();
  let told;
  try {
    told = JSON.parse(text).error;
  } catch {
    told = null;
  }
  const message = typeof told?.message === "string" ? told.message : `The server answered ${reply.status}.`;
  return new ApiError(message, { status: reply.status, code: told?.code ?? "" });
}

export async function models() {
  return (await (await asked(`${API}/v1/models`)).json()).data;
}

// Returns the progress of a request's prefill, {done_tokens, prompt_tokens}, or nothing.
export async function prefill(requestId, signal) {
  const health = await (await asked(`${API}/health`, { signal })).json();
  return health.prefills?.find((row) => row.request_id === requestId);
}

export async function signInState() {
  return (await asked(SIGN_IN)).json();
}

export async function signIn(key) {
  await asked(SIGN_IN, { method: "POST", body: new URLSearchParams({ key }) });
}

export async function signOut() {
  await asked(SIGN_IN, { method: "DELETE" });
}

// Requests a chat completion; `chunks` of the result yields the chunks of the stream.
export async function openChat(body, session, signal) {
  const reply = await asked(`${API}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-session-id": session },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  return {
    requestId: reply.headers.get("x-request-id"),
    servedBy: reply.headers.get("x-hearth-served-by"),
    chunks: chunksOf(reply.body),
  };
}

async function* chunksOf(stream) {
  for await (const data of eventData(stream)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(String(chunk.error.message ?? "The answer broke off."), { code: chunk.error.code });
    yield chunk;
  }
  throw new ApiError("The connection ended amid the answer.", { code: "broken_off" });
}

// Yields the data of each server-sent event; this server's events have one line of data.
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke amid the answer.", { code: "broken_off" });
    }
    if (part.done) return;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
