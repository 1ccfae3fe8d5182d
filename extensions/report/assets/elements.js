"use strict";
/* Create and update elements. Strings become text, never HTML. */

const byId = (id) => document.getElementById(id);

/** Return a new element. Children are elements, strings or nested lists; false and null are skipped. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag), isGiven = (value) => ![null, undefined, false].includes(value);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value;
    else if (isGiven(value)) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(isGiven));
  return element;
}

/** Make `old` equal to `fresh` with the fewest changes: focus, scroll positions and open details remain. */
function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data === fresh.data) return;
    if (!fresh.data.startsWith(old.data)) old.data = fresh.data;
    else old.appendData(fresh.data.slice(old.length));  // keeps the selection
    return;
  }
  const isKept = (name) => name === "open" || name === "style";
  for (const {name} of [...old.attributes]) {
    if (!isKept(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const {name, value} of fresh.attributes) {
    if (!isKept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  // The Content-Security-Policy forbids setting the style attribute as text.
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  const children = [...fresh.childNodes];
  for (const [i, child] of children.entries()) {
    if (i < old.childNodes.length) patch(old.childNodes[i], child);
    else old.append(child);
  }
  while (old.childNodes.length > children.length) old.lastChild.remove();
}

/** Save content as a file. */
function download(name, type, ...parts) {
  const link = h("a", {href: URL.createObjectURL(new Blob(parts, {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Replace the children of an element with `patch`. */
function fill(element, ...children) {
  const fresh = element.cloneNode(false);
  fresh.append(...h("div", {}, children).childNodes);
  patch(element, fresh);
}
