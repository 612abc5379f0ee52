// Makes the line with an answer's cached tokens and speed.

import { count, counted, seconds, speed } from "/dashboard/format.js";

const SOURCES = { slot: "in place", ram: "in memory", ssd: "on disk" };
const PACE_TOKENS = 8; // the speed of shorter answers is not shown,
const PACE_S = 0.1; // nor that of answers in less time

export function cacheLine({ usage, elapsed, firstAfter, servedBy }) {
  if (!usage) return "";
  const cache = usage.kv_cache;
  const parts = cache ? localParts(usage, cache) : cloudParts(usage, servedBy, firstAfter);
  const written = usage.completion_tokens ?? 0;
  const pace = written >= PACE_TOKENS && elapsed - firstAfter >= PACE_S ? (written - 1) / (elapsed - firstAfter) : null;
  parts.push(pace ? `${speed(pace)} tokens/s` : counted(written, "token", "tokens"));
  parts.push(draftPart(usage.speculation));
  return parts.filter(Boolean).join(" · ");
}

function localParts(usage, cache) {
  const kept = cache.prefix_length;
  const where = SOURCES[cache.source] ? ` ${SOURCES[cache.source]}` : "";
  const read = `read ${count(cache.prefilled)} of ${counted(usage.prompt_tokens, "token", "tokens")}`;
  return [
    kept ? `${read}, ${count(kept)} kept${where}` : `${read}, none kept before`,
    `first token ${seconds(cache.ttft_ms / 1000)}`,
  ];
}

function cloudParts(usage, servedBy, firstAfter) {
  return [
    servedBy ? `answered by ${servedBy}` : "",
    counted(usage.prompt_tokens ?? 0, "token read", "tokens read"),
    firstAfter ? `first token ${seconds(firstAfter)}` : "",
  ];
}

function draftPart(speculation) {
  const right = speculation?.accepted_prediction_tokens ?? 0;
  const drafted = right + (speculation?.rejected_prediction_tokens ?? 0);
  return drafted ? `${count(right)} of ${count(drafted)} drafted tokens right` : "";
}

// Returns why cached tokens had to be prefilled again; "" if none were lost.
export function lossLine(usage) {
  const loss = usage?.kv_cache?.divergence;
  if (!loss) return "";
  const rule = loss.rule ? `, ${loss.rule}` : "";
  const where = loss.message >= 0 ? ` at message ${loss.message + 1}` : "";
  return `${counted(loss.lost, "token was", "tokens were")} read again${where}: ${loss.cause}${rule}. ${loss.remedy ?? ""}`.trim();
}
