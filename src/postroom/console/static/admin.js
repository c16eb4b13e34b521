// For administrators: who changed what, who may do what; and for whoever is woken: what to do.

import { get, query } from "./api.js";
import { field, h, link, moment, show, table } from "./dom.js";
import { RUNBOOKS } from "./runbooks.js";

const AT_ONCE = 100;

export async function audit(page) {
  page.title("Audit log");
  const list = h("div"), more = h("div");
  const topic = h("input", { name: "topic" }), by = h("input", { name: "by" });
  let entries = [], older = false; // whether more than the newest are shown: then nothing moves by itself
  const fetched = (before) => get(query("/api/v1/audit-log", { topic: topic.value.trim(), by: by.value.trim(), limit: AT_ONCE, before }));
  const draw = (full) => {
    show(list, table("Administrative actions, the newest first", [
      ["When", (one) => moment(one.at)], ["Who", (one) => one.who, "name"], ["From", (one) => `${one.door}, ${one.address}`],
      ["Action", (one) => one.action], ["Of", subject, "name"], ["Change", change, "name"],
      ["Outcome", (one) => (one.outcome === "begun" ? "not finished" : one.outcome)],
    ], entries, topic.value || by.value ? "Nobody did anything of that." : "Nobody has changed anything yet."));
    show(more, full && h("button", { class: "plain", onclick: () => page.guard(further) }, "Load more"));
  };
  const load = async () => {
    if (older) return;
    const found = await fetched();
    if (page.current && !older) { entries = found; draw(found.length === AT_ONCE); }
  };
  const further = async () => {
    const found = await fetched(entries[entries.length - 1].id);
    if (page.current) { older = true; entries = entries.concat(found); draw(found.length === AT_ONCE); }
  };
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); older = false; page.guard(load); } },
    field("Topic", topic), field("Who", by), h("button", {}, "Show"));
  page.show(h("h1", {}, "Audit log"), form, list, more);
  await page.every(5000, load);
}

function subject(one) {
  if (one.topic && one.group) return `${one.topic} / ${one.group}`;
  return one.topic || one.group || "the queue";
}

const text = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

function change(one) {
  if (!one.before || !one.after) {
    const told = { ...one.asked, ...(one.before || one.after || {}) };
    return Object.entries(told).map(([name, value]) => h("div", {}, `${name}: ${text(value)}`));
  }
  return Object.keys({ ...one.before, ...one.after }).map((name) => h("div", {}, `${name}: ${text(one.before[name])} → ${text(one.after[name])}`));
}

export async function access(page) {
  page.title("Access");
  const list = h("div");
  const load = async () => {
    const found = await get("/api/v1/principals");
    if (page.current) show(list, table("Principals", [
      ["Name", (one) => one.name, "name"], ["May", (one) => (one.permissions.length ? one.permissions.join(", ") : "do nothing"), "name"],
      ["Comes with", (one) => (one.token ? "a token" : "a client certificate")], ["Since", (one) => moment(one.created_at)],
    ], found, "There are no principals: only programs on the database itself use this queue."));
  };
  page.show(h("h1", {}, "Access"), list,
    h("p", { class: "soft" }, "Permissions and tokens are changed on the queue's database, so that nobody can lock everybody out: ",
      h("code", {}, "postroom access add NAME --allow send:orders"), ", ", h("code", {}, "access grant"), ", ", h("code", {}, "access revoke"), ", ",
      h("code", {}, "access rotate"), ". What was changed is in the ", link("audit log", "audit"), "."));
  await page.every(5000, load);
}

export function runbooks(page, alert) {
  const shown = Object.keys(RUNBOOKS).filter((name) => !alert || name === alert);
  page.title(alert && shown.length ? alert : "What to do");
  page.show(h("h1", {}, "What to do"),
    alert && h("p", {}, link("All runbooks", "runbooks")),
    shown.length ? shown.map((name) => h("section", { "aria-label": name }, h("h2", {}, name), h("p", {}, RUNBOOKS[name][0]),
      h("ol", {}, RUNBOOKS[name].slice(1).map((line) => h("li", {}, line))))) : h("p", {}, "There is no such alert."));
}
