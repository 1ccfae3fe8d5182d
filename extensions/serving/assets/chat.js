/* The chat page. What was said is in `chat`; the page is drawn from it, and a change redraws what differs.
   What people, models and the server write is set as text, never as HTML. */

const STORE = "paddock-chat-1", KEY_STORE = "paddock-key";  // for this tab, kept after a reload
const KEPT = "paddock-conversation-";  // prefix of the ids of stored conversations
const SILENCE = 3000;  // milliseconds without a token until the page reports it
const TOP = 5;  // alternatives shown for each token
const MAX_TOKENS = 512;  // the default for an answer, unless half of the context is less
const MEASURABLE = 10;  // least milliseconds between first and last token to report a speed
// What the page calls itself, its button, its text, and says about them; a model without a template is no chat.
const WORDS = {
  chat: ["Chat", "Send", "Message", "Write a message", "Enter sends"],
  text: ["Continue", "Continue", "Text", "Write the beginning of a text", "Enter continues it"],
};
const UNREACHABLE = "The server cannot be reached. Is it still running?";
const UNCLEAR = "The server sent an unexpected response.";
const LOST = "The connection was lost before the answer was complete.";
const RELOADED = "The page was reloaded before the answer was complete.";

const newId = () => `${Date.now()}-${Math.random()}`;
const chat = {models: ["", null], panel: false, drawer: false, fields: {}, turns: [], draft: "",
  id: newId(), at: Date.now(), ...JSON.parse(sessionStorage.getItem(STORE))};
const running = new Map();  // answer -> {stopper, since: when it last wrote}
const tokensOf = new WeakMap();  // answer -> tokens, log-probabilities; storage holds too few (200 B a token)
let served = [], key = sessionStorage.getItem(KEY_STORE), wantsKey = false;
let editing = null, copied = null, notice = null, follows = true;
let library = null;  // stored conversations, once read

const modelOf = (column) => served.find(({id}) => id === chat.models[column]);
const columns = () => [0, 1].filter(modelOf);
const isRunning = () => running.size > 0;
const newSeed = () => Number(chat.fields.seed || Math.floor(Math.random() * 1e6));
const say = (words, label, act) => { notice = words && {words, label, act}; };
// ------------------------------------------------------------------------------------------------ the server

/** An error from the server, as a sentence. */
class ApiError extends Error {
  constructor(said, otherwise) {
    const words = String(said?.error?.message ?? otherwise);
    super(words.charAt(0).toUpperCase() + words.slice(1).replace(/\.?$/, "."));
    this.code = said?.error?.code;
  }
}

/** Send a request; returns the response, or throws an ApiError with the server's message. */
async function ask(path, body, signal) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, {method: body ? "POST" : "GET", headers, signal, cache: "no-store",
    credentials: "omit", redirect: "error", body: body && JSON.stringify(body, wellFormed)});
  if (response.ok) return response;
  wantsKey ||= response.status === 401;
  throw new ApiError(await response.json().catch(() => null), `The server answered ${response.status}.`);
}

/** The events of a stream as objects, until it is complete or the connection ends. */
async function* events(body) {
  // TextDecoderStream may lose the last chunk if the connection breaks.
  const reader = body.getReader(), decoder = new TextDecoder();
  for (let rest = "";;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, {stream: true})).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.match(/^data:(.*)$/m)?.[1].trim();
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** Path and body of the request for an answer. A column's request contains only its own answers. */
function requestOf(turn, column, reply) {
  const {system: _, stop, ...numbers} = chat.fields, {id, chat: hasTemplate} = modelOf(column);
  const sampling = Object.entries(numbers).filter(([, value]) => value !== "");
  const body = {model: id, stream: true, stream_options: {include_usage: true},
    ...Object.fromEntries(sampling.map(([name, value]) => [name, Number(value)])),
    seed: reply.seed, logprobs: hasTemplate || TOP};
  if (hasTemplate) body.top_logprobs = TOP;
  if (stopStrings().length) body.stop = stopStrings();
  const index = chat.turns.indexOf(turn);
  const earlier = earlierTurns(chat.turns, index, column, reply.from);
  if (!hasTemplate) return ["v1/completions", {...body, prompt: joined(earlier, turn.text)}];
  return ["v1/chat/completions", {...body, messages: asked(chat.turns, index, column, reply)}];
}

