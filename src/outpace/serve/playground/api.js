// The server's API: what runs there, and an answer as a stream of events. Paths are relative, so that the page also
// works behind a proxy that serves it below a path of its own.

const LOST = "The connection to the server was lost. Is it still running?";

/** An error with a message for the visitor: why a request failed or cannot be sent. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The server's facts, and the methods that requests may name. */
export async function describe(key) {
  const [info, methods] = await Promise.all(
    ["v1/outpace/info", "v1/outpace/methods"].map(async (path) => (await request(path, {}, key)).json()),
  );
  return { info, methods };
}

/** The chunks of one streamed answer; it ends after [DONE]. */
export async function* answerOf(body, key, signal) {
  const options = { method: "POST", body: JSON.stringify(body), signal };
  const response = await request("v1/chat/completions", options, key);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const piece = await reading(reader);
    if (piece.done) throw new ApiError(`${LOST} What had come until then is shown.`);
    const events = (rest + piece.value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (!lines.length) continue; // a comment that keeps the connection open
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(inWords(chunk.error.message), { param: chunk.error.param });
      yield chunk;
    }
  }
}

async function reading(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`${LOST} What had come until then is shown.`);
  }
}

async function request(path, options, key) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(LOST);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { status } = response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON, such as a proxy's page
  }
  const param = error.param ?? null;
  const told = error.message ? inWords(error.message) : `The server answered with status ${status}.`;
  if (status === 401) return new ApiError("This server wants an API key. Enter it in the settings.", { status, param: "key" });
  if (status === 429) {
    const seconds = response.headers.get("Retry-After");
    return new ApiError(`The server is busy${seconds ? `; try again in ${seconds} s` : ""}. ${told}`, { status });
  }
  if (status === 400 && param && error.message) {
    const named = error.message.startsWith(param) ? error.message : `${param}: ${error.message}`;
    return new ApiError(inWords(`the server refuses ${named}`), { status, param });
  }
  return new ApiError(told, { status, param });
}

/** A message as a sentence. */
function inWords(message) {
  const text = String(message).trim();
  return text.slice(0, 1).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}
