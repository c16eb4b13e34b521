// Charts of the last hour, as plain lines.

import { get, query } from "./api.js";
import { count, h, patch, rate, span, svg } from "./dom.js";

const WIDE = 480, HIGH = 130, LEFT = 64, TOP = 18, LOW = 20;
const REFRESH_MS = 10000;

export function charts(page, topic) {
  const where = h("section", { "aria-label": "The last hour" }, h("h2", {}, "The last hour"), h("div", {}, h("p", { class: "soft" }, "…")));
  page.main.append(where);
  const draw = async () => {
    const found = await get(query("/console/data/charts", { topic }));
    patch(where.lastChild.firstChild, panels(found, topic));
  };
  page.every(REFRESH_MS, draw);
}

function panels({ times, series }, topic) {
  if (times.length < 2) return h("p", { class: "soft" }, "Charts begin when the broker starts: come back in a minute.");
  const drawn = [
    panel("Messages a second, in and out", times, [series.in_per_s, series.out_per_s], ["in", "out (dashed)"], rate),
    panel("Behind, in messages", times, [series.lag], [""], count),
  ];
  if (topic === null || topic === undefined) {
    drawn.push(panel("Wait for the first delivery", times, [series.wait_ms], [""], span));
    drawn.push(panel("Time of a commit", times, [series.commit_ms], [""], span));
  }
  return h("div", { class: "charts" }, drawn);
}

function panel(title, times, lines, names, text) {
  const most = Math.max(1e-9, ...lines.flat().filter((value) => value !== null));
  const begin = times[0], width = Math.max(1, times[times.length - 1] - begin);
  const x = (at) => LEFT + ((WIDE - LEFT - 8) * (at - begin)) / width;
  const y = (value) => HIGH - LOW - ((HIGH - TOP - LOW) * value) / most;
  const last = lines.map((line, at) => `${names[at]} ${text(line[line.length - 1] ?? 0)}`.trim()).join(", ");
  return h("figure", {}, h("figcaption", {}, `${title}: now ${last}`),
    svg("svg", { class: "chart", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `${title}, at most ${text(most)}, now ${last}` },
      svg("line", { class: "axis", x1: LEFT, x2: WIDE - 8, y1: HIGH - LOW, y2: HIGH - LOW }),
      svg("text", { x: 4, y: TOP }, text(most)), svg("text", { x: 4, y: HIGH - LOW }, "0"),
      svg("text", { x: LEFT, y: HIGH - 4 }, clock(begin)), svg("text", { x: WIDE - 8, y: HIGH - 4, "text-anchor": "end" }, clock(times[times.length - 1])),
      lines.map((line, at) => svg("path", { class: at === 0 ? "one" : "two", d: path(line, times, x, y) }))));
}

function path(line, times, x, y) {
  let drawn = "", pen = "M";
  line.forEach((value, at) => {
    if (value === null) { pen = "M"; return; }
    drawn += `${pen}${x(times[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return drawn || "M0 0";
}

function clock(ms) {
  return new Date(ms).toISOString().slice(11, 16) + "Z";
}
