// A topic: its groups, its partitions and their load, its route as a picture, its settings, its messages.

import { charts } from "./charts.js";
import { dataPath, get, post, query, topicPath } from "./api.js";
import { count, field, h, link, moment, patch, rate, settingsTable, span, svg, table } from "./dom.js";
import { browse } from "./messages.js";

const REFRESH_MS = 3000;
const SLOTS = 1024, WIDE = 800, ROW = 26;

export async function topic(page, name) {
  page.title(name);
  const [info, may] = await Promise.all([get(topicPath(name)), get(query("/console/data/may", { topic: name }))]);
  const groups = h("div", {}, h("p", {}, ""));
  const parts = h("div", {}, h("p", {}, ""));
  page.show(h("h1", {}, name),
    h("div", { class: "row" },
      may.append && h("a", { class: "button", href: `#/topics/${encodeURIComponent(name)}/send` }, "Send a message"),
      info.delayed > 0 && (may.delayed ? link(`${count(info.delayed)} delayed`, "topics", name, "delayed") : h("span", {}, `${count(info.delayed)} delayed`))),
    h("h2", {}, "Groups"), groups, h("h2", {}, "Partitions"), parts);
  page.every(REFRESH_MS, async () => {
    const found = await get(query("/console/data/overview", { contains: name, sort: "name" }));
    const mine = found.topics.find((one) => one.name === name);
    if (page.current) patch(groups.firstChild, groupTable(name, mine ? mine.groups : []));
  });
  let before = null;
  let listed = [];
  if (may.bounds) {
    await page.every(REFRESH_MS, async () => {
      const now = performance.now();
      listed = await get(dataPath(name, "partitions"));
      if (page.current) patch(parts.firstChild, partitionTable(listed, before, now));
      before = { at: now, ends: new Map(listed.map((one) => [one.partition, one.end])) };
    });
  } else {
    parts.replaceChildren(h("p", { class: "soft" }, "Partitions and messages are shown to those who may consume."));
  }
  await routes(page, name, may, listed);
  charts(page, name);
  settings(page, info);
  if (may.bounds) await browse(page, name, listed);
}

function groupTable(topicName, groups) {
  return table("Groups", [
    ["Group", (one) => link(one.name, "topics", topicName, "groups", one.name), "name"], ["Mode", (one) => one.mode],
    ["Behind", (one) => count(one.lag), "n"], ["Oldest", (one) => span(one.lag ? one.age_ms : 0), "n"], ["Out", (one) => rate(one.out_per_s), "n"],
    ["Members", (one) => count(one.members), "n"], ["Dead letters", (one) => (one.dead ? link(count(one.dead), "topics", topicName, "groups", one.name, "dead") : "0"), "n"],
    ["Stopped", (one) => (one.stopped ? link(count(one.stopped), "topics", topicName, "groups", one.name, "stopped") : "0"), "n"],
  ], groups, "Nobody reads this topic.", true);
}

function partitionTable(partitions, before, now) {
  const moved = (one) => (before && before.ends.has(one.partition) ? ((one.end - before.ends.get(one.partition)) * 1000) / (now - before.at) : 0);
  return table("Partitions", [
    ["Partition", (one) => one.partition], ["Slots", (one) => `${one.first_slot}–${one.last_slot}`], ["Shard", (one) => one.shard],
    ["In", (one) => rate(moved(one)), "n"], ["Kept", (one) => count(one.messages), "n"], ["First offset", (one) => count(one.start), "n"],
    ["End", (one) => count(one.end), "n"], ["", (one) => one.sealed && h("span", { class: "tag soft" }, "sealed")],
  ], partitions, "There are none.", true);
}

function settings(page, info) {
  page.main.append(h("h2", {}, "Settings"), h("p", { class: "soft" }, `Created ${moment(info.created_at)}.`), settingsTable(info.settings));
}

// ---- the route ----

async function routes(page, name, may, partitions) {
  const [route, history, shards] = await Promise.all([get(topicPath(name, "route")), get(topicPath(name, "route", "history")), page.may.shards ? get("/api/v1/shards") : []]);
  if (!page.current) return;
  const newest = history.slice(-8);
  page.main.append(h("section", { "aria-label": "Route" }, h("h2", {}, "Route"), picture(newest),
    history.length > newest.length && h("p", { class: "soft" }, `The newest ${newest.length} of ${history.length} versions.`),
    route.change && h("p", { class: "warn" }, `A ${route.change} is under way.`),
    may.split && actions(page, name, route, partitions, shards.filter((one) => one.state === "open"))));
}

function picture(history) {
  const x = (slot) => 60 + ((WIDE - 70) * slot) / SLOTS;
  const rows = history.map((route, at) => [
    svg("text", { x: 4, y: at * ROW + 17 }, `v${route.version}`),
    route.ranges.map((one) => [
      svg("rect", { class: at === history.length - 1 ? "piece" : "old", x: x(one.first_slot) + 1, y: at * ROW + 3,
        width: Math.max(1, x(one.last_slot + 1) - x(one.first_slot) - 2), height: ROW - 6 }),
      x(one.last_slot + 1) - x(one.first_slot) > 24 && svg("text", { class: "inside", x: x(one.first_slot) + 6, y: at * ROW + 17 }, one.partition),
    ]),
  ]);
  const last = history[history.length - 1];
  const said = last.ranges.map((one) => `partition ${one.partition}: slots ${one.first_slot} to ${one.last_slot}`).join("; ");
  return svg("svg", { class: "route", viewBox: `0 0 ${WIDE} ${history.length * ROW + 4}`, role: "img", "aria-label": `Route, version ${last.version}: ${said}` }, rows);
}