/** Join all turns into one text. After a text that the model ended, the next turn starts a new text. */
function joined(earlier, last) {
  let whole = "";
  const add = (text) => { whole += (/\S$/.test(whole) && /^\S/.test(text) ? " " : "") + text; };
  for (const [text, said] of earlier) {
    add(text);
    whole = said.isEnd ? "" : whole + said.text;
  }
  add(last);
  return whole;
}

function stopStrings() {
  const unescape = (line) => line.replace(/\\([nt\\])/g, (_, sign) => ({n: "\n", t: "\t", "\\": "\\"})[sign]);
  return chat.fields.stop.split("\n").filter(Boolean).map(unescape);
}

/** Request an answer. While the context is too small, drop the older half of the messages. */
async function askToAnswer(turn, column, reply, signal) {
  const index = chat.turns.indexOf(turn), before = index && saidIn(chat.turns[index - 1], column);
  const halve = () => { reply.from += Math.ceil((index - reply.from) / 2); };
  reply.from = before?.from ?? 0;
  if (!before?.isEnd && before?.total > 0.75 * modelOf(column).context_length) halve();
  for (;;) {
    try {
      return await ask(...requestOf(turn, column, reply), signal);
    } catch (error) {
      if (error.code !== "context_length_exceeded" || reply.from === index) throw error;
      halve();
    }
  }
}

/** Request a column's answer to a turn. A previous answer becomes an earlier version. */
async function answer(turn, column, seed) {
  const {chat: isChat, id: model} = modelOf(column), system = isChat ? chat.fields.system : "";
  const reply = {model, text: "", state: "running", seed, system, isText: !isChat};
  const before = turn.answers[column], versions = versionsOf(turn, column).filter(({text}) => text);
  const stopper = new AbortController(), work = {stopper, since: Date.now()};
  const tokens = [];
  let first = null, last = null, reason = UNREACHABLE, isThinking = false;
  turn.versions ??= [];
  turn.versions[column] = {before: versions, after: []};
  turn.answers[column] = reply;
  turn.better = null;
  tokensOf.set(reply, tokens);
  running.set(reply, work);
  follows = true;
  redraw();
  try {
    const response = await askToAnswer(turn, column, reply, stopper.signal);
    reason = LOST;
    for await (const event of events(response.body)) {
      const {error, choices = [], usage} = event;
      if (error) throw new ApiError(event);
      const {reasoning_content: thought, content} = choices[0]?.delta ?? {};
      const tag = thought && !reply.text ? "<think>" : content && isThinking ? "</think>" : "";
      const written = tag + (thought ?? content ?? choices[0]?.text ?? "");
      isThinking = thought ? true : content ? false : isThinking;
      if (written) {
        reply.text += written;
        last = work.since = Date.now();
        first ??= last;
      }
      tokens.push(...tokensIn(choices[0]?.logprobs));
      if (tokens.length) reply.tokens = tokens.length;
      reply.finish = choices[0]?.finish_reason ?? reply.finish;
      if (usage) [reply.tokens, reply.total] = [usage.completion_tokens, usage.total_tokens];
      redraw();
    }
    if (!reply.finish) throw new ApiError(null, LOST);
    reply.isEnd = !isChat && reply.finish === "stop" && !stopStrings().length;
    reply.state = "done";
  } catch (error) {
    reply.state = stopper.signal.aborted ? "stopped" : "failed";
    if (reply.state === "failed") reply.error = reasonOf(error, reason);
    if (!reply.text && before?.text) {
      Object.assign(reply, before, {state: reply.state, error: reply.error});
      versions.splice(versions.indexOf(before), 1);
    }
  }
  if (last - first >= MEASURABLE && reply.tokens) reply.speed = 1000 * (reply.tokens - 1) / (last - first);
  running.delete(reply);
  byId("announced").textContent = `${reply.model}: ${reply.text} ${statusOf(reply)}`;
  save();
  draw();
  if (wantsKey) byId("key-text").focus();
}

