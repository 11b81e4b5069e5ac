// Live figures: asks /status.json for new points and draws them.

import { Chart, element } from "./charts.js";

const INTERVAL = 2000;

const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const percent = (value) => `${whole(value * 100)}%`;
const seconds = (value) => (value < 1 ? `${whole(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 0)} s`);
const known = (value, format) => (value === null || value === undefined ? "–" : format(value));

const percentiles = (name) => ["p50", "p90", "p99"].map((q) => ({ name: q, of: (point) => point[name][q] }));

const CHARTS = [
  { title: "Throughput", unit: "tokens/s", format: whole, floor: 10, series: [
    { name: "generated", of: (point) => point.generation_tokens_per_second },
    { name: "prompt", of: (point) => point.prompt_tokens_per_second }] },
  { title: "Sequences", unit: "", format: whole, floor: 4, series: [
    { name: "running", of: (point) => point.running }, { name: "waiting", of: (point) => point.waiting }] },
  { title: "Time to first token", unit: "last minute", format: seconds, floor: 0.01, series: percentiles("ttft") },
  { title: "Inter-token latency", unit: "last minute", format: seconds, floor: 0.01, series: percentiles("itl") },
  { title: "KV cache", unit: "", format: percent, floor: 1, series: [
    { name: "used", of: (point) => point.kv_usage }, { name: "prefix hits", of: (point) => point.prefix_hit_rate }] },
  { title: "Requests", unit: "per second", format: whole, floor: 1, series: [
    { name: "finished", of: (point) => point.requests_per_second },
    { name: "refused or failed", of: (point) => point.errors_per_second }] },
];

const TILES = [
  ["Throughput", (point) => [known(point.generation_tokens_per_second, whole), "tokens/s"]],
  ["Running", (point) => [whole(point.running), point.waiting ? `+ ${whole(point.waiting)} waiting` : ""]],
  ["KV cache", (point) => [known(point.kv_usage, percent), "used"]],
  ["Prefix hits", (point) => [known(point.prefix_hit_rate, percent), ""]],
  ["First token", (point) => [known(point.ttft.p50, seconds), "median"]],
  ["Next tokens", (point) => [known(point.itl.p50, seconds), "median"]],
];

const byId = (id) => document.getElementById(id);
const charts = CHARTS.map((options) => new Chart(byId("charts"), options));
const tiles = TILES.map(([name, of]) => {
  const value = element("span"), note = element("small");
  byId("tiles").append(element("div", { class: "tile" }, element("dt", {}, name), element("dd", {}, value, note)));
  return { of, value, note };
});
const points = new Map(); // time -> point: several front ends may answer, each with points of its own
let timer = null;

function state(text, kind) {
  const shown = byId("state");
  if (shown.textContent !== text) shown.textContent = text;
  shown.className = `state ${kind}`;
}

function row(model) {
  const name = element("td", {}, model.name);
  for (const adapter of model.adapters ?? []) name.append(element("span", { class: "adapter" }, `LoRA ${adapter}`));
  const good = model.state === "READY" && model.alive;
  const word = model.state === "READY" && !model.alive ? "DOWN" : model.state;
  const number = (value, format) => element("td", { class: "number" }, known(value, format));
  return element("tr", {}, name, element("td", { class: good ? "good" : "bad", title: model.reason }, word.toLowerCase()),
    number(model.running, whole), number(model.waiting, whole), number(model.kv_usage, percent),
    number(model.max_model_len, whole));
}

function show(status) {
  for (const point of status.points) points.set(point.t, point);
  const sorted = [...points.values()].sort((a, b) => a.t - b.t);
  const newest = sorted.at(-1);
  for (const point of sorted) if (point.t < newest.t - status.minutes * 60) points.delete(point.t);
  const kept = [...points.values()].sort((a, b) => a.t - b.t);
  state(status.state, status.state === "not ready" ? "bad" : status.state);
  byId("version").textContent = status.version;
  byId("models").replaceChildren(...status.models.map(row));
  if (newest === undefined) return;
  for (const { of, value, note } of tiles) [value.textContent, note.textContent] = of(newest);
  for (const chart of charts) chart.show(kept, status.minutes);
}

async function refresh() {
  clearTimeout(timer);
  try {
    const newest = Math.max(0, ...points.keys());
    const answer = await fetch(`/status.json?since=${newest}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.json());
  } catch {
    state("no connection", "bad");
  }
  if (!document.hidden) timer = setTimeout(refresh, INTERVAL);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
refresh();
