// What is due later: delayed messages of a topic, where there are some, and recurring schedules.

import { dataPath, get, query, remove, topicPath } from "./api.js";
import { count, h, link, moment, show, size, span, table, textOf } from "./dom.js";
import { content, details } from "./messages.js";

const REFRESH_MS = 5000;

// ---- delayed messages ----

export async function delayedTopics(page) {
  page.title("Delayed messages");
  const list = h("div");
  page.show(h("h1", {}, "Delayed messages"), list,
    h("p", { class: "soft" }, "A retry that is near waits in its group. One further away than 15 minutes waits in the group's own topic, and is listed here."));
  const found = (await get("/api/v1/topics?internal=true")).filter((one) => one.delayed > 0);
  found.sort((one, other) => other.delayed - one.delayed);
  if (page.current) show(list, table("Topics with delayed messages", [
    ["Topic", (one) => link(one.name, "topics", one.name, "delayed"), "name"], ["Delayed", (one) => count(one.delayed), "n"],
    ["What they are", (one) => (one.name.endsWith(".retry") ? "retries of a group" : "sent with a delay")],
  ], found, "No delayed messages wait."));
}

export async function delayed(page, topic) {
  page.title(`Delayed messages of ${topic}`);
  const may = await get(query("/console/data/may", { topic }));
  const list = h("div"), chosen = h("div", { "aria-live": "polite" });
  const state = { messages: [], next: null, now: 0 };
  page.show(h("h1", {}, "Delayed messages of ", link(topic, "topics", topic)), list, chosen);

  const load = async (more) => {
    const found = await get(query(dataPath(topic, "delayed"), { after: more ? state.next : null }));
    state.messages = more ? [...state.messages, ...found.messages] : found.messages;
    state.next = found.next;
    state.now = found.now_ms;
    if (page.current) draw();
  };

  const cancel = async (one) => {
    const what = h("p", {}, `It is due ${moment(one.due_ms)}, and will never be delivered then. All that wait under this id are taken back.`);
    if (!(await page.ask(`Cancel message ${one.id} of ${topic}?`, what, "Cancel the message"))) return;
    await page.guard(async () => {
      const { cancelled } = await remove(topicPath(topic, "delayed", one.id));
      page.say(cancelled ? `Message ${one.id} was cancelled` : `Message ${one.id} does not wait any more: it was delivered, or cancelled before`);
    });
    if (page.current) chosen.replaceChildren();
    await page.guard(() => load(false));
  };

  const open = (one) => {
    show(chosen, h("h2", { tabindex: "-1" }, `Message ${one.id}`), h("p", {}, `Due ${moment(one.due_ms)}.`), details(one), content(one));
    chosen.firstChild.focus();
  };

  const draw = () => show(list,
    h("p", {}, `${count(state.messages.length)} messages, the soonest first${state.next ? "; there are more" : ""}.`),
    table(`Delayed messages of ${topic}`, [
      ["Due", (one) => moment(one.due_ms)], ["In", (one) => (one.due_ms > state.now ? span(one.due_ms - state.now) : "overdue"), "n"],
      ["Id", (one) => one.id, "name"], ["Key", (one) => textOf(one.key) ?? "–", "name"], ["Size", (one) => size(one.bytes), "n"],
      ["", (one) => h("span", { class: "row" },
        h("button", { class: "plain", "aria-label": `Open ${one.id}`, onclick: () => open(one) }, "Open"),
        may.cancel && h("button", { class: "danger", "aria-label": `Cancel ${one.id}`, onclick: () => cancel(one) }, "Cancel …"))],
    ], state.messages, "No delayed messages wait in this topic."),
    h("div", { class: "row" }, h("button", { class: "plain", onclick: () => page.guard(() => load(false)) }, "Load again"),
      state.next && h("button", { class: "plain", onclick: () => page.guard(() => load(true)) }, "Load more")));
  await load(false);
}

// ---- schedules ----

export async function schedules(page) {
  page.title("Schedules");
  const list = h("div");
  page.show(h("h1", {}, "Schedules"), list,
    h("p", { class: "soft" }, "Functions that a program runs again and again. One that is gone from the program stays here until its topic is deleted."));
  const state = (one) => (one.dead ? `${count(one.dead)} runs failed` : !one.workers.length ? "nobody runs it" : one.missed ? "missed a tick" : "ok");
  await page.every(REFRESH_MS, async () => {
    const found = await get("/api/v1/schedules");
    if (page.current) show(list, table("Recurring schedules", [
      ["Schedule", (one) => link(one.name, "topics", one.topic), "name"], ["Rule", (one) => `${one.rule || "?"} ${one.timezone}`.trim(), "name"],
      ["Next runs", (one) => (one.next_ms.length ? one.next_ms.map((at) => h("div", {}, moment(at))) : "?")], ["Last run", (one) => moment(one.last_ms)],
      ["Run by", (one) => one.workers.join(", ") || "–", "name"], ["Not done", (one) => count(one.pending), "n"],
      ["State", (one) => h("span", { class: state(one) === "ok" ? "" : "warn" }, one.dead ? link(state(one), "topics", one.topic, "groups", "every", "dead") : state(one))],
    ], found, "There are no recurring schedules: a program declares one with @app.every."));
  });
}
