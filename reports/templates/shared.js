// What several scripts of a page use.
const one = (selector) => document.querySelector(selector);
const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const made = (tag, text, name) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
};
// The name of a test in the list of requirements: tests of one function that passed have its name once, before them.
const nameOf = (test) => {
  const own = test.querySelector("code").textContent;
  const several = test.parentElement.closest(".function");
  return several ? several.querySelector("code").textContent + own : own;
};
const TITLES = { op: "reduction", layout: "input", out_layout: "output" };
