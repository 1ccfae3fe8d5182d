/* Markdown as elements. marked's lexer parses it, and text becomes text nodes, never HTML. Links and images
   show their address and are not clickable. */

const lexed = new WeakMap();  // answer -> {text, tokens}, because most answers do not change between redraws

function partsOf(reply) {
  if (lexed.get(reply)?.text !== reply.text) {
    let tokens;
    try {
      nodesOf(tokens = marked.lexer(reply.text, {gfm: true}));
    } catch {  // a thousand nested lists overflow the stack
      tokens = [{type: "plain", raw: reply.text}];
    }
    lexed.set(reply, {text: reply.text, tokens});
  }
  return nodesOf(lexed.get(reply).tokens);
}

function nodesOf(tokens = []) {
  const wide = (name, element) => h("div", {class: "scrolls", tabindex: 0, role: "group", "aria-label": name},
    element);
  const cells = (tag, row) => h("tr", {}, row.map((cell) => h(tag, {}, nodesOf(cell.tokens))));
  const places = ({text, href, tokens: inner}) => [...(inner ? nodesOf(inner) : [text]),
    href !== text && href !== `mailto:${text}` && ` (${href})`];
  const make = {
    space: () => "", hr: () => h("hr", {}), br: () => h("br", {}),
    text: (it) => (it.tokens ? nodesOf(it.tokens) : it.text), escape: ({text}) => text,
    paragraph: (it) => h("p", {}, nodesOf(it.tokens)),
    heading: (it) => h("h3", {class: `level-${it.depth}`}, nodesOf(it.tokens)),
    blockquote: (it) => h("blockquote", {}, nodesOf(it.tokens)),
    strong: (it) => h("strong", {}, nodesOf(it.tokens)), em: (it) => h("em", {}, nodesOf(it.tokens)),
    del: (it) => h("del", {}, nodesOf(it.tokens)), codespan: ({text}) => h("code", {}, text),
    list: ({ordered, start, items}) => h(ordered ? "ol" : "ul", {start: ordered && start !== 1 && start},
      items.map((item) => h("li", {}, nodesOf(item.tokens)))),
    table: ({header, rows}) => wide("Table", h("table", {}, h("thead", {}, cells("th", header)),
      h("tbody", {}, rows.map((row) => cells("td", row))))),
    code: ({text, lang}) => h("div", {class: "fence"}, h("div", {}, h("span", {}, lang),
      h("button", {type: "button", "data-do": "copyCode"}, "Copy")), wide("Code", h("pre", {}, text))),
    link: places, image: places,
  };
  return tokens.map((token) => (Object.hasOwn(make, token.type) ? make[token.type](token) : token.raw));
}
