// What the server says: the key, single answers, and the stream of changes.

const KEY = "leyline-key";
const SILENCE_MS = 30_000; // the server says something every 10 s

/** The server has a key, and what was sent is none. */
export class NeedsKey extends Error {}

/** The server refused, with its own sentence. */
export class Refused extends Error {}

/** The server says what is no event. */
export class Unreadable extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  drop: () => sessionStorage.removeItem(KEY),
};

/** One turn of a session with its texts. */
export async function turnWithTexts(session, number) {
  const answer = await ask("v1/leyline/turns", { session, turn: number, text: "short" });
  return (await answer.json()).turns[0];
}

/**
 * Calls `on(name, data)` for each event, until the stream ends or is aborted. session: null for the
 * list of sessions alone. last: how many turns to begin with.
 */
export async function follow(session, last, signal, on) {
  const silent = new AbortController();
  let timer = null;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silent.abort(), SILENCE_MS);
  };
  try {
    heard();
    const wanted = session === null ? {} : { session, last };
    const either = AbortSignal.any([signal, silent.signal]);
    const answer = await ask("v1/leyline/events", wanted, either);
    await read(answer.body, heard, on);
  } finally {
    clearTimeout(timer);
  }
}

async function read(body, heard, on) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const events = (waiting + value).split("\n\n");
      waiting = events.pop();
      for (const event of events) tell(event, on);
    }
  } catch (error) {
    // Else the server would go on telling a page that no longer listens.
    reader.cancel().catch(() => {});
    throw error;
  }
}

function tell(event, on) {
  let name = "message";
  let data = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  on(name, parsed(data));
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch (error) {
    throw new Unreadable(error.message);
  }
}

async function ask(path, parameters, signal) {
  const url = new URL(path, document.baseURI);
  url.search = new URLSearchParams(parameters);
  const known = key.get();
  const headers = known === null ? {} : { Authorization: `Bearer ${encodeKey(known)}` };
  const answer = await fetch(url, { headers, signal, cache: "no-store" });
  if (answer.ok) return answer;
  const sentence = await answer.json().then(
    (body) => body.error.message,
    () => `the server answered ${answer.status}`,
  );
  throw answer.status === 401 ? new NeedsKey(sentence) : new Refused(sentence);
}

/** Headers hold bytes, so other letters go as their UTF-8. */
function encodeKey(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}
