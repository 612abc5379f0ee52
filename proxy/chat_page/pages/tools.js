// Offers the page's own tools, and tools that a developer pastes and answers by hand.

import { calculate } from "./calculate.js";

const TOOLS_MAX = 64;
const OWN = {
  current_time: {
    description: "Returns the date, the time and the time zone of the user.",
    parameters: { type: "object", properties: {}, additionalProperties: false },
    run: () => new Date().toLocaleString("en-GB", { dateStyle: "full", timeStyle: "long" }),
  },
  calculate: {
    description: "Computes an expression of arithmetic, for example (2 + 3) * sqrt(16) / 7 ^ 2.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string", description: "the expression" } },
      required: ["expression"],
      additionalProperties: false,
    },
    run: ({ expression }) => String(calculate(String(expression ?? ""))),
  },
};

// Returns the tools of a request, from the conversation's settings.
export function offered({ hasTools, toolText }) {
  const own = hasTools
    ? Object.entries(OWN).map(([name, { description, parameters }]) => ({
        type: "function",
        function: { name, description, parameters },
      }))
    : [];
  return [...own, ...pasted(toolText)];
}

// Returns the tools of a pasted text in OpenAI's form; throws an Error that says what is wrong.
export function pasted(text) {
  if (!text.trim()) return [];
  let rows;
  try {
    rows = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are no JSON: ${error.message}`);
  }
  rows = Array.isArray(rows) ? rows : [rows];
  if (rows.length > TOOLS_MAX) throw new Error(`There are ${rows.length} tools; ${TOOLS_MAX} are taken.`);
  return rows.map((row, index) => {
    const tool = row?.function ?? row;
    if (typeof tool?.name !== "string" || !tool.name) throw new Error(`Tool ${index + 1} has no name.`);
    return { type: "function", function: tool };
  });
}

export function isOwn(name, { hasTools }) {
  return hasTools && Object.hasOwn(OWN, name);
}

// Returns the result of a call of the page's own tools; an error's text is a result too.
export function run(name, argumentText) {
  try {
    return OWN[name].run(JSON.parse(argumentText || "{}"));
  } catch (error) {
    return `Error: ${error.message}`;
  }
}
