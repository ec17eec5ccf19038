// What a cell of a bar stands for: shown on hover, tap and focus; pinned by a click.

import { describe, who } from "./bar.js";
import { turnWithTexts } from "./data.js";
import { $, el, some } from "./dom.js";

/** The panel at the bottom of the page. turnOf: the turn of a bar's element, as it is now. */
export class Panel {
  constructor(list, turnOf, sessionOf) {
    this.turnOf = turnOf;
    this.sessionOf = sessionOf;
    this.active = null;
    this.number = null; // of the turn that is shown
    this.pinned = false;
    this.closing = false;
    this.texts = new Map();
    list.addEventListener("pointerover", (event) => this.point(event));
    list.addEventListener("focusin", (event) => this.show(event.target.closest(".cell"), true));
    list.addEventListener("click", (event) => this.click(event));
    list.addEventListener("keydown", (event) => this.walk(event));
    $("panel-before").addEventListener("click", () => this.step(-1));
    $("panel-after").addEventListener("click", () => this.step(1));
    $("panel-close").addEventListener("click", () => this.close());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  /** Forget all texts: another session, or one that began anew. */
  clear() {
    this.texts.clear();
    this.close();
  }

  close() {
    const cell = this.active;
    const within = $("panel").contains(document.activeElement);
    cell?.classList.remove("active");
    this.active = null;
    this.pinned = false;
    $("panel").hidden = true;
    $("panel-texts").replaceChildren();
    if (within) this.back(cell);
  }

  /** The focus, which would be lost with the panel, to where it came from: not to show it again. */
  back(cell) {
    const bar = document.querySelector(`.turn[data-turn="${this.number}"] .cell[tabindex="0"]`);
    this.closing = true;
    (cell?.isConnected ? cell : bar)?.focus();
    this.closing = false;
  }

  /** The turns changed. A bar that did was made anew: what it said may have to be forgotten. */
  refresh() {
    if (this.active !== null && !this.active.isConnected) this.close();
  }

  point(event) {
    const cell = event.target.closest(".cell");
    if (cell !== null && event.pointerType === "mouse" && !this.pinned) this.show(cell, false);
  }

  /** By keyboard, on to the text: with Tab it would be behind all older turns. */
  click(event) {
    const cell = event.target.closest(".cell");
    this.show(cell, true);
    if (cell !== null && event.detail === 0) $("panel-texts").focus();
  }

  show(button, pin) {
    if (button === null || this.closing) return;
    this.active?.classList.remove("active");
    this.active = button;
    this.pinned = pin;
    button.classList.add("active");
    for (const each of button.closest(".bar").querySelectorAll(".cell")) each.tabIndex = -1;
    button.tabIndex = 0;
    const turn = this.turnOf(button);
    this.number = turn.number;
    $("panel").hidden = false;
    if (pin) button.scrollIntoView({ block: "nearest" }); // out from behind the panel
    $("panel-title").textContent = `Turn ${turn.number}`;
    $("panel-what").textContent = describe(turn, button.cell);
    this.tell(button, turn);
  }

  /** The texts of a cell, asked for once for all of its turn. */
  async tell(button, turn) {
    const place = $("panel-texts");
    const id = `${turn.number} ${turn.wiped}`;
    if (turn.wiped) this.texts.delete(`${turn.number} false`);
    if (!this.texts.has(id)) {
      this.texts.set(id, turnWithTexts(this.sessionOf(), turn.number));
      place.replaceChildren(el("p", { class: "dim", text: "Asking for the text …" }));
    }
    try {
      const whole = await this.texts.get(id);
      if (this.active === button) place.replaceChildren(...texts(whole, button.cell));
    } catch (error) {
      this.texts.delete(id);
      const what = `The text is not to be had: ${error.message}`;
      if (this.active === button) place.replaceChildren(el("p", { class: "warn", text: what }));
    }
  }

  step(by) {
    if (this.active === null) return;
    const cells = [...this.active.closest(".bar").querySelectorAll(".cell")];
    this.show(cells[cells.indexOf(this.active) + by] ?? this.active, true);
  }

  /** Arrow keys: along the bar, and to the bars above and below. */
  walk(event) {
    const button = event.target.closest(".cell");
    if (button === null) return;
    const cells = [...button.closest(".bar").querySelectorAll(".cell")];
    const at = cells.indexOf(button);
    const goal = {
      ArrowRight: () => cells[at + 1],
      ArrowLeft: () => cells[at - 1],
      Home: () => cells[0],
      End: () => cells.at(-1),
      ArrowUp: () => beside(button, -1),
      ArrowDown: () => beside(button, 1),
    }[event.key];
    if (goal === undefined) return;
    event.preventDefault();
    goal()?.focus();
  }
}

/** The cell below (1) or above (-1), nearest to the middle of this one. */
function beside(button, by) {
  const bars = [...document.querySelectorAll("#turns .bar")];
  const bar = bars[bars.indexOf(button.closest(".bar")) + by];
  const middle = (each) => {
    const box = each.getBoundingClientRect();
    return box.left + box.width / 2;
  };
  const away = (each) => Math.abs(middle(each) - middle(button));
  const cells = [...(bar?.querySelectorAll(".cell") ?? [])];
  return cells.sort((a, b) => away(a) - away(b))[0];
}

function texts(turn, cell) {
  if (cell.evicted !== null) {
    const { text, mode } = turn.evicted[cell.evicted];
    const why = mode === "forget" ? "It was to be forgotten" : "Its text is not kept";
    return [text === null ? note(`${why}.`) : el("pre", { text })];
  }
  return cell.messages.flatMap((index) => {
    const message = turn.messages[index];
    const title = `${who(message)}: ${some(message.tokens, "token")} in all`;
    const body =
      message.text === null
        ? note("Its text was forgotten: a later turn asked for that.")
        : el("pre", { text: message.text });
    return [el("p", { class: "dim", text: title }), body];
  });
}

const note = (text) => el("p", { class: "dim", text });
