// A chat through /v1/chat/completions. Whatever comes from a model is put into text nodes, never parsed as HTML.

import { element } from "./charts.js";

const byId = (id) => document.getElementById(id);
const log = byId("log"), prompt = byId("prompt"), key = byId("key"), model = byId("model");
const NO_LONGER = new Set(["stop", "tool_calls"]); // finish reasons that need no word

let messages = [];
let running = null; // AbortController of the answer that streams

function headers() {
  return key.value ? { Authorization: `Bearer ${key.value}` } : {};
}

async function problem(answer) {
  const body = await answer.json().catch(() => ({}));
  const message = typeof body.error === "string" ? body.error : body.error?.message;
  return new Error(message ?? `HTTP ${answer.status}`);
}

async function listModels() {
  const answer = await fetch("/v1/models", { headers: headers() });
  if (answer.status === 401) byId("key-row").hidden = false;
  if (!answer.ok) return;
  const chosen = model.value;
  const { data } = await answer.json();
  model.replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
  if (data.some(({ id }) => id === chosen)) model.value = chosen;
}

function addMessage(role, text) {
  byId("empty")?.remove();
  const shown = { thought: element("div", { class: "thought" }), text: element("div", { class: "text" }, text),
    note: element("div", { class: "note" }) };
  shown.thought.hidden = true;
  shown.box = element("div", { class: `message ${role}` },
    element("div", { class: "who" }, role === "user" ? "You" : model.value || "Model"),
    shown.thought, shown.text, shown.note);
  log.append(shown.box);
  log.scrollTop = log.scrollHeight;
  return shown;
}

// Events of a stream of server-sent events, parsed; ends at [DONE] or with the stream.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (!lines.length) continue; // a comment that keeps the connection open
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? "the stream failed");
      yield event;
    }
  }
}

function requestBody() {
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  if (model.value) body.model = model.value;
  if (byId("max-tokens").value) body.max_tokens = Number(byId("max-tokens").value);
  if (byId("temperature").value) body.temperature = Number(byId("temperature").value);
  return JSON.stringify(body);
}

function append(node, text) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  node.append(text);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function note(started, first, last, usage, reason) {
  const words = [];
  if (usage) words.push(`${usage.completion_tokens} tokens`);
  if (usage && usage.completion_tokens > 1 && last > first) {
    words.push(`${((usage.completion_tokens - 1) / ((last - first) / 1000)).toFixed(1)} tokens/s`);
  }
  if (first !== null) words.push(`first after ${Math.round(first - started)} ms`);
  if (reason && !NO_LONGER.has(reason)) words.push(reason === "length" ? "cut at max tokens" : reason);
  return words.join(" · ");
}

async function answer() {
  const shown = addMessage("assistant", "");
  const started = performance.now();
  let first = null, last = null, usage = null, reason = null, text = "";
  running = new AbortController();
  busy(true);
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", body: requestBody(), signal: running.signal,
      headers: { "Content-Type": "application/json", ...headers() } });
    if (!response.ok) {
      if (response.status === 401) byId("key-row").hidden = false;
      throw await problem(response);
    }
    for await (const event of events(response.body)) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
      const piece = choice.delta?.content;
      if (thought || piece) {
        last = performance.now();
        first ??= last;
      }
      if (thought) { shown.thought.hidden = false; append(shown.thought, thought); }
      if (piece) { text += piece; append(shown.text, piece); }
      reason = choice.finish_reason ?? reason;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else shown.text.append(element("div", { class: "error" }, error.message));
  }
  shown.note.textContent = note(started, first, last, usage, reason);
  // The next question continues what was said; a question without an answer is taken back.
  if (text) messages.push({ role: "assistant", content: text });
  else messages.pop();
  running = null;
  busy(false);
}

function busy(yes) {
  byId("send").disabled = yes;
  byId("stop").disabled = !yes;
  log.setAttribute("aria-busy", String(yes));
  if (!yes && document.activeElement === byId("stop")) prompt.focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  answer();
});

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.replaceChildren();
  prompt.focus();
});
key.value = sessionStorage.getItem("aotllm.key") ?? "";
byId("key-row").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("aotllm.key", key.value);
  listModels().then(() => prompt.focus());
});
if (key.value) byId("key-row").hidden = false;
listModels().catch(() => {});
