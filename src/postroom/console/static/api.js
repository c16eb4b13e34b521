// What the page asks the broker. Whatever goes wrong has a sentence for people.

let csrf = "";
let lost = () => {};
let gone = () => {};

export function begin(token, onLogin, onGone) {
  csrf = token;
  lost = onLogin;
  gone = onGone;
}

export class Failure extends Error {
  constructor(status, code, message, details) {
    super(message);
    this.status = status;
    this.code = code;
    this.details = details || {};
  }
}

export async function ask(method, path, body) {
  const headers = { "X-Postroom-Csrf": csrf };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), credentials: "same-origin" });
  } catch {
    gone(true);
    throw new Failure(0, "gone", "The broker does not answer. Whether it was done is not known: this page shows it once the broker is back.");
  }
  gone(false);
  const text = await answer.text();
  let found = null;
  try {
    found = text ? JSON.parse(text) : null;
  } catch {
    throw new Failure(answer.status, "unreadable", `The broker answered ${answer.status}, and not in JSON.`);
  }
  if (answer.ok) return found;
  const error = (found && found.error) || { code: "http", message: `The broker answered ${answer.status}.` };
  if (answer.status === 401) lost();
  throw new Failure(answer.status, error.code, error.message, error.details);
}

export const get = (path) => ask("GET", path);
export const post = (path, body = {}) => ask("POST", path, body);
export const put = (path, body) => ask("PUT", path, body);
export const remove = (path) => ask("DELETE", path);

export function topicPath(topic, ...rest) {
  return ["/api/v1/topics", encodeURIComponent(topic), ...rest.map(encodeURIComponent)].join("/");
}

export function groupPath(topic, group, ...rest) {
  return topicPath(topic, "groups", group, ...rest);
}

export function dataPath(topic, ...rest) {
  return ["/console/data/topics", encodeURIComponent(topic), ...rest.map(encodeURIComponent)].join("/");
}

export function query(path, values) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}
