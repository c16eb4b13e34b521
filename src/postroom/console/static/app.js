// The page itself: who one is, which page is shown, what was done, and whether the broker answers.

import { access, audit, runbooks } from "./admin.js";
import { begin, Failure, get, post } from "./api.js";
import { h, show } from "./dom.js";
import { dead, stopped } from "./failed.js";
import { group } from "./group.js";
import { delayed, delayedTopics, schedules } from "./later.js";
import { overview } from "./overview.js";
import { rates, shards } from "./queue.js";
import { send, topic } from "./topic.js";

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const who = document.getElementById("who");
const banner = document.getElementById("banner");
const toasts = document.getElementById("toasts");

const PAGES = [
  [/^$/, overview],
  [/^topics\/\*$/, topic],
  [/^topics\/\*\/send$/, send],
  [/^topics\/\*\/delayed$/, delayed],
  [/^delayed$/, delayedTopics],
  [/^schedules$/, schedules],
  [/^topics\/\*\/groups\/\*$/, group],
  [/^topics\/\*\/groups\/\*\/dead$/, dead],
  [/^topics\/\*\/groups\/\*\/stopped$/, stopped],
  [/^rates$/, rates],
  [/^shards$/, shards],
  [/^access$/, access],
  [/^audit$/, audit],
  [/^runbooks(\/\w+)?$/, runbooks],
];
const LINKS = [
  ["Overview", "#/", () => true],
  ["Delayed", "#/delayed", () => true],
  ["Schedules", "#/schedules", () => true],
  ["Rates and limits", "#/rates", (may) => may.rates],
  ["Shards and brokers", "#/shards", (may) => may.shards],
  ["Access", "#/access", (may) => may.principals],
  ["Audit log", "#/audit", (may) => may.audit_log],
];

let session = null;
let leaving = [];
let seen = 0; // of pages: what an old one fetched is not shown on the next

class Page {
  constructor() {
    this.number = ++seen;
    this.main = h("div"); // of its own: what is late for one page is not seen on the next
    this.may = session.may;
    this.session = session;
  }

  get current() { return this.number === seen; }

  title(text) { document.title = `${text} · Postroom`; }

  show(...children) {
    show(this.main, ...children);
    if (this.current && this.main.parentNode !== main) main.replaceChildren(this.main);
  }

  leaving(act) { if (this.current) leaving.push(act); else act(); }

  // Do something now and every so often, while this page is shown and somebody can see it.
  every(ms, act) {
    let timer, ended = false;
    const run = async () => {
      if (!document.hidden) await this.guard(act, true);
      if (!ended && this.current) timer = setTimeout(run, ms);
    };
    this.leaving(() => { ended = true; clearTimeout(timer); });
    return run();
  }

  // Do something, and say what went wrong.
  async guard(act, quiet = false) {
    try {
      return await act();
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      if (this.current && error.status !== 401 && !(quiet && error.code === "gone")) say(error.message, "bad");
      return undefined;
    }
  }

  stream(path, act) {
    let source, timer, ended = false;
    const open = () => {
      source = new EventSource(path);
      source.onmessage = (event) => { gone(false); if (this.current) act(JSON.parse(event.data)); };
      source.onerror = () => {
        if (source.readyState !== EventSource.CLOSED) { timer ||= setTimeout(check, 3000); return; }
        if (!ended) check();
      };
      source.onopen = () => { clearTimeout(timer); timer = undefined; gone(false); };
    };
    const check = async () => { // an event source does not say why it failed
      timer = undefined;
      source.close();
      try { await get("/console/session"); } catch { /* it was said */ }
      if (!ended && this.current) setTimeout(() => { if (!ended && this.current) open(); }, 2000);
    };
    open();
    return () => { ended = true; clearTimeout(timer); source.close(); };
  }

  say(text) { say(text, "good"); }

  go(...parts) { location.hash = "#/" + parts.map(encodeURIComponent).join("/"); }

  again() { route(); }