/** The tokens in a chunk of an answer, as [text, log-probability, alternatives]. */
function tokensIn(logprobs) {
  const {content, tokens = [], token_logprobs: values, top_logprobs: likely} = logprobs ?? {};
  if (!content) return tokens.map((token, index) => [token, values[index], Object.entries(likely[index])]);
  return content.map(({token, logprob, top_logprobs}) => [token, logprob,
    top_logprobs.map((one) => [one.token, one.logprob])]);
}

/** One sentence for the reason a request failed; `otherwise` if the browser does not report it. */
function reasonOf(error, otherwise) {
  if (error instanceof ApiError) return error.message;
  return error instanceof SyntaxError ? UNCLEAR : otherwise;
}

async function loadModels() {
  try {
    served = (await (await ask("v1/models")).json()).data;
    wantsKey = false;
    say(null);
    if (!modelOf(0)) chat.models[0] = served[0].id;
    // If two models are served, compare them by default; "" = the reader wants one column.
    if (chat.models[1] === null && served.length === 2) chat.models[1] = served[1].id;
  } catch (error) {
    say(wantsKey ? null : reasonOf(error, UNREACHABLE), "Try again", loadModels);
  }
  byId("key-text").value = "";
  draw();
  byId(wantsKey ? "key-text" : "text").focus();
}

// -------------------------------------------------------------------------------------------------- the page

function button(action, label, place = {}, attributes = {}) {
  const waits = isRunning() && ["answer", "edit", "version", "better"].includes(action);
  const data = Object.entries(place).map(([name, value]) => [`data-${name}`, value]);
  return h("button", {type: "button", "data-do": action, ...Object.fromEntries(data),
    "aria-disabled": waits && "true", ...attributes}, label);
}

/** Buttons to switch between the versions of an answer and to rate it. */
function judgement(turn, index, column, place) {
  const reply = turn.answers[column], all = versionsOf(turn, column), at = all.indexOf(reply);
  const isLast = index === chat.turns.length - 1;
  const step = (by, label, name) => button("version", label, {...place, by},
    {"aria-label": name, ...(all[at + by] ? {} : {"aria-disabled": "true"})});
  const mark = (name, label) => button("mark", label, {...place, mark: name},
    {"aria-pressed": String(reply.mark === name)});
  return [
    isLast && all.length > 1 && h("span", {class: "versions"}, step(-1, "‹", "Earlier version"),
      `${at + 1}/${all.length}`, step(1, "›", "Later version")),
    !reply.isText && [mark("good", "Good"), mark("bad", "Bad")],
    isLast && columns().length > 1 && areComparable(chat.turns, index)
      && button("better", "Better", place, {"aria-pressed": String(turn.better === column),
        title: "Mark this answer good and the other bad. Both models continue from it."})];
}

/** The line below an answer: progress, how it ended, tokens and speed. */
function statusOf(reply) {
  const silence = Date.now() - (running.get(reply)?.since ?? 0), seconds = Math.floor(silence / 1000);
  if (reply.state === "running") {
    if (!reply.text) return `Waiting for the first token … ${seconds ? `${seconds} s` : ""}`;
    return silence > SILENCE ? `Writing … no token for ${seconds} s` : "Writing …";
  }
  const {text, finish, isEnd, from, tokens, speed, seed, state, error} = reply;
  if (state === "failed") return error;
  return [state === "stopped" ? "Stopped" : !text && "Empty answer",
    finish === "length" && "Cut off at the token limit",
    isEnd && "The model ended the text; what you write next starts a new one",
    from && `Without the first ${from > 1 ? `${from} messages` : "message"}: the context is full`,
    tokens !== undefined && many(tokens, "token"),
    speed && `${speed.toLocaleString("en", {maximumSignificantDigits: 3})} tokens/s`,
    seed !== undefined && `seed ${seed}`].filter(Boolean).join(" · ");
}

