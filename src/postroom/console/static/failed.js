// What failed: dead letters, grouped by error, and messages that stopped their key.

import { dataPath, get, groupPath, post, query } from "./api.js";
import { count, h, link, moment, show, span, table, textOf } from "./dom.js";
import { content, details } from "./messages.js";

const PIECE = 500;
const MOST = 2000; // letters that a page lists

// ---- dead letters ----

export async function dead(page, topic, group) {
  page.title(`Dead letters of ${topic} / ${group}`);
  const may = await get(query("/console/data/may", { topic }));
  const list = h("div"), errors = h("div"), chosen = h("div", { "aria-live": "polite" }), progress = h("div", { "aria-live": "polite" });
  const state = { letters: [], next: null, picked: new Set(), error: null, now: 0, acting: false };
  const sums = { errors: new Map(), counted: 0, next: null, total: null };
  const spot = (one) => one.at.join(":");
  const path = (...rest) => dataPath(topic, "groups", group, "dead-letters", ...rest);

  // ---- what there is ----

  const load = async (more) => {
    const found = await get(query(path(), { after: more ? state.next : null, error: state.error }));
    state.letters = more ? [...state.letters, ...found.letters] : found.letters;
    state.next = found.next;
    state.now = found.now_ms;
    if (!more) state.picked.clear();
    if (page.current) draw();
  };

  const tally = async (more) => {
    const found = await get(query(path("errors"), { after: more ? sums.next : null }));
    if (!more) { sums.errors.clear(); sums.counted = 0; }
    for (const { error, letters, last } of found.errors) {
      const known = sums.errors.get(error) || { letters: 0, last: 0 };
      sums.errors.set(error, { letters: known.letters + letters, last: Math.max(known.last, last) });
    }
    sums.counted += found.counted;
    sums.next = found.next;
    sums.total = found.total;
    if (page.current) drawErrors();
  };

  const reload = () => page.guard(() => Promise.all([tally(false), load(false)]));

  // ---- what can be done ----

  const act = (verb, doing, done) => async (letters) => {
    const all = letters === null;
    const which = state.error === null ? "all dead letters" : `all dead letters with the error “${state.error}”`;
    const what = all ? which : letters.length === 1 ? `dead letter ${letters[0].id}` : `${count(letters.length)} dead letters`;
    const why = verb === "discard" ? "They are lost." : "They are handed to this group again, and to no other.";
    if ((all || verb === "discard" || letters.length > 1) &&
      !(await page.ask(`${doing} ${what} of ${topic} / ${group}?`, h("p", {}, why), doing))) return;
    if (state.acting) { page.say("Something is under way here already: let it end, or stop it."); return; }
    state.acting = true;
    let told = "";
    const stop = { asked: false };
    const tell = (total) => { told = `${done}: ${count(total)}`; };
    await page.guard(() => (all ? everything(verb, tell, stop) : some(verb, letters, tell, stop)));
    state.acting = false;
    if (!page.current) return;
    progress.replaceChildren();
    if (all && !stop.asked) state.error = null; // there are none of it any more
    if (told) page.say(stop.asked ? `${told}. Stopped: the others are as they were.` : told);
    await reload();
  };

  const some = async (verb, letters, tell, stop) => {
    let total = 0;
    for (let at = 0; at < letters.length && page.current && !stop.asked; at += PIECE) {
      meter(`${count(total)} of ${count(letters.length)}`, at, letters.length, stop);
      total += (await post(path(verb), { spots: letters.slice(at, at + PIECE).map((one) => one.at) })).done;
      tell(total);
    }
  };

  // Piece by piece, oldest first, and none that died after this began: whatever fails again is left alone.
  // What is done is done: whoever stops it, or goes away, may begin again with the rest.
  const everything = async (verb, tell, stop) => {
    const wish = { after: null, error: state.error, until_ms: state.now };
    const known = state.error === null ? sums.total : sums.next === null ? sums.errors.get(state.error)?.letters : null;
    let total = 0;
    tell(0);
    while (page.current && !stop.asked) {
      meter(known ? `${count(total)} of ${count(known)}` : `${count(total)} done`, total, known, stop);
      const found = await post(path(`${verb}-next`), wish);
      total += found.done;
      tell(total);
      if (found.next === null) return;
      wish.after = found.next;
    }
  };

  const meter = (text, done, of, stop) => {
    if (!progress.firstChild) {
      show(progress, h("div", { class: "row" }, h("p", {}, ""), h("button", { class: "plain", onclick: () => { stop.asked = true; } }, "Stop")),
        h("progress", { "aria-label": "Progress", max: of || null }));
    }
    progress.querySelector("p").textContent = `${text} …`;
    if (of) progress.querySelector("progress").value = Math.min(done, of);
  };

  const redrive = act("redrive", "Redrive", "Handed back"), discard = act("discard", "Discard", "Discarded");

  // ---- what is shown ----

  const open = (one) => {
    show(chosen, h("h2", { tabindex: "-1" }, `Dead letter ${one.id}`),
      h("div", { class: "row" }, may.redrive && h("button", { onclick: () => redrive([one]) }, "Redrive it"), may.discard && h("button", { class: "danger", onclick: () => discard([one]) }, "Discard it …")),
      h("div", { class: "side" },
        h("div", {}, details(one), content(one)),
        h("div", {}, h("h3", {}, "Reason"), h("pre", { tabindex: "0", "aria-label": "Reason" }, one.reason || "–"), one.traceback && h("h3", {}, "Traceback"), one.traceback && h("pre", { tabindex: "0", "aria-label": "Traceback" }, one.traceback))));
    chosen.firstChild.focus();
  };

  const pickError = (error) => { state.error = error; chosen.replaceChildren(); drawErrors(); page.guard(() => load(false)); };

  const drawErrors = () => {
    const rows = [...sums.errors].sort((a, b) => (a[0] === null) - (b[0] === null) || b[1].letters - a[1].letters);
    const partly = sums.next !== null;
    const said = `${count(sums.counted)}${partly ? ` oldest${sums.total === null ? "" : ` of ${count(sums.total)}`}` : ""} dead letters, by error`;
    show(errors, h("h2", {}, "By error"),
      table(said, [
        ["Letters", ([, one]) => count(one.letters), "n"], ["Error", ([error]) => error ?? "other errors", "name"], ["Last died", ([, one]) => moment(one.last)],
        ["", ([error]) => error !== null && (state.error === error
          ? h("button", { class: "plain", "aria-label": "Show all errors", onclick: () => pickError(null) }, "Show all")
          : h("button", { class: "plain", "aria-label": `Show those with ${error}`, onclick: () => pickError(error) }, "Show these"))],
      ], rows, "This group has no dead letters."),
      partly && h("div", { class: "row" }, h("button", { class: "plain", onclick: () => page.guard(() => tally(true)) }, "Count on")));
  };

  const draw = () => {
    const buttons = h("div", { class: "row" });
    const picked = () => state.letters.filter((one) => state.picked.has(spot(one)));
    const these = state.error === null ? "all" : "all of this error";
    const redraw = () => show(buttons,
      state.picked.size < state.letters.length && h("button", { class: "plain", onclick: () => pick(state.letters, true) }, `Choose ${count(state.letters.length)} shown`),
      may.redrive && state.picked.size > 0 && h("button", { onclick: () => redrive(picked()) }, `Redrive ${count(state.picked.size)} chosen`),
      may.discard && state.picked.size > 0 && h("button", { class: "danger", onclick: () => discard(picked()) }, `Discard ${count(state.picked.size)} chosen …`),
      may.redrive && h("button", { class: "plain", onclick: () => redrive(null) }, `Redrive ${these} …`),
      may.discard && h("button", { class: "plain", onclick: () => discard(null) }, `Discard ${these} …`));
    const pick = (letters, on) => { letters.forEach((one) => (on ? state.picked.add(spot(one)) : state.picked.delete(spot(one)))); draw(); };
    redraw();
    const more = state.next && state.letters.length < MOST;
    show(list,
      (state.letters.length > 0 || state.next) && h("h2", {}, state.error === null ? "Letters" : `Letters with the error “${state.error}”`),
      state.letters.length > 0 && buttons,
      state.letters.length > 0 && table(`${count(state.letters.length)} dead letters, the oldest first`, [
        ["", (one) => h("input", { type: "checkbox", "aria-label": `Choose ${one.id}`, checked: state.picked.has(spot(one)), onchange: (event) => pick([one], event.target.checked) })],
        ["Id", (one) => h("code", {}, one.id), "name"], ["Key", (one) => textOf(one.key) ?? "–", "name"], ["Died", (one) => moment(one.dead_at)], ["Attempts", (one) => count(one.attempts), "n"],
        ["Reason", (one) => one.reason.slice(0, 200), "name"], ["", (one) => h("button", { class: "plain", "aria-label": `Open ${one.id}`, onclick: () => open(one) }, "Open")],
      ], state.letters),
      more && h("button", { class: "plain", onclick: () => page.guard(() => load(true)) }, "Load more"));
  };

  page.show(h("h1", {}, "Dead letters of ", link(`${topic} / ${group}`, "topics", topic, "groups", group)), progress, errors, list, chosen);
  await Promise.all([tally(false), load(false)]);
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
