// Computes an arithmetic expression with its own parser; it never evaluates code.

const CHARS_MAX = 1_000;
const DEPTH_MAX = 100;
const TOKEN = /\s*(?:(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)|([a-z][a-z0-9]*)|(\*\*|[-+*/%^(),]))/iy;
const CONSTANTS = { pi: Math.PI, e: Math.E };
const FUNCTIONS = {
  sqrt: Math.sqrt, cbrt: Math.cbrt, abs: Math.abs, exp: Math.exp, ln: Math.log, log: Math.log10, log2: Math.log2,
  sin: Math.sin, cos: Math.cos, tan: Math.tan, asin: Math.asin, acos: Math.acos, atan: Math.atan,
  round: Math.round, floor: Math.floor, ceil: Math.ceil, min: Math.min, max: Math.max,
};

// Returns the number; throws an Error that says what is wrong.
export function calculate(expression) {
  const text = expression.trim();
  if (text.length > CHARS_MAX) throw new Error(`The expression has ${text.length} characters; ${CHARS_MAX} are taken.`);
  const parser = new Parser(tokensOf(text));
  const value = parser.sum(0);
  if (parser.next !== undefined) throw new Error(`"${parser.next}" is not expected there.`);
  if (!Number.isFinite(value)) throw new Error("The result is not a finite number.");
  return value;
}

function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.length) {
    const at = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (!match) throw new Error(`"${text.slice(at, at + 10)}" is no arithmetic.`);
    tokens.push(match[1] ?? match[2]?.toLowerCase() ?? match[3].replace("**", "^"));
  }
  return tokens;
}

class Parser {
  constructor(tokens) {
    this.tokens = tokens;
    this.at = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  take(token) {
    if (this.next !== token) return false;
    this.at += 1;
    return true;
  }

  expect(token) {
    if (!this.take(token)) throw new Error(`"${token}" is missing${this.next === undefined ? " at the end" : ` before "${this.next}"`}.`);
  }

  sum(depth) {
    if (depth > DEPTH_MAX) throw new Error(`The expression is nested deeper than ${DEPTH_MAX}.`);
    let value = this.product(depth);
    for (;;) {
      if (this.take("+")) value += this.product(depth);
      else if (this.take("-")) value -= this.product(depth);
      else return value;
    }
  }

  product(depth) {
    let value = this.sign(depth);
    for (;;) {
      if (this.take("*")) value *= this.sign(depth);
      else if (this.take("/")) value /= this.sign(depth);
      else if (this.take("%")) value %= this.sign(depth);
      else return value;
    }
  }

  // As in mathematics, -2^2 is -4.
  sign(depth) {
    if (depth > DEPTH_MAX) throw new Error(`The expression is nested deeper than ${DEPTH_MAX}.`);
    if (this.take("-")) return -this.sign(depth + 1);
    if (this.take("+")) return this.sign(depth + 1);
    const base = this.atom(depth);
    return this.take("^") ? base ** this.sign(depth + 1) : base;
  }

  atom(depth) {
    const token = this.next;
    this.at += 1;
    if (token === undefined) throw new Error("A number is missing at the end.");
    if (token === "(") {
      const value = this.sum(depth + 1);
      this.expect(")");
      return value;
    }
    if (/^[\d.]/.test(token)) return Number(token);
    if (Object.hasOwn(CONSTANTS, token)) return CONSTANTS[token];
    if (Object.hasOwn(FUNCTIONS, token)) return FUNCTIONS[token](...this.arguments(depth));
    throw new Error(`"${token}" is not known.`);
  }

  arguments(depth) {
    this.expect("(");
    const values = [this.sum(depth + 1)];
    while (this.take(",")) values.push(this.sum(depth + 1));
    this.expect(")");
    return values;
  }
}
