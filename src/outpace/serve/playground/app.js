// The playground: one message, two answers, side by side.

import { Answer, firstDifference } from "./answer.js";
import { answerOf, describe } from "./api.js";
import { Insight } from "./insight.js";
import { Lane } from "./lane.js";
import { chosenFields, chosenMethod, markField, offerMethods, showSummary } from "./settings.js";

const EXAMPLES = [
  "Why is the sky blue?",
  "Write a Python function that reverses a list, and three tests of it.",
  "List five facts about the moon, one sentence each.",
];
const PLAIN = "plain";
const RETRY = 2000; // milliseconds until a server that is loading is asked again

const by = (id) => document.getElementById(id);
const insight = new Insight();
let info = null;
let running = null; // an AbortController while answers are made
let histories = [[], []]; // messages of the method's conversation, and of plain decoding's

async function connect() {
  try {
    const found = await describe(by("key").value);
    info = found.info;
    offerMethods(found.methods);
    by("model").textContent = [info.model, info.drafter && `drafter ${info.drafter}`, exactness()].filter(Boolean).join(" · ");
    tell("");
  } catch (error) {
    by("model").textContent = "not connected";
    fail(error);
    if (error.status === 503) setTimeout(connect, RETRY);
  }
}

const exactness = () => (info?.exactness?.kind === "bitwise" ? "exact to the bit" : "exact but for rounding");

/** One turn: request both answers, one after the other or at once, and compare them. */
async function send() {
  const question = by("prompt").value.trim();
  if (!question || running) return;
  if (!info) {
    await connect(); // a request needs the list of methods
    if (!info || running) return;
  }
  let fields;
  try {
    markField(null);
    fields = chosenFields();
  } catch (error) {
    fail(error);
    return;
  }
  tell("");
  running = new AbortController();
  setRunning(true);
  by("prompt").value = "";
  fit(by("prompt"));
  const own = histories; // this conversation's, even if another one begins meanwhile
  const wereEqual = JSON.stringify(own[0]) === JSON.stringify(own[1]);
  const turn = newTurn(question);
  const system = by("system").value.trim();
  const asked = [chosenMethod(), PLAIN].map((method, place) => {
    const messages = [...own[place], { role: "user", content: question }];
    const body = { ...fields, messages: system ? [{ role: "system", content: system }, ...messages] : messages };
    const lane = newLane(turn, place ? "plain decoding" : method);
    return { method, messages, body, lane, place, own };
  });
  const ends = by("race").value === "both" ? await Promise.all(asked.map((one) => race(one))) : await inTurns(asked);
  setRunning(false);
  running = null;
  if (ends.includes("failed") && !asked.some(({ lane }) => lane.answer?.tokens.length)) {
    takeBack(turn, question);
  } else {
    judge(turn, asked, { ends, wereEqual, fields });
  }
}

async function inTurns([first, second]) {
  const end = await race(first);
  if (end === "done") return [end, await race(second, first.lane.answer)];
  second.lane.end("skipped");
  return [end, "skipped"];
}

/** Run one lane to its end: "done", "stopped" or "failed". */
async function race({ method, messages, body, lane, place, own }, rival = null) {
  const answer = new Answer(method);
  lane.begin(answer, body.max_completion_tokens, rival);
  const wish = {
    model: info?.model ?? "", ...body, stream: true, stream_options: { include_usage: true },
    outpace: { method, report: true, trace: true },
  };
  let end = "done";
  let trouble = "";
  try {
    for await (const chunk of answerOf(wish, by("key").value, running.signal)) {
      const isAtEnd = nearEnd();
      const isFirst = !answer.tokens.length;
      lane.add(answer.take(chunk));
      if (!place && isFirst && answer.tokens.length) insight.follow(lane);
      insight.refresh(lane);
      if (isAtEnd) toEnd();
    }
  } catch (error) {
    end = error.name === "AbortError" ? "stopped" : "failed";
    trouble = end === "stopped" ? "Stopped." : error.message;
    if (end === "failed") fail(error);
  }
  lane.end(end, trouble);
  insight.refresh(lane);
  if (answer.text) own[place] = [...messages, { role: "assistant", content: answer.text }];
  return end;
}