/** An answer as Markdown, or as raw text whose tokens show their probability. */
function answerText(reply) {
  const tokens = (reply && tokensOf.get(reply)) ?? [], text = reply?.text ?? "";
  if (!chat.raw && text && !reply.isText) return h("div", {class: "text formatted"}, partsOf(reply));
  const isWhole = text && tokens.map(([each]) => each).join("").startsWith(text);
  if (!isWhole) return h("p", {class: "text"}, text);
  const label = "Tokens. Arrow keys show how likely each was.";
  return h("p", {class: "text", tabindex: 0, role: "group", "aria-label": label},
    tokens.map(([each], index) => h("span", {"data-token": index}, each)));
}

/** Show the probability of a token and of its most likely alternatives. */
function showToken(element) {
  const box = byId("token");
  showToken.shown = element;
  box.hidden = !element;
  if (!element) return;
  const {turn, column} = element.closest("article").querySelector("[data-column]").dataset;
  const [text, logprob, likely] = tokensOf.get(chat.turns[turn].answers[column])[element.dataset.token];
  const line = ([token, value]) => h("tr", {class: token === text && "chosen"},
    h("td", {}, JSON.stringify(token)), h("td", {}, `${(100 * Math.exp(value)).toFixed(2)} %`));
  const isListed = likely.some(([token]) => token === text);
  fill(box, h("table", {}, likely.map(line), !isListed && line([text, logprob])));
  const {left, bottom, top} = element.getBoundingClientRect();
  const isLow = bottom + box.offsetHeight > innerHeight - 8;
  box.style.left = `${Math.max(8, Math.min(left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${isLow ? top - box.offsetHeight - 4 : bottom + 4}px`;
}

function answerElement(turn, index, column) {
  const reply = turn.answers[column], place = {turn: index, column};
  const name = reply ? reply.model : chat.models[column];
  const isBroken = reply?.state === "failed" || reply?.state === "stopped" && !reply.text;
  const again = isBroken ? "Try again" : reply ? "Regenerate" : "Ask";
  return h("article", {class: `answer column-${column}`, "aria-label": `Answer of ${name}`},
    h("h2", {title: name}, name),
    answerText(reply),
    h("div", {class: "actions"},
      h("p", {class: `status ${reply?.state}`}, reply ? statusOf(reply) : "Not asked"),
      index === chat.turns.length - 1 && button("answer", again, place),
      reply?.text && button("copy", copied === reply ? "Copied" : "Copy", place),
      reply?.text && reply.state !== "running" && judgement(turn, index, column, place)));
}

function turnElement(turn, index) {
  const place = {turn: index}, message = editing !== index
    ? h("article", {class: "said", "aria-label": "You"}, h("p", {class: "text"}, turn.text),
      h("div", {class: "actions"}, button("edit", "Edit", place),
        button("copy", copied === turn ? "Copied" : "Copy", place)))
    : h("article", {class: "said edited", "aria-label": "You"},
      h("textarea", {id: "editor", rows: 2, "aria-label": "Message"}, turn.text),
      h("div", {class: "actions"}, button("cancel", "Cancel"), button("resend", "Send")));
  const answers = columns().map((column) => answerElement(turn, index, column));
  return h("li", {}, message, h("div", {class: "answers"}, answers));
}

/** The content of an empty conversation. */
function greeting(model) {
  const short = {notation: "compact", maximumSignificantDigits: 3};
  return h("p", {}, h("strong", {}, model.id),
    `${model.parameters.toLocaleString("en", short)} parameters, `,
    `a context of ${model.context_length.toLocaleString("en")} tokens`);
}

