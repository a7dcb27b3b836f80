// What several scripts of a page use.
const one = (selector) => document.querySelector(selector);
const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const made = (tag, text, name) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
};
const TITLES = { op: "reduction", layout: "input", out_layout: "output" };
