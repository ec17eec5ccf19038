// A turn's prompt as a bar: pieces by kind, in them a cell for each message.

import { count, el, range, some } from "./dom.js";

/** Kinds in the order of the legend: letter, word, what it means. */
export const KINDS = {
  shared: ["S", "shared", "cached, used as it lay"],
  moved: ["M", "moved", "cached, moved to a new position"],
  copied: ["Y", "copied", "the same, copied as it is used elsewhere"],
  repaired: ["R", "repaired", "computed again behind an edit"],
  computed: ["C", "computed", "not cached"],
  evicted: ["E", "evicted", "was in the context before this turn"],
};

const FINEST = 300; // narrower cells than this part of a bar can't be seen

/** Tokens that a turn's bar stands for: its prompt and what was evicted. */
export function total(turn) {
  const tokens = (list) => list.reduce((sum, each) => sum + each.tokens, 0);
  return tokens(turn.parts) + tokens(turn.evicted);
}

/**
 * A turn's pieces in order: {kind, start, tokens, cells}. A cell: {kind, start, tokens, source,
 * messages: indexes into turn.messages, evicted: index into turn.evicted or null}.
 */
export function pieces(turn) {
  const found = [];
  const least = total(turn) / FINEST;
  const gone = turn.evicted.map((each, index) => ({ ...each, index })).sort((a, b) => a.at - b.at);
  const evict = (upTo) => {
    while (gone.length && gone[0].at <= upTo) found.push(evictedPiece(gone.shift()));
  };
  for (const part of turn.parts) {
    let { start } = part;
    const end = part.start + part.tokens;
    while (start < end) {
      evict(start);
      const next = gone.length ? Math.min(end, gone[0].at) : end;
      found.push(promptPiece(turn, part, start, next, least));
      start = next;
    }
  }
  evict(Infinity);
  return found;
}

function evictedPiece({ start, tokens, index }) {
  const cell = { kind: "evicted", start, tokens, source: null, messages: [], evicted: index };
  return { kind: "evicted", start, tokens, cells: [cell] };
}

function promptPiece(turn, part, start, end, least) {
  const cells = [];
  turn.messages.forEach((message, index) => {
    const from = Math.max(start, message.start);
    const to = Math.min(end, message.start + message.tokens);
    if (from >= to) return;
    const last = cells.at(-1);
    if (last && last.tokens < least) {
      last.tokens += to - from;
      last.messages.push(index);
      return;
    }
    const source = part.source === null ? null : part.source + from - part.start;
    const tokens = to - from;
    cells.push({ kind: part.kind, start: from, tokens, source, messages: [index], evicted: null });
  });
  return { kind: part.kind, start, tokens: end - start, cells };
}

/** Who wrote a message of a turn, for people. */
export function who(message) {
  if (message.index !== null) return `message ${message.index + 1}, ${message.role}`;
  return message.role ? "the opening of the answer" : "the prompt";
}

/** A cell in one line. */
export function describe(turn, cell) {
  const kind = KINDS[cell.kind][1];
  if (cell.evicted !== null) {
    const { mode, replacement_tokens: replacement } = turn.evicted[cell.evicted];
    const instead = replacement ? `replaced by ${some(replacement, "token")}` : "replaced by nothing";
    const what = `${kind}: ${some(cell.tokens, "token")}, ${range(cell.start, cell.tokens)} before`;
    return `${what}; ${instead}; ${mode}`;
  }
  const names = cell.messages.map((index) => who(turn.messages[index]));
  const named = names.length > 2 ? `${names[0]} to ${names.at(-1)}` : names.join(" and ");
  const from = cell.source === null ? "" : ` from ${count(cell.source)} on`;
  return `${named}: ${some(cell.tokens, "token")} ${kind}${from}, ${range(cell.start, cell.tokens)}`;
}

/** The bar's element. Its cells are buttons, one of which can be reached with Tab. */
export function bar(turn) {
  const label = `Prompt of turn ${turn.number}: ${some(turn.report.tokens.prompt, "token")}`;
  const made = el("div", { class: "bar", role: "toolbar", "aria-label": label });
  for (const piece of pieces(turn)) {
    const [letter] = KINDS[piece.kind];
    const box = el("span", { class: `piece ${piece.kind}`, "data-tokens": piece.tokens });
    box.style.flexGrow = piece.tokens;
    for (const cell of piece.cells) {
      const button = el("button", { class: "cell", type: "button", tabindex: -1 });
      button.setAttribute("aria-label", describe(turn, cell));
      button.style.flexGrow = cell.tokens;
      button.cell = cell;
      box.append(button);
    }
    box.append(el("span", { class: "letter", "aria-hidden": "true", text: letter }));
    made.append(box);
  }
  made.querySelector(".cell")?.setAttribute("tabindex", 0);
  return made;
}

/** The legend's entries. */
export function legend() {
  return Object.entries(KINDS).map(([kind, [letter, word, meaning]]) => {
    const mark = el("span", { class: "letter", text: letter });
    const swatch = el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }, mark);
    const name = el("strong", { text: word });
    return el("li", {}, swatch, el("span", {}, name, `: ${meaning}`));
  });
}
