/* Conversations as data: messages, answers, and the training data in them.

   A turn is {text, answers: [answer, answer], versions, better}, with the answer that each column shows:
   {model, text, state: "running" | "done" | "stopped" | "failed", error, finish, tokens, speed, seed, system,
   from: the first turn in the request, total: tokens with the prompt, isText: it continues a text,
   isEnd: the model ended the text, mark: "good" | "bad"}. `versions` has a column's other answers as
   {before, after}; `better` is the column whose answer both columns continue from. */

const message = (role, content) => ({role, content});
const wellFormed = (_, value) => (typeof value === "string" ? value.toWellFormed() : value);
const many = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** The answer that a column continues from. */
const saidIn = ({answers, better}, column) => answers[better ?? column];

/** All versions of a column's answer, oldest first. */
function versionsOf({answers, versions}, column) {
  const {before = [], after = []} = versions?.[column] ?? {};
  return [...before, answers[column], ...after].filter(Boolean);
}

/** Text and answer of each earlier turn in the request for an answer. */
function earlierTurns(turns, index, column, from = 0) {
  return turns.slice(from, index).map((turn) => [turn.text, saidIn(turn, column)])
    .filter(([, said]) => said?.text || said?.finish);
}

const withSystem = (system, rest) => (system?.trim() ? [message("system", system), ...rest] : rest);
const dialog = (earlier) =>
  earlier.flatMap(([text, said]) => [message("user", text), message("assistant", said.text)]);

/** The messages in the request for a column's answer. */
function asked(turns, index, column, {from, system}) {
  return withSystem(system, [...dialog(earlierTurns(turns, index, column, from)),
    message("user", turns[index].text)]);
}

/** Whether the two visible answers reply to the same messages. */
function areComparable(turns, index) {
  const [one, other] = turns[index].answers.map((reply, column) => reply?.text && !reply.isText
    && JSON.stringify(asked(turns, index, column, reply)));
  return Boolean(one && one === other);
}

/** The preference pairs in a conversation: each good answer with each bad answer to the same messages. */
function pairsOf({turns}) {
  return turns.flatMap((turn, index) => {
    const marked = [0, 1].flatMap((column) => versionsOf(turn, column).filter(({mark}) => mark)
      .map((reply) => ({...reply, prompt: asked(turns, index, column, reply)})));
    const isPair = (one, other) => one.mark === "good" && other.mark === "bad"
      && one.text.trim() !== other.text.trim() && JSON.stringify(one.prompt) === JSON.stringify(other.prompt);
    return marked.flatMap((one) => marked.filter((other) => isPair(one, other)).map((other) => (
      {prompt: one.prompt, chosen: [message("assistant", one.text)],
        rejected: [message("assistant", other.text)]})));
  });
}

/** The chats in a conversation, one for each column, up to an answer that is bad or was cut off. */
function chatsOf({turns}) {
  return [0, 1].map((column) => {
    const answered = earlierTurns(turns, turns.length, column)
      .filter(([, said]) => said.text.trim() && !said.isText);
    const end = answered.findIndex(([, {mark, finish}]) => (mark ? mark === "bad" : finish !== "stop"));
    const usable = end < 0 ? answered : answered.slice(0, end);
    return {messages: withSystem(usable.at(-1)?.[1].system, dialog(usable))};
  }).filter(({messages}) => messages.length);
}

/** The turns in a record of an exported file. Throws if it is neither a chat nor a pair. */
function turnsOf({messages, prompt, chosen, rejected}) {
  const turns = [], [system] = (messages ?? prompt).filter(({role}) => role === "system");
  const said = ({content}, mark) => ({model: "imported", text: content, state: "done", finish: "stop",
    system: system?.content, mark});
  const all = messages ?? [...prompt, ...chosen, ...rejected];
  if (!all.every(({content}) => typeof content === "string")) throw new TypeError();
  for (const each of messages ?? prompt) {
    if (each.role === "user") turns.push({text: each.content, answers: []});
    else if (each.role === "assistant") turns.at(-1).answers = [said(each)];
    else if (each !== system) throw new TypeError();
  }
  if (!messages) {
    turns.at(-1).answers = [said(chosen.at(-1), "good")];
    turns.at(-1).versions = [{before: [], after: [said(rejected.at(-1), "bad")]}];
  }
  if (!turns.length) throw new TypeError();
  return turns;
}
