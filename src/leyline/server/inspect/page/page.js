// The page: which session, its turns as they come, and whether the server is there.

import { legend, total } from "./bar.js";
import { NeedsKey, Refused, Unreadable, follow, key } from "./data.js";
import { $, clock, count, el, some } from "./dom.js";
import { Panel } from "./panel.js";
import { Turn } from "./turn.js";

const FIRST = 50; // turns to begin with, and more at a time
const GONE = "Nothing is on record for this session: not used yet, dropped, or expired.";
const NO_EVENT = "The server says what this page can't read";
const PATIENCE_MS = [500, 1000, 2000, 5000, 10_000];

const turns = new Map(); // by number
const entries = new Map(); // of the list of sessions, by name
let session = named();
let last = FIRST;
let record = null;
let isGone = false; // the server has nothing of the session
let connection = new AbortController();

const panel = new Panel(
  $("turns"),
  (element) => turns.get(Number(element.closest(".turn").dataset.turn)).turn,
  () => session,
);

/** The session in the address, so that a reload shows it again. */
function named() {
  try {
    return decodeURIComponent(location.hash.slice(1)) || null;
  } catch {
    return null;
  }
}

function choose(name) {
  if (name === session) return;
  session = name;
  isGone = false;
  last = FIRST;
  empty();
  // At once: the server may be away.
  $("session-name").textContent = name;
  $("session-sum").textContent = "";
  for (const [each, item] of entries) mark(each, item);
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  connection.abort();
}

function empty() {
  turns.clear();
  record = null;
  panel.clear();
  $("turns").replaceChildren();
  $("older").hidden = true;
}

// -- what the server says -----------------------------------------------------------------------

const on = {
  sessions({ sessions, more }) {
    say("Live");
    $("sign-out").hidden = key.get() === null;
    if (session === null && sessions.length) choose(sessions[0].session);
    $("empty").hidden = sessions.length > 0 || session !== null;
    $("look").hidden = sessions.length === 0 && session === null;
    list(sessions);
    $("more-sessions").textContent = more ? `and ${count(more)} more` : "";
    $("session-name").textContent = session ?? "";
    const mine = sessions.find((each) => each.session === session);
    // A list cut short may lack a session that is there.
    const none = isGone ? GONE : more ? "Its sum is not listed." : "";
    $("session-sum").textContent = mine ? sum(mine) : none;
  },

  turns(found) {
    isGone = false;
    if (record !== null && record !== found.record) empty();
    record = found.record;
    for (const each of found.turns) put(each);
    while (turns.size > last) drop(Math.min(...turns.keys()));
    $("older").hidden = found.older === 0;
    const most = Math.max(1, ...[...turns.values()].map(({ turn }) => total(turn)));
    for (const each of turns.values()) each.scale(most);
    panel.refresh();
  },

  gone() {
    empty();
    isGone = true;
    $("session-sum").textContent = GONE;
  },

  alive() {},
};

function put(turn) {
  const known = turns.get(turn.number);
  if (known) {
    known.update(turn);
    return;
  }
  const made = new Turn(turn);
  turns.set(turn.number, made);
  // Newest first.
  const after = [...turns.keys()].filter((number) => number < turn.number);
  const next = after.length ? turns.get(Math.max(...after)).element : null;
  $("turns").insertBefore(made.element, next);
}

function drop(number) {
  turns.get(number).element.remove();
  turns.delete(number);
}

/** Show these sessions, in this order. An entry stays what it was, and where the focus was. */
function list(sessions) {
  const place = $("sessions");
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const names = new Set(sessions.map((each) => each.session));
  for (const [name, item] of entries) {
    if (names.has(name)) continue;
    item.remove();
    entries.delete(name);
  }
  sessions.forEach((each, at) => {
    const item = entry(each);
    if (place.children[at] !== item) place.insertBefore(item, place.children[at] ?? null);
  });
  // An element that is moved loses the focus.
  if (focused?.isConnected) focused.focus({ preventScroll: true });
}

function entry(each) {
  const item = entries.get(each.session) ?? newEntry(each.session);
  const about = `${some(each.turns, "turn")}, ${each.state}, ${clock(each.active)}`;
  item.querySelector("small").textContent = about;
  mark(each.session, item);
  return item;
}

function mark(name, item) {
  item.querySelector("button").setAttribute("aria-current", String(name === session));
}

function newEntry(name) {
  const button = el("button", { type: "button" }, el("bdi", { text: name }), el("small"));
  button.addEventListener("click", () => choose(name));
  const item = el("li", {}, button);
  entries.set(name, item);
  return item;
}

function sum({ turns: n, prompt, computed, prefix_cache_computed: plain }) {
  const asked = `${some(n, "turn")}: ${count(computed)} of ${some(prompt, "prompt token")} computed`;
  return `${asked}; a prefix cache would have computed ${count(plain)}.`;
}

// -- the connection -----------------------------------------------------------------------------

function say(text, gone = false) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("gone", gone);
}

async function connect() {
  let failures = 0;
  for (;;) {
    connection = new AbortController();
    const { signal } = connection;
    let trouble = "The server does not answer. What is here is what it last said; trying again …";
    let broken = null;
    try {
      await follow(session, last, signal, (name, data) => {
        failures = 0;
        if (signal.aborted) return;
        try {
          on[name]?.(data);
        } catch (error) {
          broken = error;
          throw error;
        }
      });
    } catch (error) {
      if (error === broken) return fault(error);
      if (signal.aborted) continue; // another session was chosen
      if (error instanceof NeedsKey) return askKey(error);
      if (error instanceof Refused) trouble = `The server refuses: ${error.message}`;
      if (error instanceof Unreadable) trouble = `${NO_EVENT} (${error.message}); trying again …`;
    }
    if (signal.aborted) continue;
    say(trouble, true);
    const wait = PATIENCE_MS[Math.min(failures++, PATIENCE_MS.length - 1)];
    await pause(wait, signal);
  }
}

/** Until so many milliseconds are over, or another session is chosen. */
function pause(wait, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, wait);
    const end = () => {
      clearTimeout(timer);
      resolve();
    };
    signal.addEventListener("abort", end, { once: true });
  });
}

/** A fault of this page's: no server can mend it. */
function fault(error) {
  console.error(error);
  say(`This page failed (${error.message}); please reload it, and report this.`, true);
}

function askKey(error) {
  const wrong = key.get() !== null;
  key.drop();
  empty();
  $("session-sum").textContent = "";
  for (const id of ["look", "empty", "sign-out"]) $(id).hidden = true;
  list([]);
  $("ask-key").hidden = false;
  $("key-wrong").textContent = wrong ? `That did not work: ${error.message}.` : "";
  say("A key is needed");
  $("key").focus();
}

$("ask-key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  $("ask-key").hidden = true;
  say("Connecting …");
  connect();
});

$("sign-out").addEventListener("click", () => {
  key.drop();
  location.reload();
});

$("older").addEventListener("click", () => {
  last += FIRST;
  connection.abort();
});

window.addEventListener("hashchange", () => {
  const name = named();
  if (name !== null) choose(name);
});

function explain() {
  const base = new URL("v1", document.baseURI).href;
  $("base-url").textContent = base;
  $("example").textContent = [
    `client = OpenAI(base_url=${JSON.stringify(base)}, api_key="…")`,
    "client.chat.completions.create(",
    "    model=…, messages=…,",
    '    extra_body={"leyline": {"session": "run-42"}},',
    ")",
  ].join("\n");
}

$("legend").append(...legend());
explain();
connect();