function draw() {
  cancelAnimationFrame(redraw.frame);
  redraw.frame = null;
  const main = byId("main"), chosen = columns().map(modelOf);
  const canChat = !chosen.length || chosen.some((model) => model.chat);
  const [heading, verb, label, hint, keys] = canChat ? WORDS.chat : WORDS.text;
  document.title = [...chosen.map(({id}) => id), heading].join(" · ");
  fill(byId("heading"), heading);
  fill(byId("text-label"), label);
  fill(byId("keys"), `${keys}, Shift+Enter starts a new line, Escape stops.`);
  byId("text").placeholder = hint;
  byId("models").hidden = byId("composer").hidden = !served.length;
  byId("second").hidden = served.length < 2;
  for (const column of [0, 1]) {
    const select = byId(`model-${column}`), value = modelOf(column)?.id ?? "";
    fill(select, column === 1 && h("option", {value: ""}, "none"),
      served.map(({id}) => h("option", {value: id}, id)));
    if (select.value !== value) select.value = value;
  }
  byId("key").hidden = !wantsKey;
  fill(byId("key-note"), key ? "The server rejected this key." : "The server requires a key.");
  const prompts = chosen[0]?.prompts?.map((text) => button("prompt", text)) ?? [];
  fill(byId("empty"), !chat.turns.length && [chosen.map(greeting), prompts.length > 0
    && h("div", {class: "prompts"}, h("p", {}, "From its training data:"), prompts)]);
  byId("turns").classList.toggle("wide", chosen.length > 1);
  byId("turns").classList.toggle("continued", !canChat);
  fill(byId("turns"), chat.turns.map(turnElement));
  fill(byId("mode"), [...new Set(chosen)].filter((model) => !model.chat).map(({id}) => h("span", {},
    h("bdi", {}, id), " was not trained on chats: it continues your text. ")));
  byId("panel").elements.system.parentNode.hidden = !canChat;
  fill(byId("notice"), notice && [notice.words, " ", notice.label && button("notice", notice.label)]);
  document.querySelector("[data-do=raw]").setAttribute("aria-pressed", Boolean(chat.raw));
  for (const place of ["panel", "drawer"]) {
    byId(place).hidden = !chat[place];
    document.querySelector(`[aria-controls=${place}]`).setAttribute("aria-expanded", chat[place]);
  }
  if (chat.drawer) drawKept();
  fill(byId("send"), isRunning() ? "Stop" : verb);
  for (const name of ["max_tokens", "context_length"]) {
    const limit = Math.min(...chosen.map((model) => model[name]));
    fill(byId(name), limit.toLocaleString("en"));
    if (name === "max_tokens" && chosen.length) {  // the default leaves half of a short context to the prompt
      const input = byId("panel").elements[name], isDefault = input.value === input.defaultValue;
      input.defaultValue = Math.max(1, Math.min(MAX_TOKENS, limit >> 1));
      if (isDefault) input.value = chat.fields[name] = input.defaultValue;
    }
  }
  if (follows) main.scrollTop = main.scrollHeight;
  byId("latest").hidden = follows || main.scrollHeight - main.scrollTop - main.clientHeight < 40;
}

/** The stored conversations, newest first. */
function kept() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(KEPT));
  library ??= names.map((name) => ({id: name.slice(KEPT.length), ...JSON.parse(localStorage[name])}))
    .sort((one, other) => other.at - one.at);
  return library;
}

function drawKept() {
  const all = kept(), pairs = all.flatMap(pairsOf).length;
  fill(byId("kept"), all.map(({id, turns}) => h("li", {},
    button("open", turns[0].text.trim().slice(0, 200), {id}, {"aria-current": id === chat.id && "true"}),
    button("delete", "×", {id}, {"aria-label": `Delete ${turns[0].text.slice(0, 60)}`, title: "Delete"}))));
  fill(byId("kept-note"), `${many(pairs, "preference pair")} so far. A pair is a good and a bad answer `
    + "to the same messages.");
}

function redraw() {
  redraw.frame ??= requestAnimationFrame(draw);
}

function save() {
  const {id, at, turns} = chat;
  try {
    sessionStorage.setItem(STORE, JSON.stringify(chat));
    if (turns.length) localStorage.setItem(KEPT + id, JSON.stringify({at, turns}));
    library = null;
  } catch {
    say("The browser's storage is full. Export and delete older conversations.");
  }
}

// ------------------------------------------------------------------------------------------- training data

/** Save records as a new file, and show how to prepare it for training the first model. */
function exportAs(stem, kind, setting, records) {
  const lines = [...new Set(records.map((record) => `${JSON.stringify(record, wellFormed)}\n`))];
  if (!lines.length) return say(`There is nothing to export. ${byId("files-note").textContent}`);
  // With the time in its name, it is not renamed because of an earlier download.
  const name = `${stem}-${new Date().toISOString().replace(/\D/g, "").slice(0, 14)}.jsonl`;
  download(name, "application/jsonl", ...lines);
  const {source} = columns().map(modelOf)[0] ?? {};
  const quoted = source && `'${source.replaceAll("'", "'\\''")}'`;
  say(`${many(lines.length, "line")} saved. To train on them (if the browser saves in ~/Downloads): `
    + `./paddock prepare ${kind} ~/Downloads/${name}${source ? ` --${setting} ${quoted}` : ""}`);
}

