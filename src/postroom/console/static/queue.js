// The queue as a whole: limits and shards.

import { get, post, put } from "./api.js";
import { count, field, h, show, span, table } from "./dom.js";

export async function rates(page) {
  page.title("Rates and limits");
  const list = h("div");
  const inputs = { topic: h("input"), group: h("input"), producer: h("input"), messages_per_s: h("input", { inputmode: "decimal" }), bytes_per_s: h("input", { placeholder: "1MB" }) };
  const subject = (one) => (one.kind === "producer" ? `producer ${one.producer}` : one.kind === "group" ? `group ${one.group} of ${one.topic}` : `topic ${one.topic}`);
  const load = async () => {
    const found = await get("/api/v1/rates");
    if (page.current) show(list, table("Limits", [
      ["Of", subject, "name"], ["Messages a second", (one) => (one.messages_per_s ? one.messages_per_s.toLocaleString("en-US") : "no limit"), "n"],
      ["Bytes a second", (one) => (one.bytes_per_s ? count(one.bytes_per_s) : "no limit"), "n"], ["Who comes now waits", (one) => span(one.debt_ms), "n"],
      ["", (one) => h("button", { class: "danger", "aria-label": `Remove the limit of ${subject(one)}`, onclick: () => drop(one) }, "Remove …")],
    ], found, "There are no limits."));
  };
  const named = (one) => Object.fromEntries(["topic", "group", "producer"].map((name) => [name, one[name] || null]));
  const drop = async (one) => {
    if (!(await page.ask(`Remove the limit of ${subject(one)}?`, null, "Remove"))) return;
    await page.guard(async () => { await put("/api/v1/rates", named(one)); page.say("There is no limit any more"); });
    await page.guard(load);
  };
  const form = h("form", { onsubmit: (event) => {
    event.preventDefault();
    const values = Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value.trim() || null]));
    if (values.messages_per_s !== null) values.messages_per_s = Number(values.messages_per_s);
    page.guard(async () => {
      await put("/api/v1/rates", values);
      page.say("The limit holds from now on");
      await load();
    });
  } }, field("Topic", inputs.topic), field("Group of it", inputs.group), field("or producer", inputs.producer),
  field("Messages a second", inputs.messages_per_s), field("Bytes a second", inputs.bytes_per_s), h("button", {}, "Set the limit"));
  page.show(h("h1", {}, "Rates and limits"), list, h("h2", {}, "Set a limit"), form);
  await load();
}

export async function shards(page) {
  page.title("Shards and brokers");
  const list = h("div"), brokers = h("div");
  const load = async () => {
    const [found, serving] = await Promise.all([get("/api/v1/shards"), get("/api/v1/brokers")]);
    if (!page.current) return;
    show(list, table("Shards", [
      ["Shard", (one) => one.name, "name"], ["Database", (one) => one.kind], ["State", (one) => h("span", { class: one.state === "away" ? "bad" : "" }, one.state)],
      ["Partitions", (one) => count(one.partitions), "n"], ["Sealed", (one) => count(one.sealed), "n"], ["Delayed", (one) => count(one.delayed), "n"],
      ["", (one) => one.name !== "first" && (one.state === "open"
        ? h("button", { class: "danger", "aria-label": `Drain ${one.name}`, onclick: () => drain(one, found) }, "Drain …")
        : one.state !== "away" && h("button", { class: "plain", "aria-label": `Open ${one.name}`, onclick: () => open(one) }, "Open again"))],
    ], found));
    show(brokers, table("Brokers that serve this queue", [["Address", (one) => one.address, "name"], ["Zone", (one) => one.zone || "–"],
      ["Since", (one) => new Date(one.started_at).toISOString()]], serving, "No broker serves it: it is used embedded."));
  };
  const drain = async (one, all) => {
    const others = all.filter((other) => other.name !== one.name && other.state === "open").map((other) => other.name).join(", ");
    const plan = h("div", {}, h("p", {}, `${count(one.partitions)} partitions are moved to ${others || "no other shard: there is none"}. The shard takes no new messages then; ` +
      "it may be left out once groups have read what is there and its state is empty."));
    if (!(await page.ask(`Drain shard ${one.name}?`, plan, "Drain"))) return;
    await page.guard(async () => { await post(`/api/v1/shards/${encodeURIComponent(one.name)}/drain`); page.say(`Shard ${one.name} is being drained`); });
    await page.guard(load);
  };
  const open = (one) => page.guard(async () => { await post(`/api/v1/shards/${encodeURIComponent(one.name)}/open`); page.say(`Shard ${one.name} takes partitions again`); await load(); });
  page.show(h("h1", {}, "Shards and brokers"), list, brokers);
  await page.every(5000, load);
}
