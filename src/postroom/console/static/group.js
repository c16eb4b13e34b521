// A group: how far it is behind, who reads it, and what can be done to it.

import { get, groupPath, post, query, topicPath } from "./api.js";
import { count, field, h, link, moment, patch, rate, settingsTable, span, table } from "./dom.js";

const REFRESH_MS = 2000;

export async function group(page, topic, name) {
  page.title(`${topic} / ${name}`);
  const may = await get(query("/console/data/may", { topic }));
  const state = h("div", {}, h("p", {}, "…"));
  let info = null;
  const refresh = async () => {
    const [groups, lag] = await Promise.all([get(topicPath(topic, "groups")), get(groupPath(topic, name, "lag"))]);
    info = groups.find((one) => one.name === name);
    if (!info || !page.current) return;
    const policy = info.settings.slow_lane;
    const lanes = policy && (policy.failures || policy.handling_ms) ? await get(groupPath(topic, name, "lanes")) : null;
    if (page.current) patch(state.firstChild, shown(info, lag, members(groups, name), lanes));
    if (page.current && pause) pause.textContent = info.paused ? "Resume" : "Pause";
  };
  const pause = may.pause && h("button", { class: "plain", onclick: () => page.guard(async () => {
    const found = await post(groupPath(topic, name, info && info.paused ? "resume" : "pause"));
    page.say(`Group ${name} of ${topic} is ${found.paused ? "paused: nothing more is handed out" : "resumed"}`);
    await refresh();
  }) }, "Pause");
  page.show(h("h1", {}, link(topic, "topics", topic), ` / ${name}`),
    h("div", { class: "row" }, pause,
      may.dead_letters && link("Dead letters", "topics", topic, "groups", name, "dead"),
      may.stopped && link("Stopped keys", "topics", topic, "groups", name, "stopped")),
    state, may.reset && reset(page, topic, name, refresh));
  await page.every(REFRESH_MS, refresh);
}

function firstWait(t) {
  if (t.first_wait_p50_ms === null) return span(t.first_wait_ms);
  return `${span(t.first_wait_p50_ms)}; 95 in 100 up to ${span(t.first_wait_p95_ms)}`;
}

function members(groups, name) {
  return groups.filter((one) => one.name === name || one.name.startsWith(`${name}@`)).flatMap((one) => one.members);
}

function shown(info, lag, live, lanes) {
  const t = lag.total;
  const card = (title, value, kind) => h("div", { class: "card" }, h("dt", {}, title), h("dd", { class: kind }, value));
  return h("div", {},
    h("dl", { class: "cards" },
      card("State", info.paused ? "paused" : live.length ? "in use" : "nobody reads it", info.paused ? "warn" : ""), card("Mode", info.settings.mode),
      card("Behind", count(t.messages)), card("Oldest", span(t.oldest_age_ms)), card("Unsettled", count(t.unsettled)),
      card("First wait", firstWait(t)), card("In", rate(t.arrival_per_s)), card("Out", rate(t.drain_per_s)),
      card("Caught up in", t.messages === 0 ? "–" : t.drain_eta_s === null ? "not at this rate" : span(t.drain_eta_s * 1000)),
      card("Stopped keys", count(t.stopped), t.stopped ? "bad" : "")),
    h("h2", {}, "Partitions"),
    table("Behind by partition", [
      ["Topic", (one) => one.topic, "name"], ["Partition", (one) => one.partition], ["Behind", (one) => count(one.messages), "n"],
      ["Oldest", (one) => span(one.oldest_age_ms), "n"], ["Unsettled", (one) => count(one.unsettled), "n"], ["Settled below", (one) => count(one.committed), "n"],
      ["End", (one) => count(one.end), "n"], ["Held by", (one) => one.holder || "–", "name"],
      ["Waits for", (one) => (one.waits_for.length ? one.waits_for.join(", ") : "–")],
    ], [...lag.partitions].sort((one, other) => (one.topic < other.topic ? -1 : one.topic > other.topic ? 1 : one.partition - other.partition))),
    h("h2", {}, "Members"),
    table("Members", [["Member", (one) => one.name, "name"], ["Client", (one) => one.client, "name"], ["Since", (one) => moment(one.joined_at)],
      ["Holds", (one) => lag.partitions.filter((part) => part.holder === one.name).map((part) => part.partition).join(", ") || "–"]], live, "Nobody reads it now.", true),
    lanes && h("div", {}, h("h2", {}, "Slow lane"), h("p", {}, `${count(lanes.waiting)} messages are in the lane.`),
      table("Slow sources", [["Source", (one) => one.source, "name"], ["Slow since", (one) => moment(one.since)], ["Last failed", (one) => moment(one.failed_at)], ["Why", (one) => one.reason, "name"]],
        lanes.sources, "No source is slow.")),
    h("h2", {}, "Settings"),
    settingsTable(info.settings));
}

// ---- reset: the preview first ----

function reset(page, topic, name, refresh) {
  const to = h("select", { onchange: () => { at.disabled = to.value !== "time"; } },
    [["yesterday", "yesterday, at this time"], ["earliest", "the earliest message kept"], ["latest", "the end: skip what is there"], ["time", "a moment"]].map(([value, text]) => h("option", { value }, text)));
  const at = h("input", { type: "datetime-local", step: 1, disabled: true });
  const plan = h("div", { "aria-live": "polite" });
  const where = () => (to.value === "yesterday" ? new Date(Date.now() - 86400000).toISOString() : to.value === "time" ? `${at.value}Z` : to.value);
  const preview = () => page.guard(async () => {
    const wanted = where();
    const found = await post(groupPath(topic, name, "reset"), { to: wanted, dry_run: true, force: true });
    if (page.current) plan.replaceChildren(planned(page, topic, name, wanted, found, refresh, plan));
  });
  return h("section", { "aria-label": "Reset" }, h("h2", {}, "Move the group"),
    h("form", { onsubmit: (event) => { event.preventDefault(); preview(); } },
      field("To", to), field("Moment (UTC)", at), h("button", { class: "plain" }, "Preview")), plan);
}

function planned(page, topic, name, to, found, refresh, where) {
  const again = found.partitions.reduce((sum, one) => sum + one.again, 0);
  const skipped = found.partitions.reduce((sum, one) => sum + one.skipped, 0);
  const said = `${count(again)} messages are delivered once more, ${count(skipped)} are passed over.`;
  const act = async () => {
    const live = found.members.length;
    const details = h("p", {}, said, live > 0 && ` ${count(live)} members are at work: what they have in hand is delivered again.`);
    if (!(await page.ask(`Move group ${name} of ${topic}?`, details, "Move the group"))) return;
    await page.guard(async () => {
      await post(groupPath(topic, name, "reset"), { to, force: live > 0 });
      page.say(`Group ${name} was moved. ${said}`);
      where.replaceChildren();
      await refresh();
    });
  };
  return h("div", {}, h("p", {}, said),
    table("What a reset would do", [["Partition", (one) => one.partition], ["Now", (one) => count(one.before), "n"], ["Then", (one) => count(one.after), "n"],
      ["Once more", (one) => count(one.again), "n"], ["Passed over", (one) => count(one.skipped), "n"]], found.partitions),
    h("div", { class: "row" }, h("button", { class: "danger", onclick: act }, "Move the group …")));
}