async function importFile(file) {
  let count = 0, bad = 0;
  for (const line of (await file.text()).split("\n").filter((each) => each.trim())) {
    try {
      const turns = turnsOf(JSON.parse(line));
      localStorage.setItem(KEPT + newId(), JSON.stringify({at: Date.now(), turns}));
      count += 1;
    } catch (error) {
      if (error.name === "QuotaExceededError") {
        return say(`The browser's storage is full: ${many(count, "conversation")} imported.`);
      }
      bad += 1;
    }
  }
  say(`${many(count, "conversation")} imported.${bad ? ` Not a chat or a pair: ${many(bad, "line")}.` : ""}`);
}

// ------------------------------------------------------------------------------------------- actions

/** Show another conversation, or other turns of this one, with Undo. */
function openConversation({id, at, turns}, words) {
  const before = {id: chat.id, at: chat.at, turns: chat.turns};
  stop();
  save();
  [chat.id, chat.at, chat.turns, editing, follows] = [id, at, turns, null, true];
  say(before.turns.length > 0 && words, "Undo", () => openConversation(before));
  save();
}

function stop() {
  running.forEach(({stopper}) => stopper.abort());
}

/** Send a message that follows `earlier` turns; returns whether it was sent. */
function send(text, earlier = chat.turns) {
  if (isRunning() || !text.trim() || !columns().length) return false;
  if (!byId("panel").checkValidity()) {
    chat.panel = true;
    draw();
    byId("panel").reportValidity();
    return false;
  }
  if (matchMedia("(max-width: 760px)").matches) chat.panel = chat.drawer = false;  // they hide it
  const turn = {text, answers: []}, seed = newSeed();
  if (earlier === chat.turns) say(null);
  else openConversation({...chat, turns: earlier}, "The conversation continues from the edited message.");
  [chat.turns, chat.at] = [[...earlier, turn], Date.now()];
  columns().forEach((column) => answer(turn, column, seed));
  save();
  return true;
}

async function copy(what, element) {
  try {
    await navigator.clipboard.writeText(what.text);
  } catch {  // the clipboard needs localhost or HTTPS
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
  }
  copied = what;
  redraw();
  setTimeout(() => { copied = null; redraw(); }, 2000);
}

function edit(index) {
  const before = editing;
  editing = index;
  draw();
  (byId("editor") ?? document.querySelector(`[data-do=edit][data-turn="${before}"]`)).focus();
}

function readFields() {
  chat.fields = Object.fromEntries(new FormData(byId("panel")));
}

