// What failed: dead letters, grouped by error, and messages that stopped their key.

import { dataPath, get, groupPath, post, query } from "./api.js";
import { count, h, link, moment, show, span, table, textOf } from "./dom.js";
import { content, details } from "./messages.js";

const PIECE = 100;

// ---- dead letters ----

export async function dead(page, topic, group) {
  page.title(`Dead letters of ${topic} / ${group}`);
  const may = await get(query("/console/data/may", { topic }));
  const list = h("div"), chosen = h("div", { "aria-live": "polite" }), progress = h("div", { "aria-live": "polite" });
  const state = { letters: [], next: null, picked: new Set(), error: null };
  const spot = (one) => one.at.join(":");
  const heading = h("h1", {}, "Dead letters of ", link(`${topic} / ${group}`, "topics", topic, "groups", group));

  const load = async (more) => {
    const found = await get(query(dataPath(topic, "groups", group, "dead-letters"), { after: more ? state.next : null }));
    state.letters = more ? [...state.letters, ...found.letters] : found.letters;
    state.next = found.next && found.letters.length ? found.next : null;
    if (!more) state.picked.clear();
    if (page.current) draw();
  };

  const act = (verb, doing, done) => async (letters, all) => {
    const what = all ? "all dead letters" : letters.length === 1 ? `dead letter ${letters[0].id}` : `${count(letters.length)} dead letters`;
    const why = verb === "discard" ? "They are lost." : "They are handed to this group again, and to no other.";
    if ((all || verb === "discard" || letters.length > 1) &&
      !(await page.ask(`${doing} ${what} of ${topic} / ${group}?`, h("p", {}, why), doing))) return;
    await page.guard(async () => {
      const total = all ? await everything(verb) : await some(verb, letters);
      page.say(`${done}: ${count(total)}`);
    });
    progress.replaceChildren();
    await page.guard(() => load(false));
  };

  const some = async (verb, letters) => {
    let total = 0;
    for (let at = 0; at < letters.length && page.current; at += PIECE) {
      meter(total, letters.length);
      total += (await post(dataPath(topic, "groups", group, "dead-letters", verb), { spots: letters.slice(at, at + PIECE).map((one) => one.at) })).done;
    }
    return total;
  };

  // Piece by piece, oldest first, and none that died after this began: whatever fails again is left alone.
  const everything = async (verb) => {
    const began = Math.max(0, ...state.letters.map((one) => one.dead_at), Date.now());
    let total = 0, after = null, stopped = false;
    const stop = h("button", { class: "plain", onclick: () => { stopped = true; } }, "Stop");
    while (page.current && !stopped) {
      const found = await get(query(dataPath(topic, "groups", group, "dead-letters"), { after, limit: PIECE }));
      const mine = found.letters.filter((one) => one.dead_at <= began);
      if (!found.next || (!found.letters.length)) break;
      after = found.next;
      if (mine.length) total += (await post(dataPath(topic, "groups", group, "dead-letters", verb), { spots: mine.map((one) => one.at) })).done;
      show(progress, h("p", {}, `${count(total)} done … `, stop), h("progress", { "aria-label": "Progress" }));
    }
    return total;
  };

  const meter = (done, of) => show(progress, h("p", {}, `${count(done)} of ${count(of)} …`), h("progress", { max: of, value: done, "aria-label": "Progress" }));
  const redrive = act("redrive", "Redrive", "Handed back"), discard = act("discard", "Discard", "Discarded");

  const open = (one) => {
    show(chosen, h("h2", { tabindex: "-1" }, `Dead letter ${one.id}`),
      h("div", { class: "row" }, may.redrive && h("button", { onclick: () => redrive([one]) }, "Redrive it"), may.discard && h("button", { class: "danger", onclick: () => discard([one]) }, "Discard it …")),
      h("div", { class: "side" },
        h("div", {}, details(one), content(one)),
        h("div", {}, h("h3", {}, "Reason"), h("pre", { tabindex: "0", "aria-label": "Reason" }, one.reason || "–"), one.traceback && h("h3", {}, "Traceback"), one.traceback && h("pre", { tabindex: "0", "aria-label": "Traceback" }, one.traceback))));
    chosen.firstChild.focus();
  };

  const draw = () => {
    const errors = new Map();
    for (const one of state.letters) errors.set(one.error, [...(errors.get(one.error) || []), one]);
    const shown = state.error === null ? state.letters : errors.get(state.error) || [];
    const picked = () => state.letters.filter((one) => state.picked.has(spot(one)));
    const buttons = h("div", { class: "row" });
    const redraw = () => show(buttons, 
      may.redrive && state.picked.size > 0 && h("button", { onclick: () => redrive(picked()) }, `Redrive ${count(state.picked.size)} chosen`),
      may.discard && state.picked.size > 0 && h("button", { class: "danger", onclick: () => discard(picked()) }, `Discard ${count(state.picked.size)} chosen …`),
      may.redrive && state.letters.length > 0 && h("button", { class: "plain", onclick: () => redrive([], true) }, "Redrive all …"),
      may.discard && state.letters.length > 0 && h("button", { class: "plain", onclick: () => discard([], true) }, "Discard all …"));
    const pick = (letters, on) => { letters.forEach((one) => (on ? state.picked.add(spot(one)) : state.picked.delete(spot(one)))); draw(); };
    redraw();
    show(list,
      h("h2", {}, "By error"),
      table(`${count(state.letters.length)}${state.next ? " of the" : ""} dead letters, by error`, [
        ["Letters", ([, those]) => count(those.length), "n"], ["Error", ([error]) => error || "–", "name"], ["Last died", ([, those]) => moment(Math.max(...those.map((one) => one.dead_at)))],
        ["", ([error, those]) => h("button", { class: "plain", onclick: () => { state.error = state.error === error ? null : error; draw(); } }, state.error === error ? "Show all" : "Show these")],
        ["", ([, those]) => h("button", { class: "plain", onclick: () => pick(those, true) }, "Choose these")],
      ], [...errors].sort((a, b) => b[1].length - a[1].length), "This group has no dead letters."),
      state.letters.length > 0 && h("h2", {}, "Letters"), buttons,
      state.letters.length > 0 && table("Dead letters, the oldest first", [
        ["", (one) => h("input", { type: "checkbox", "aria-label": `Choose ${one.id}`, checked: state.picked.has(spot(one)), onchange: (event) => pick([one], event.target.checked) })],
        ["Id", (one) => h("code", {}, one.id), "name"], ["Key", (one) => textOf(one.key) ?? "–", "name"], ["Died", (one) => moment(one.dead_at)], ["Attempts", (one) => count(one.attempts), "n"],
        ["Reason", (one) => one.reason.slice(0, 200), "name"], ["", (one) => h("button", { class: "plain", "aria-label": `Open ${one.id}`, onclick: () => open(one) }, "Open")],
      ], shown.slice(0, 500)),
      state.next && state.letters.length < 2000 && h("button", { class: "plain", onclick: () => page.guard(() => load(true)) }, "Load more"));
  };

  page.show(heading, progress, list, chosen);
  await load(false);
}

