// One turn: a line of facts, its bar, and the same as a table.

import { KINDS, bar, pieces, total } from "./bar.js";
import { clock, count, el, range, seconds, some } from "./dom.js";

/** A turn on the page. */
export class Turn {
  constructor(turn) {
    this.head = el("div", { class: "turn-head" });
    this.facts = el("div", { class: "facts" });
    this.place = el("div", { class: "bar-place" });
    this.table = el("div", { class: "scroll" });
    this.details = el("details", {}, el("summary", { text: "As a table" }), this.table);
    this.element = el("li", { class: "turn new" }, this.head, this.place, this.facts, this.details);
    this.shape = "";
    this.update(turn);
  }

  /** Show what has changed. The bar stays as it is, with the focus, where its shape is the same. */
  update(turn) {
    this.turn = turn;
    this.element.dataset.turn = turn.number;
    this.head.replaceChildren(...head(turn));
    this.facts.replaceChildren(...facts(turn));
    const shape = JSON.stringify([turn.parts, turn.evicted, turn.messages, turn.wiped]);
    this.details.hidden = turn.parts.length === 0;
    if (shape === this.shape || turn.report === null) return;
    this.shape = shape;
    const focused = [...this.place.querySelectorAll(".cell")].indexOf(document.activeElement);
    this.bar = bar(turn);
    this.place.replaceChildren(this.bar);
    if (focused >= 0) this.bar.querySelectorAll(".cell")[focused]?.focus();
    this.table.replaceChildren(table(turn));
  }

  /** most: tokens of the longest bar, which takes the whole width. */
  scale(most) {
    if (this.bar) this.bar.style.width = `${(100 * total(this.turn)) / most}%`;
  }
}

function head(turn) {
  const state = turn.state === "done" ? `done: ${turn.reason}` : turn.state;
  return [
    el("h3", { text: `Turn ${turn.number}` }),
    el("span", { class: "dim", text: `${clock(turn.began)}, ${turn.endpoint}` }),
    el("span", { class: "badge", text: state }),
    el("span", { class: "dim", text: `${some(turn.generated, "token")} generated` }),
    turn.wiped ? el("span", { class: "badge", text: "text forgotten" }) : "",
  ];
}

function facts(turn) {
  const lines = [];
  if (turn.report !== null) {
    lines.push(el("p", { class: "tokens", text: tokens(turn) }));
    lines.push(el("p", { class: "cost", text: cost(turn) }));
  }
  if (turn.fallback !== null) {
    const { reason, why } = turn.fallback;
    lines.push(el("p", { class: "warn fallback", text: `Fallback, ${reason}: ${why}` }));
  }
  if (turn.state === "failed") {
    const what = turn.error ?? "its message is not kept.";
    lines.push(el("p", { class: "warn", text: `Failed, ${turn.reason}: ${what}` }));
  }
  for (const each of turn.report?.policy ?? []) {
    const freed = `${some(each.tokens, "token")} freed`;
    const done = [
      [each.tool_uses, "tool result"],
      [each.thinking_turns, "thought"],
      [each.messages, "message"],
    ];
    const what = done.filter(([n]) => n).map(([n, thing]) => some(n, thing));
    lines.push(
      el("p", { class: "dim", text: `Policy ${each.name}: ${[...what, freed].join(", ")}` }),
    );
  }
  return lines;
}

function tokens(turn) {
  const { prompt, shared, moved, computed } = turn.report.tokens;
  const gone = turn.evicted.reduce((sum, each) => sum + each.tokens, 0);
  const kept = turn.report.copied ? "copied" : "moved";
  const all = [`shared ${count(shared)}`, `${kept} ${count(moved)}`];
  all.push(`computed ${count(computed)}`);
  if (turn.repaired) all.push(`of these repaired ${count(turn.repaired)}`);
  if (gone) all.push(`evicted ${count(gone)}`);
  return `Prompt of ${some(prompt, "token")}: ${all.join(", ")}`;
}

function cost(turn) {
  const waited =
    turn.ttft_s === null ? "No token yet" : `First token after ${seconds(turn.ttft_s)}`;
  const { computed } = turn.report.tokens;
  const ended = turn.ttft_s === null && turn.whole_s !== null;
  const begun = ended ? `No token, over after ${seconds(turn.whole_s)}` : waited;
  const plain = `a prefix cache would have computed ${count(turn.prefix_cache_computed)}`;
  return `${begun}, with ${some(computed, "token")} of the prompt computed; ${plain}`;
}

function table(turn) {
  const heads = ["what", "tokens", "where", "came from"];
  const top = el("tr", {}, ...heads.map((text) => el("th", { scope: "col", text })));
  const rows = pieces(turn).map((piece) => {
    const gone = piece.kind === "evicted";
    const source = piece.cells[0]?.source ?? null;
    return el(
      "tr",
      {},
      el("td", { text: KINDS[piece.kind][1] }),
      el("td", { class: "number", text: count(piece.tokens) }),
      el("td", { text: `${range(piece.start, piece.tokens)}${gone ? " before" : ""}` }),
      el("td", { text: source === null ? "" : `token ${count(source)} on` }),
    );
  });
  return el("table", {}, el("thead", {}, top), el("tbody", {}, ...rows));
}