const ACTIONS = {
  reset() {
    openConversation({id: newId(), at: Date.now(), turns: []}, "The previous one is under Conversations.");
    byId("text").focus();
  },
  toggle(_, element) {
    const place = element.getAttribute("aria-controls"), isOpen = !chat[place];
    if (matchMedia("(max-width: 1100px)").matches) chat.panel = chat.drawer = false;
    chat[place] = isOpen;
  },
  open({id}) {
    openConversation(kept().find((each) => each.id === id));
    if (matchMedia("(max-width: 760px)").matches) chat.drawer = false;
  },
  delete({id}) {
    const gone = kept().find((each) => each.id === id);
    if (id === chat.id) openConversation({id: newId(), at: Date.now(), turns: []});
    localStorage.removeItem(KEPT + id);
    library = null;
    say("The conversation was deleted.", "Undo", () => openConversation(gone));
  },
  raw() { chat.raw = !chat.raw; showToken(null); },
  copyCode(_, element) { copy({text: element.closest(".fence").querySelector("pre").textContent}, element); },
  chats() { exportAs("chats", "chats", "pretrain-checkpoint", kept().flatMap(chatsOf)); },
  pairs() { exportAs("preferences", "pairs", "instruct-checkpoint", kept().flatMap(pairsOf)); },
  import() { byId("file").click(); },
  version({turn, column, by}) {
    const {answers, versions} = chat.turns[turn], {before, after} = versions[column];
    if (by < 0) after.unshift(answers[column]);
    else before.push(answers[column]);
    answers[column] = by < 0 ? before.pop() : after.shift();
  },
  mark({turn, column, mark}) {
    const reply = chat.turns[turn].answers[column];
    reply.mark = reply.mark === mark ? undefined : mark;
  },
  better({turn, column}) {
    const its = chat.turns[turn], isBetter = its.better !== Number(column);
    its.better = isBetter ? Number(column) : null;
    its.answers.forEach((reply, each) => {
      reply.mark = isBetter ? (each === its.better ? "good" : "bad") : undefined;
    });
  },
  defaults() { byId("panel").reset(); readFields(); },
  prompt(_, element) { send(element.textContent); byId("text").focus(); },
  latest() { follows = true; byId("text").focus(); },
  notice() { notice.act(); byId("text").focus(); },
  edit({turn}) { edit(Number(turn)); },
  cancel() { edit(null); },
  resend() { if (send(byId("editor").value, chat.turns.slice(0, editing))) byId("text").focus(); },
  answer({turn, column}) { answer(chat.turns[turn], Number(column), newSeed()); },
  copy({turn, column}, element) {
    const shown = element.closest("article").querySelector(".text");
    copy(column ? chat.turns[turn].answers[column] : chat.turns[turn], shown);
  },
};

document.addEventListener("click", ({target}) => {
  const element = target.closest("[data-do]");
  if (!element || element.getAttribute("aria-disabled") === "true") return;
  ACTIONS[element.dataset.do](element.dataset, element);
  save();
  redraw();
});
document.addEventListener("keydown", (event) => {
  const {key: pressed, target} = event;
  const step = {ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling"}[pressed];
  if (step && target.role === "group" && target.querySelector("[data-token]")) {
    showToken((target.contains(showToken.shown) && showToken.shown[step]) || target.firstElementChild);
  }
  if (pressed === "Escape") {
    showToken(null);
    if (editing === null) stop(); else edit(null);
  }
  // In an input method (such as Japanese), Enter selects a candidate; Safari reports it only as 229.
  if (pressed !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  if (target.id === "editor" || target.id === "text") event.preventDefault();
  if (target.id === "editor") ACTIONS.resend();
  if (target.id === "text" && send(target.value)) target.value = chat.draft = "";
});
document.addEventListener("submit", (event) => event.preventDefault());
byId("composer").addEventListener("submit", () => {
  if (isRunning()) stop();
  else if (send(byId("text").value)) byId("text").value = chat.draft = "";
});
byId("key").addEventListener("submit", () => {
  key = byId("key-text").value;
  sessionStorage.setItem(KEY_STORE, key);
  loadModels();
});
byId("text").addEventListener("input", ({target}) => { chat.draft = target.value; });
byId("panel").addEventListener("input", readFields);
byId("models").addEventListener("change", ({target}) => {
  chat.models[target.id.at(-1)] = target.value;
  redraw();
});
byId("main").addEventListener("scroll", ({target}) => {
  const below = target.scrollHeight - target.scrollTop - target.clientHeight;
  follows = below < 2 || (below < 40 && target.scrollTop > (target.before ?? 0));
  target.before = target.scrollTop;
  redraw();
});
byId("file").addEventListener("change", async ({target}) => {
  await importFile(target.files[0]);
  target.value = "";  // allows selecting the same file again
  library = null;
  redraw();
});
addEventListener("storage", () => { library = null; redraw(); });  // from another tab
document.addEventListener("pointerover", ({target}) => showToken(target.closest("[data-token]")));
addEventListener("resize", redraw);
addEventListener("pagehide", save);
setInterval(() => isRunning() && redraw(), 1000);  // update the waiting time

for (const reply of chat.turns.flatMap(({answers}) => answers)) {
  if (reply?.state === "running") Object.assign(reply, {state: "failed", error: RELOADED});
}
for (const [name, value] of Object.entries(chat.fields)) byId("panel").elements[name].value = value;
readFields();
byId("text").value = chat.draft;
loadModels();