// ---- what stopped ----

export async function stopped(page, topic, group) {
  page.title(`Stopped keys of ${topic} / ${group}`);
  const may = await get(query("/console/data/may", { topic }));
  const list = h("div"), chosen = h("div", { "aria-live": "polite" });

  const load = async () => {
    const found = await get(query(groupPath(topic, group, "stopped"), { limit: 200 }));
    if (page.current) show(list, table(`${count(found.length)} stopped messages, the longest first`, [
      ["Key", (one) => one.key ?? "–", "name"], ["Partition", (one) => one.partition, "n"], ["Offset", (one) => count(one.offset), "n"],
      ["Stopped for", (one) => span(Date.now() - one.since), "n"], ["Behind it", (one) => count(one.behind) + (one.more_behind ? "+" : ""), "n"],
      ["Attempts", (one) => count(one.attempts), "n"], ["Reason", (one) => one.reason.slice(0, 300), "name"],
      ["", (one) => h("button", { class: "plain", "aria-label": `Open ${one.id}`, onclick: () => open(one) }, "Open")],
    ], found, "No key is stopped."));
  };

  const act = async (one, verb, question, why, done) => {
    if (question && !(await page.ask(question, h("p", {}, why), verb[0].toUpperCase() + verb.slice(1)))) return;
    await page.guard(async () => {
      await post(groupPath(topic, group, "stopped", verb), { ids: [one.id] });
      page.say(done);
      chosen.replaceChildren();
    });
    await page.guard(load);
  };

  const open = (one) => {
    const named = `message ${one.id} (key ${one.key ?? "–"})`;
    show(chosen, h("h2", { tabindex: "-1" }, `Stopped: ${one.id}`),
      h("div", { class: "row" },
        may.restart_stopped && h("button", { onclick: () => act(one, "restart", "", "", "It is handled again, with all its attempts") }, "Restart it"),
        may.skip_stopped && h("button", { class: "plain", onclick: () => act(one, "skip", `Skip ${named}?`, "It goes to the dead letters, and its key goes on without it.", "It is a dead letter now; its key goes on") }, "Skip it …"),
        may.drop_stopped && h("button", { class: "danger", onclick: () => act(one, "drop", `Drop ${named}?`, "This group never sees it again, and its key goes on.", "It was dropped; its key goes on") }, "Drop it …")),
      h("div", { class: "side" },
        h("div", {}, h("h3", {}, "Value"), h("pre", { tabindex: "0", "aria-label": "Value" }, one.value ?? `base64: ${one.value_b64.slice(0, 10000)}`)),
        h("div", {}, h("h3", {}, "Reason"), h("pre", { tabindex: "0", "aria-label": "Reason" }, one.reason || "–"))));
    chosen.firstChild.focus();
  };

  page.show(h("h1", {}, "Stopped keys of ", link(`${topic} / ${group}`, "topics", topic, "groups", group)), list, chosen);
  await load();
}
