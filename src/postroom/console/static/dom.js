// Elements made of text: nothing that comes from a queue is ever read as HTML.

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  return fill(made, attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return fill(made, attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else made.setAttribute(name, String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    made.append(child instanceof Node ? child : String(child));
  }
  return made;
}

// Changes what is there as little as needed: whoever reads, selects or tabs is not disturbed.
export function patch(there, wanted) {
  if (there.nodeType !== wanted.nodeType || there.nodeName !== wanted.nodeName) {
    there.replaceWith(wanted);
    return;
  }
  if (there.nodeType === Node.TEXT_NODE) {
    if (there.data !== wanted.data) there.data = wanted.data;
    return;
  }
  for (const { name } of [...there.attributes]) if (!wanted.hasAttribute(name)) there.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (there.getAttribute(name) !== value) there.setAttribute(name, value);
  const mine = [...there.childNodes], theirs = [...wanted.childNodes];
  theirs.forEach((child, at) => (at < mine.length ? patch(mine[at], child) : there.append(child)));
  mine.slice(theirs.length).forEach((child) => child.remove());
}

export function show(where, ...children) {
  where.replaceChildren(...children.flat(Infinity).filter(Boolean));
}

// A caption that says no more than the heading above it is for those who cannot see.
export function table(caption, columns, rows, none = "There are none.", headed = false) {
  if (!rows.length) return h("p", { class: "soft" }, none);
  const head = columns.map(([title, , kind]) => (title ? h("th", { scope: "col", class: kind }, title) : h("td", {})));
  const body = rows.map((row) => h("tr", {}, columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row)))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: headed && "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

export function link(text, ...parts) {
  return h("a", { href: "#/" + parts.map(encodeURIComponent).join("/") }, text);
}

export function field(title, input) {
  return h("label", {}, title, input);
}

// ---- numbers and times ----

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function rate(value) {
  if (!value) return "0/s";
  return (value < 10 ? value.toFixed(1) : count(value)) + "/s";
}

export function span(ms) {
  if (!ms) return "–";
  if (ms < 1000) return `${ms < 10 && !Number.isInteger(ms) ? ms.toFixed(1) : Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 3600) return two(s / 60, "min", (s % 60), "s");
  if (s < 86400) return two(s / 3600, "h", (s % 3600) / 60, "min");
  return two(s / 86400, "d", (s % 86400) / 3600, "h");
}

function two(most, unit, rest, part) {
  return `${Math.floor(most)} ${unit}` + (Math.floor(rest) ? ` ${Math.floor(rest)} ${part}` : "");
}

// Settings as people say them: units are in their names.
export function settingsTable(settings) {
  const lines = Object.entries(settings).map(([name, value]) => [name.replace(/_ms$/, "").replaceAll("_", " "), worded(name, value)]);
  return table("Settings", [["Setting", ([name]) => name], ["Value", ([, value]) => value, "name"]], lines, "There are none.", true);
}

function worded(name, value) {
  if (value === null || (Array.isArray(value) && !value.length)) return "none";
  if (Array.isArray(value)) return value.map((one) => worded("", one)).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([part, one]) => `${part.replace(/_ms$/, "").replaceAll("_", " ")} ${worded(part, one)}`).join(", ");
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (name.endsWith("_ms")) return value ? span(value) : "0";
  if (name.endsWith("bytes")) return value ? size(value) : "0";
  return value.toLocaleString("en-US");
}

export function size(bytes) {
  if (bytes < 1024) return `${bytes} bytes`;
  if (bytes < 1024 * 1024) return `${(bytes / 1024).toFixed(1)} kB`;
  return `${(bytes / 1024 / 1024).toFixed(1)} MB`;
}

export function moment(ms) {
  if (!ms) return "–";
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) return String(ms);
  return at.toISOString().replace("T", " ").replace(/\.\d+Z$/, "Z");
}

// ---- bytes ----

export function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
}

export function textOf(base64) {
  if (base64 === null || base64 === undefined) return null;
  const bytes = bytesOf(base64);
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return "0x" + [...bytes.slice(0, 64)].map((one) => one.toString(16).padStart(2, "0")).join("") + (bytes.length > 64 ? "…" : "");
  }
}

export function hexOf(bytes) {
  const lines = [];
  for (let at = 0; at < Math.min(bytes.length, 65536); at += 16) {
    const part = [...bytes.slice(at, at + 16)];
    const hex = part.map((one) => one.toString(16).padStart(2, "0")).join(" ");
    const text = part.map((one) => (one > 31 && one < 127 ? String.fromCharCode(one) : ".")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${hex.padEnd(47)}  ${text}`);
  }
  if (bytes.length > 65536) lines.push("…");
  return lines.join("\n");
}