/** Say whether the answers are equal, and how much faster one was. */
function judge(turn, asked, { ends, wereEqual, fields }) {
  const verdict = turn.querySelector(".verdict");
  const [own, plain] = asked.map(({ lane }) => lane.answer);
  if (ends.some((end) => end !== "done")) {
    verdict.textContent = ends.includes("failed") ? "" : "Stopped: nothing to compare.";
    return;
  }
  const place = firstDifference(own, plain);
  const ratio = plain.speed ? own.speed / plain.speed : 0;
  const parts = [];
  if (!wereEqual) {
    turn.dataset.verdict = "apart";
    parts.push("Not compared: the two conversations have differed since an earlier turn.");
  } else if (place === null) {
    turn.dataset.verdict = "equal";
    parts.push(`Equal: all ${own.tokens.length} tokens are the same.`);
  } else {
    turn.dataset.verdict = "different";
    parts.push(`Different from token ${place + 1} on.`);
    parts.push(
      info?.exactness?.kind === "bitwise"
        ? "That should not be: please report it."
        : "On this machine rounding may decide between tokens that are as good as equal; outpace verify tells.",
    );
  }
  if (fields.temperature) parts.push(`Seed ${fields.seed}.`);
  const shows = own.tokens.length > 1 && ratio ? [["ratio", `${ratio.toFixed(2)}×`], ["note", "plain decoding's speed"]] : [];
  shows.push(["told", parts.join(" ")]);
  verdict.replaceChildren(...shows.map(([kind, text]) => worded(kind, text)));
  toEnd();
}

function worded(kind, text) {
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  return span;
}

function newTurn(question) {
  const turn = by("turn-template").content.firstElementChild.cloneNode(true);
  turn.querySelector(".question").textContent = question;
  by("welcome").hidden = true;
  by("fresh").hidden = false;
  by("turns").append(turn);
  toEnd();
  return turn;
}

/** Put a refused question back into the input field. */
function takeBack(turn, question) {
  turn.remove();
  by("prompt").value = [question, by("prompt").value].filter(Boolean).join("\n"); // keeps text typed meanwhile
  fit(by("prompt"));
  const isEmpty = !by("turns").children.length;
  by("welcome").hidden = !isEmpty;
  by("fresh").hidden = isEmpty;
}

function newLane(turn, title) {
  const lane = new Lane(title, (round) => lane.answer && insight.look(lane, round));
  turn.querySelector(".lanes").append(lane.element);
  return lane;
}

function startAfresh() {
  running?.abort();
  histories = [[], []];
  by("turns").replaceChildren();
  by("welcome").hidden = false;
  by("fresh").hidden = true;
  insight.clear();
  tell("");
  by("prompt").focus();
}

function fail(error) {
  tell(error.message);
  if (error.param === "key") by("key-field").hidden = false;
  markField(error.param);
}

function tell(text) {
  by("alert").hidden = !text;
  by("alert").textContent = text;
}

function setRunning(isRunning) {
  const [shown, gone] = isRunning ? [by("stop"), by("send")] : [by("send"), by("stop")];
  const hadFocus = document.activeElement === gone; // which a hidden button would lose
  [shown.hidden, gone.hidden] = [false, true];
  if (hadFocus) shown.focus();
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

/** The scrolling element: the conversation next to the panel, or the page if it is narrow. */
function scroller() {
  const conversation = by("conversation");
  return getComputedStyle(conversation).overflowY === "auto" ? conversation : document.documentElement;
}

function nearEnd() {
  const { scrollTop, clientHeight, scrollHeight } = scroller();
  return scrollTop + clientHeight > scrollHeight - 120;
}

/** Scroll to the newest turn; if the whole page scrolls, to its answers. */
function toEnd() {
  const last = by("turns").lastElementChild;
  if (!last) return;
  if (scroller() === by("conversation")) last.scrollIntoView({ block: "end" });
  else last.querySelector(".lane:not([data-state='waiting'])")?.scrollIntoView({ block: "nearest" });
}

/** Whether a key belongs to an input method; Safari shows this only by the key code. */
const isComposing = (event) => event.isComposing || event.keyCode === 229;

function listen() {
  by("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  by("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
    event.preventDefault();
    send();
  });
  by("prompt").addEventListener("input", () => fit(by("prompt")));
  by("stop").addEventListener("click", () => running?.abort());
  by("fresh").addEventListener("click", startAfresh);
  by("method").addEventListener("input", () => (by("options").value = "")); // they were another method's
  by("settings").addEventListener("input", showSummary);
  by("key").addEventListener("change", connect);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || isComposing(event) || !running) return;
    running.abort();
    by("prompt").focus();
  });
  for (const text of EXAMPLES) {
    const [item, button] = ["li", "button"].map((tag) => document.createElement(tag));
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => {
      by("prompt").value = text;
      send();
    });
    item.append(button);
    by("examples").append(item);
  }
}

listen();
connect();