  ask(question, details, verb) { return ask(question, details, verb); }
}

function say(text, kind) {
  const toast = h("div", { class: `toast ${kind}` }, text);
  toasts.append(toast);
  while (toasts.children.length > 4) toasts.firstChild.remove();
  setTimeout(() => toast.remove(), kind === "bad" ? 15000 : 6000);
}

function gone(isGone) {
  banner.hidden = !isGone;
  const text = isGone ? "The broker does not answer. This page goes on by itself once it is back." : "";
  if (banner.textContent !== text) banner.textContent = text;
}

// What destroys asks, and names the thing.
function ask(question, details, verb) {
  return new Promise((done) => {
    const dialog = h("dialog", { "aria-labelledby": "question" },
      h("h2", { id: "question" }, question), details,
      h("div", { class: "row" },
        h("button", { class: "danger", onclick: () => close(true) }, verb),
        h("button", { class: "plain", onclick: () => close(false) }, "Cancel")));
    const close = (answer) => { dialog.close(); dialog.remove(); done(answer); };
    dialog.addEventListener("cancel", () => close(false));
    document.body.append(dialog);
    dialog.showModal();
    dialog.querySelector("button.plain").focus();
  });
}

// ---- log-in ----

function logIn(said = "") {
  leave();
  session = null;
  show(nav);
  show(who);
  document.title = "Log in · Postroom";
  const token = h("input", { type: "password", name: "token", autocomplete: "off", required: true, size: 50 });
  const problem = h("p", { class: "bad", role: "alert" }, said);
  const form = h("form", { class: "tall", onsubmit: async (event) => {
    event.preventDefault();
    problem.textContent = "";
    try {
      await post("/console/login", { token: token.value.trim() });
      await start();
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      problem.textContent = error.message;
    }
  } }, h("label", {}, "Token", token), h("div", {}, h("button", {}, "Log in")), problem);
  show(main, h("h1", {}, "Log in"), form,
    h("p", { class: "soft" }, "The first start of postroom serve shows the token of admin; postroom access add NAME --allow … makes others."));
  token.focus();
}

async function logOut() {
  try { await post("/console/logout"); } catch { /* then it ends by itself */ }
  logIn();
}

async function start() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key) {
    history.replaceState(null, "", "/console#/");
    try { await post("/console/login", { token: key }); } catch { /* used before: there may be a session */ }
  }
  try {
    session = await get("/console/session");
  } catch (error) {
    if (error.status === 401) logIn();
    else { gone(true); setTimeout(start, 2000); }
    return;
  }
  begin(session.csrf, () => { if (session) logIn("Your log-in has ended."); }, gone);
  show(who, h("span", { class: "soft" }, session.principal), " ",
    session.logged_in && h("button", { class: "plain", onclick: logOut }, "Log out"));
  route();
}

// ---- pages ----

function leave() {
  seen++;
  const acts = leaving;
  leaving = [];
  acts.forEach((act) => act());
}

function route() {
  if (!session) return;
  leave();
  const path = location.hash.replace(/^#\/?/, "");
  let parts;
  try { parts = path.split("/").filter(Boolean).map(decodeURIComponent); } catch { parts = ["?"]; }
  show(nav, LINKS.filter(([, , allowed]) => allowed(session.may)).map(([text, href]) =>
    h("a", { href, "aria-current": "#/" + parts.join("/") === href && "page" }, text)));
  const page = new Page();
  const shape = parts.map((one, at) => (at % 2 && parts[0] === "topics" ? "*" : one)).join("/");
  const names = parts.filter((_, at) => at % 2);
  const found = PAGES.find(([pattern]) => pattern.test(shape));
  if (!found) {
    page.title("Not found");
    page.show(h("h1", {}, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "Overview")));
  } else {
    page.guard(async () => found[1](page, ...names));
  }
  main.focus({ preventScroll: true });
}

window.addEventListener("hashchange", route);
begin("", () => {}, gone);
start();