function actions(page, name, route, partitions, shards) {
  const option = (one) => h("option", { value: one.partition }, `${one.partition} (slots ${one.first_slot}–${one.last_slot})`);
  const which = h("select", {}, route.ranges.map(option));
  const target = h("select", {}, h("option", { value: "" }, "the emptiest"), shards.map((one) => h("option", { value: one.name }, one.name)));
  const of = () => route.ranges.find((one) => String(one.partition) === which.value);
  const kept = (one) => count((partitions.find((p) => p.partition === one.partition) || {}).messages ?? 0);
  return h("form", { onsubmit: (event) => event.preventDefault() }, field("Partition", which),
    h("button", { class: "plain", onclick: () => split(page, name, of(), kept(of())) }, "Split …"),
    h("button", { class: "plain", onclick: () => merge(page, name, route, of()) }, "Merge with the next …"),
    shards.length > 1 && field("To shard", target),
    shards.length > 1 && h("button", { class: "plain", onclick: () => move(page, name, of(), target.value) }, "Move …"));
}

async function change(page, plan, name, step, wish, question, verb) {
  if (!(await page.ask(question, plan, verb))) return;
  await page.guard(async () => {
    const found = await post(topicPath(name, "route", step), wish);
    page.say(`Route of ${name}: version ${found.version}`);
    page.again();
  });
}

const READS_ON = "Nothing is lost or copied: what is stored stays, groups read it to its end, and ordered groups keep the order of every key.";

async function split(page, name, one, messages) {
  if (one.first_slot === one.last_slot) { page.say("One slot cannot be split: a key has one slot."); return; }
  const middle = Math.floor((one.first_slot + one.last_slot + 1) / 2);
  const plan = h("div", {}, h("p", {}, `Partition ${one.partition} (${messages} messages) takes no more messages. In its place two new ones do:`),
    h("ul", {}, h("li", {}, `slots ${one.first_slot}–${middle - 1}`), h("li", {}, `slots ${middle}–${one.last_slot}`)), h("p", {}, READS_ON));
  await change(page, plan, name, "split", { partition: one.partition }, `Split partition ${one.partition} of ${name}?`, "Split");
}

async function merge(page, name, route, one) {
  const next = route.ranges.find((other) => other.first_slot === one.last_slot + 1);
  if (!next) { page.say(`Partition ${one.partition} has the last slots: choose the one before it.`); return; }
  const plan = h("div", {}, h("p", {}, `Partitions ${one.partition} and ${next.partition} take no more messages. In their place a new one takes slots ${one.first_slot}–${next.last_slot}.`), h("p", {}, READS_ON));
  await change(page, plan, name, "merge", { one: one.partition, other: next.partition }, `Merge partitions ${one.partition} and ${next.partition} of ${name}?`, "Merge");
}

async function move(page, name, one, shard) {
  if (shard === (one.shard || "first")) { page.say(`Partition ${one.partition} is on shard ${shard} already.`); return; }
  const to = shard ? `shard ${shard}` : "the emptiest shard";
  const plan = h("div", {}, h("p", {}, `Partition ${one.partition} on shard ${one.shard || "first"} takes no more messages. A new one on ${to} takes slots ${one.first_slot}–${one.last_slot}.`), h("p", {}, READS_ON));
  await change(page, plan, name, "move", { partition: one.partition, shard: shard || null }, `Move partition ${one.partition} of ${name} to ${to}?`, "Move");
}

// ---- sending ----

export async function send(page, name) {
  page.title(`Send to ${name}`);
  const value = h("textarea", { rows: 8, name: "value" });
  const key = h("input", { name: "key" }), id = h("input", { name: "id" }), delay = h("input", { name: "delay", placeholder: "10m", size: 8 });
  const headers = h("textarea", { rows: 3, name: "headers" });
  const form = h("form", { class: "tall", onsubmit: (event) => {
    event.preventDefault();
    page.guard(async () => {
      const wish = { value: value.value };
      if (key.value) wish.key = key.value;
      if (id.value) wish.id = id.value;
      if (delay.value) wish.delay = delay.value;
      const lines = headers.value.split("\n").map((line) => line.trim()).filter(Boolean);
      if (lines.length) wish.headers = Object.fromEntries(lines.map((line) => { const at = (line + ":").indexOf(":"); return [line.slice(0, at).trim(), line.slice(at + 1).trim()]; }));
      const { receipts: [receipt] } = await post(topicPath(name, "messages"), { messages: [wish] });
      page.say(receipt.due ? `Stored until ${receipt.due}` : receipt.duplicate ? "A message with this id is there already." : `Stored: partition ${receipt.partition}, offset ${receipt.offset}`);
    });
  } }, field("Value", value), field("Key", key), field("Headers, a line each: name: value", headers), field("Id", id), field("Delay", delay), h("div", {}, h("button", {}, "Send")));
  page.show(h("h1", {}, "Send to ", link(name, "topics", name)), form);
}
