// Elements and numbers. All text goes through textContent: what comes from a session is never markup.

/** An element with attributes (`class`, `text`, others as they are called) and children. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const $ = (id) => document.getElementById(id);

const format = new Intl.NumberFormat("en");

/** A count, with thousands apart. */
export const count = (n) => format.format(n);

/** `n thing` or `n things`. */
export const some = (n, thing) => `${count(n)} ${thing}${n === 1 ? "" : "s"}`;

/** Seconds, to about three digits. */
export function seconds(s) {
  if (s < 0.001) return "under 1 ms";
  return s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
}

/** The positions of `n` tokens from `start` on, the last one included. */
export const range = (start, n) =>
  n === 1 ? `token ${count(start)}` : `tokens ${count(start)} to ${count(start + n - 1)}`;

/** Unix time as the time of day here. */
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString();
