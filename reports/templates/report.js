(() => {
  const all = (selector, within) => [...(within || document).querySelectorAll(selector)];
  const [q, stack, found, reset, cellName, nothing] = ["#q", "#stack", "#found", "#reset", "#cell", "#nothing"].map(one);
  const chips = all("#filters [name=verdict]");
  let cell = null;
  const requirements = all(".requirement").map((node) => ({
    node,
    head: node.querySelector("summary").textContent.toLowerCase(),
    tests: all(".test", node).map((test) => {
      const [verdict, size, ...stack] = test.dataset.of.split(" ");
      return { node: test, verdict, size, stack: stack.join(" "), name: nameOf(test).toLowerCase() };
    }),
  }));

  function show() {
    const words = q.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = new Set(chips.filter((chip) => chip.checked).map((chip) => chip.value));
    const narrowed = words.length > 0 || verdicts.size > 0 || stack.value !== "" || cell !== null;
    const seen = new Set();
    let kept = 0;
    for (const requirement of requirements) {
      let fits = 0;
      for (const { node, name, ...data } of requirement.tests) {
        const good = (verdicts.size === 0 || verdicts.has(data.verdict))
          && (stack.value === "" || data.stack === stack.value)
          && (cell === null || (data.stack === cell.stack && data.size === cell.size))
          && words.every((word) => name.includes(word) || requirement.head.includes(word));
        node.hidden = !good;
        if (good) { fits += 1; seen.add(name); }
      }
      requirement.node.hidden = fits === 0;
      kept += fits > 0 ? 1 : 0;
    }
    for (const several of all(".function")) several.hidden = all(".test", several).every((node) => node.hidden);
    for (const group of all(".group")) group.hidden = !all(".requirement", group).some((node) => !node.hidden);
    found.textContent = `${count(seen.size, "test")} of ${count(kept, "requirement")}`;
    reset.hidden = !narrowed;
    nothing.hidden = kept > 0;
    cellName.hidden = cell === null;
    cellName.textContent = cell === null ? "" : `${cell.stack}, ${count(Number(cell.size), "rank")}`;
  }

  let later = 0;

  // The address has the filters that are on. Without "now", it is written once typing pauses.
  function write(now) {
    clearTimeout(later);
    const it = () => address.set(({ said }) => {
      const values = [["find", q.value], ["in", stack.value], ...chips.filter((chip) => chip.checked).map((chip) => ["verdict", chip.value])];
      address.replaced(said, address.FILTERS, values);
      if (said.has("tests") && cell === null) { said.delete("tests"); said.delete("size"); }
    });
    if (now) it(); else later = setTimeout(it, 200);
  }

  function choose() { show(); write(); }

  function clear() {
    q.value = "";
    stack.value = "";
    cell = null;
    for (const chip of chips) chip.checked = false;
    show();
    write(true);
  }

  // Filters as the address says them. A link within the page says none, and leaves them as they are.
  function restore(said) {
    if (address.fresh() && ![...said.keys()].some(address.isFilter)) return;
    q.value = said.get("find") ?? "";
    stack.value = said.get("in") ?? "";
    if (stack.selectedIndex < 0) stack.value = "";
    for (const chip of chips) chip.checked = said.getAll("verdict").includes(chip.value);
  }

  function reveal() {
    const { id, said } = address.read();
    restore(said);
    cell = null;
    if (said.has("tests")) {
      stack.value = "";
      cell = { stack: said.get("tests"), size: said.get("size") };
    }
    show();
    write(true);
    const target = id ? document.getElementById(id) : null;
    if (target && target.tagName === "DETAILS") {
      if (target.hidden) clear();
      target.open = true;
    }
    const named = (node) => nameOf(node) === said.get("test");
    const test = said.has("test") && ((target && all(".test", target).find(named)) || all("#requirements .test").find(named));
    if (test) {
      if (test.hidden || test.closest(".requirement").hidden) clear();
      for (let node = test.closest("details"); node; node = node.parentElement.closest("details")) node.open = true;
      const own = test.querySelector("details");
      if (own) own.open = true;
      test.scrollIntoView({ block: "center" });
      (own ? own.querySelector("summary") : test).focus();
    } else if (target) target.scrollIntoView();
    else if (cell !== null) one("#requirements").scrollIntoView();
  }

  // What someone opens or closes is in the address.
  one("#requirements").addEventListener("click", (event) => {
    const summary = event.target.closest("summary");
    if (!summary) return;
    const node = summary.parentElement;
    const test = node.parentElement.matches(".test") ? nameOf(node.parentElement) : "";
    if (!test && !node.matches(".requirement")) return;
    address.set((view) => {
      const chosen = test ? view.said.get("test") === test : view.id === node.id;
      if (!node.open) {
        view.id = node.closest(".requirement").id;
        if (test) view.said.set("test", test); else view.said.delete("test");
      } else if (chosen) {
        view.said.delete("test");
        if (!test) view.id = "";
      }
    });
  });

  q.addEventListener("input", choose);
  stack.addEventListener("change", () => { cell = null; choose(); });
  for (const chip of chips) chip.addEventListener("change", choose);
  one("#filters").addEventListener("submit", (event) => event.preventDefault());
  reset.addEventListener("click", clear);
  one("#again").addEventListener("click", clear);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); q.focus(); }
    if (event.key === "Escape" && document.activeElement === q) { q.value = ""; choose(); }
  });

  const opened = [];
  addEventListener("beforeprint", () => {
    for (const node of all("details.why, .waiver")) if (!node.open) { node.open = true; opened.push(node); }
  });
  addEventListener("afterprint", () => { for (const node of opened.splice(0)) node.open = false; });
  addEventListener("hashchange", reveal);
  reveal();
})();
