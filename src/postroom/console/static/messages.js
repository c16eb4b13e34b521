// Messages of a topic: found by offset, time or key, shown as text, JSON or hex.

import { dataPath, get, query } from "./api.js";
import { bytesOf, count, field, h, hexOf, moment, show, size, table, textOf } from "./dom.js";

const VIEWS = { text: "Text", json: "JSON", hex: "Hex" };

export function browse(page, topic, partitions) {
  const partition = h("select", {}, h("option", { value: "" }, "all"), partitions.map((one) => h("option", { value: one.partition }, one.partition)));
  const offset = h("input", { inputmode: "numeric", pattern: "[0-9]*", size: 10 });
  const at = h("input", { type: "datetime-local", step: 1 });
  const key = h("input", { maxlength: 1000 });
  const list = h("div", { "aria-live": "polite" });
  const chosen = h("div");
  const find = (goesOn) => page.guard(async () => {
    const wish = { partition: partition.value, offset: offset.value, key: key.value, at: at.value ? at.value + "Z" : "" };
    if (wish.key) wish.partition = wish.offset = "";
    const found = await get(query(dataPath(topic, "messages"), { ...wish, ...goesOn }));
    if (page.current) show(list, listed(found, find, (one) => open(page, topic, one, chosen)));
  });
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); find(); } },
    field("Partition", partition), field("From offset", offset), field("From time (UTC)", at), field("Key", key),
    h("button", {}, "Show"));
  page.main.append(h("section", { "aria-label": "Messages" }, h("h2", {}, "Messages"), form, list, chosen));
  return find();
}

function listed(found, find, open) {
  const rows = table(`${count(found.messages.length)} messages`, [
    ["Partition", (one) => one.partition], ["Offset", (one) => count(one.offset), "n"], ["Time", (one) => moment(one.timestamp)],
    ["Key", (one) => textOf(one.key) ?? "–", "name"], ["Size", (one) => size(one.bytes), "n"],
    ["Value", (one) => h("code", {}, textOf(one.value).slice(0, 120)), "name"],
    ["", (one) => h("button", { class: "plain", onclick: () => open(one), "aria-label": `Open ${one.partition}:${one.offset}` }, "Open")],
  ], found.messages, found.searched === undefined ? "There are no messages there." : `No message has that key, of ${count(found.searched)} read.`);
  return [rows, found.next && h("div", { class: "row" },
    h("span", {}, `${count(found.searched)} messages read.`),
    h("button", { class: "plain", onclick: () => find(found.next) }, "Search on"))];
}

async function open(page, topic, one, where) {
  await page.guard(async () => {
    const whole = one.cut ? await get(dataPath(topic, "messages", one.partition, one.at[0])) : one;
    if (!page.current) return;
    show(where, h("h2", { tabindex: "-1" }, `Message ${one.partition}:${one.offset}`), details(whole), content(whole));
    where.firstChild.focus();
  });
}

export function details(one) {
  const lines = [["Id", one.id], ["Time", moment(one.timestamp)], ["Key", textOf(one.key) ?? "–"], ["Size", size(one.bytes)],
    ...Object.entries(one.headers).map(([name, value]) => [`Header ${name}`, textOf(value)])];
  return table("Message", [["Field", ([name]) => name], ["Value", ([, value]) => h("code", {}, value), "name"]], lines, "", true);
}

// The value, and the ways to read it: JSON if it is some.
export function content(one) {
  const bytes = bytesOf(one.value);
  const pre = h("pre", { tabindex: "0", "aria-label": "Value" });
  const pick = h("select", { onchange: () => { pre.textContent = written(bytes, pick.value); } },
    Object.entries(VIEWS).map(([value, text]) => h("option", { value }, text)));
  pick.value = best(bytes);
  pre.textContent = written(bytes, pick.value);
  return h("div", {}, h("div", { class: "row" }, field("Value as", pick)), pre, one.cut && h("p", { class: "soft" }, `The first ${size(bytes.length)} of ${size(one.bytes)}.`));
}

function best(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.length > 65536 || !/^\s*[[{]/.test(text)) return "text";
    JSON.parse(text);
    return "json";
  } catch (error) {
    return error instanceof SyntaxError ? "text" : "hex";
  }
}

function written(bytes, view) {
  if (view === "hex") return hexOf(bytes);
  const text = new TextDecoder().decode(bytes);
  if (view === "text") return text.length > 1_000_000 ? text.slice(0, 1_000_000) + "…" : text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return `This is no JSON:\n${text}`;
  }
}
