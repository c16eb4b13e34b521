// The overview, live: totals, what needs attention, topics with their groups.

import { charts } from "./charts.js";
import { count, h, link, patch, rate, span } from "./dom.js";
import { query } from "./api.js";

const SORTS = { attention: "what needs attention", name: "name", lag: "most behind", in: "most sent", dead: "most dead letters" };
const SAID = {
  stopped: (one) => [`${count(one.count)} stopped `, one.count === 1 ? "message holds its key" : "messages hold their keys"],
  dead: (one) => [`${count(one.count)} dead `, one.count === 1 ? "letter" : "letters"],
  paused: (one) => [`paused, ${count(one.count)} behind`],
  unread: (one) => [`nobody reads it, ${count(one.count)} behind`],
};
const WHERE = { stopped: ["stopped"], dead: ["dead"], paused: [], unread: [] };
const RUNBOOK = { stopped: "PostroomKeysStopped", dead: "PostroomDeadLettersGrowing", paused: "PostroomGroupLate", unread: "PostroomGroupAbandoned" };

export function overview(page) {
  page.title("Overview");
  const wish = { sort: "attention", contains: "", page: 0 };
  const body = h("div", {}, h("p", { class: "soft" }, "Measuring the queue …"));
  const search = h("input", { type: "search", maxlength: 120, oninput: () => change({ contains: search.value, page: 0 }) });
  const sort = h("select", { onchange: () => change({ sort: sort.value, page: 0 }) },
    Object.entries(SORTS).map(([value, text]) => h("option", { value }, text)));
  const form = h("form", { onsubmit: (event) => event.preventDefault() },
    h("label", {}, "Topics that contain", search), h("label", {}, "First", sort));
  page.show(h("h1", {}, "Overview"), body, form);
  const list = h("div", { onclick: turn }, h("p", {}, ""));
  page.main.append(list);
  if (page.may.rates) charts(page, null);
  let stop = () => {};
  let timer;

  function change(values) {
    Object.assign(wish, values);
    clearTimeout(timer);
    timer = setTimeout(listen, 150);
  }

  function turn(event) {
    const button = event.target.closest("button[data-page]");
    if (button) change({ page: Number(button.dataset.page) });
  }

  function listen() {
    stop();
    stop = page.stream(query("/console/data/live", wish), (found) => {
      patch(body.firstChild, summary(found));
      patch(list.firstChild, topics(found));
    });
  }

  listen();
  page.leaving(() => { clearTimeout(timer); stop(); });
}

function summary(found) {
  const t = found.totals;
  const card = (title, value, kind) => h("div", { class: "card" }, h("dt", {}, title), h("dd", { class: kind }, value));
  return h("div", {},
    found.stale && h("p", { class: "bad" }, "The store does not answer: these figures are old."),
    h("dl", { class: "cards" },
      card("Topics", count(t.topics)), card("Groups", count(t.groups)), card("In", rate(t.in_per_s)), card("Out", rate(t.out_per_s)),
      card("Behind", count(t.lag)), card("Oldest", span(t.age_ms)), card("Dead letters", count(t.dead), t.dead ? "bad" : ""),
      card("Stopped keys", count(t.stopped), t.stopped ? "bad" : ""), card("Delayed", count(t.delayed)),
      found.brokers.length > 0 && card("Brokers", count(found.brokers.length)),
      found.shards.length > 1 && card("Shards", found.shards.map((one) => one.name + (one.state === "open" ? "" : ` (${one.state})`)).join(", "))),
    h("h2", {}, "Needs attention"),
    found.attention.length === 0 ? h("p", { class: "good" }, "Nothing needs attention.")
      : h("ul", { class: "attention" }, found.attention.map((one) =>
        h("li", { class: one.kind === "stopped" || one.kind === "dead" ? "worst" : "" },
          link(`${one.topic} / ${one.group}`, "topics", one.topic, "groups", one.group, ...WHERE[one.kind]), ": ", SAID[one.kind](one), " ",
          h("a", { class: "soft", href: `#/runbooks/${RUNBOOK[one.kind]}` }, "What to do"))),
      found.more_attention > 0 && h("li", {}, `and ${count(found.more_attention)} more`)),
    h("h2", {}, "Topics and groups"));
}

function topics(found) {
  if (!found.topics.length) return h("p", { class: "soft" }, found.totals.topics ? "No topic is called so." : "There are no topics yet: postroom topic create NAME, or the first send, makes one.");
  const rows = found.topics.flatMap((topic) => {
    const groups = topic.groups.length ? topic.groups : [null];
    return groups.map((group, at) => h("tr", {},
      h("td", { class: "name" }, at === 0 && link(topic.name, "topics", topic.name)),
      h("td", { class: "n wide" }, at === 0 && rate(topic.in_per_s)),
      h("td", { class: "n wide" }, at === 0 && count(topic.messages)),
      group ? groupCells(topic, group) : h("td", { colspan: 7, class: "soft" }, "nobody reads it")));
  });
  const head = ["Topic", "In", "Kept", "Group", "Behind", "Oldest", "Out", "Members", "Dead letters", "Stopped"];
  const wide = new Set(["In", "Kept", "Out", "Members"]);
  return h("div", {},
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Topics and groups" },
      h("table", {}, h("caption", {}, `${count(found.found)} topics`),
        h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col", class: (["Topic", "Group"].includes(one) ? "" : "n") + (wide.has(one) ? " wide" : "") }, one)))),
        h("tbody", {}, rows))),
    found.pages > 1 && h("div", { class: "row" },
      h("button", { class: "plain", disabled: found.page === 0, "data-page": found.page - 1 }, "Previous"),
      h("span", {}, `Page ${found.page + 1} of ${found.pages}`),
      h("button", { class: "plain", disabled: found.page + 1 >= found.pages, "data-page": found.page + 1 }, "Next")));
}

function groupCells(topic, group) {
  const at = ["topics", topic.name, "groups", group.name];
  return [
    h("td", { class: "name" }, link(group.name, ...at), group.paused && h("span", { class: "tag warn" }, "paused")),
    h("td", { class: "n" }, count(group.lag)),
    h("td", { class: "n" }, span(group.lag ? group.age_ms : 0)),
    h("td", { class: "n wide" }, rate(group.out_per_s)),
    h("td", { class: "n wide" }, count(group.members)),
    h("td", { class: "n" }, group.dead ? link(count(group.dead), ...at, "dead") : "0"),
    h("td", { class: "n" }, group.stopped ? link(count(group.stopped), ...at, "stopped") : "0"),
  ];
}
