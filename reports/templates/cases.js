(() => {
  const { words, verdicts, cases } = JSON.parse(one("#page-data").textContent);
  const fields = { Call: ["collective", "op", "dtype", "layout", "out_layout", "group", "form"], Setting: ["stack", "option", "value"] };
  const sign = { crashed: "†", hung: "∞", failed: "✗", waived: "◐", passed: "✓", "not-reached": "…", undeclared: "○" };
  const [panel, head, sum, table, more] = ["#cases", "#cases-h", "#cases-sum", "#cases-table", "#all-cases"].map(one);
  const MOST = 100;
  let every = false;

  function wanted() {
    const said = address.place(address.read().said);
    const kind = said.has("stack") ? "Setting" : "Call";
    const known = [...fields[kind], "size"];
    const keys = [...said.keys()];
    if (keys.length === 0 || said.has("tests") || !keys.every((key) => known.includes(key) && said.get(key))) return null;
    return { kind, said, keys };
  }

  // One row for each case and verdict; sizes of worlds that agree are in one row.
  function rowsOf({ kind, said }) {
    const rows = [];
    for (const [numbers, ...sizes] of cases) {
      if (words[numbers[0]] !== kind) continue;
      const values = Object.fromEntries(fields[kind].map((field, at) => [field, words[numbers[at + 1]]]));
      const fits = (field) => !said.has(field) || said.get(field) === values[field] || (field === "dtype" && values[field] === "");
      if (!fields[kind].every(fits)) continue;  // without a dtype: the collective is not claimed at all
      const alike = new Map();
      for (const [size, verdict, times, ...tests] of sizes) {
        if (said.has("size") && said.get("size") !== String(size)) continue;
        const row = alike.get(verdict) || { values, verdict, sizes: [], times: 0, tests: new Set() };
        row.sizes.push(size);
        row.times += times;
        for (const test of tests) row.tests.add(test);
        alike.set(verdict, row);
      }
      rows.push(...alike.values());
    }
    return rows.sort((a, b) => a.verdict - b.verdict);
  }

  function linkTo(number) {
    const item = one(`.test[data-n="${number}"]`);
    if (!item) return null;
    const name = nameOf(item);
    const link = made("a", name.replace(/^suites\//, ""));
    link.href = `#test=${encodeURIComponent(name)}`;
    const entry = made("li");
    entry.append(link);
    const requirement = item.closest(".requirement");
    if (requirement && requirement.id) {
      const its = made("a", requirement.id, "id");
      its.href = `#${encodeURIComponent(requirement.id)}`;
      entry.append(" ", its);
    }
    if (item.dataset.owner) entry.append(" ", made("span", `waived, of ${item.dataset.owner}`, "owner"));
    const reproducer = item.querySelector(".reproducer + p + pre");
    if (reproducer) entry.append(made("pre", reproducer.textContent));
    return entry;
  }

  function testsOf(row) {
    const links = [...row.tests].map(linkTo).filter(Boolean);
    const list = made("ul");
    list.append(...links.slice(0, 2));
    if (links.length <= 2) return list;
    const rest = made("details");
    const inner = made("ul");
    inner.append(...links.slice(2));
    rest.append(made("summary", `${links.length - 2} more`), inner);
    const both = made("div");
    both.append(list, rest);
    return both;
  }

  function show() {
    const asked = wanted();
    for (const link of document.querySelectorAll("a.cell:not(.vs)")) {
      const here = asked !== null && address.place(new URLSearchParams(link.hash.slice(1))).toString() === asked.said.toString();
      if (here) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
    panel.hidden = asked === null;
    if (asked === null) return;
    const from = one("a.cell[aria-current]:not(.vs)");
    if (from) {
      for (let node = from.closest("details"); node; node = node.parentElement.closest("details")) node.open = true;
      from.closest(".scroll").after(panel);
    }
    const { kind, said, keys } = asked;
    const rows = rowsOf(asked);
    const given = new Set(keys);
    head.textContent = keys.map((key) => key === "size" ? count(Number(said.get(key)), "rank") : said.get(key)).join(", ");
    const tally = verdicts.map((verdict, at) => [rows.filter((row) => row.verdict === at).reduce((n, row) => n + row.sizes.length, 0), verdict])
      .filter(([n]) => n > 0).map(([n, verdict]) => `${n.toLocaleString("en")} ${verdict.replace("-", " ")}`);
    sum.textContent = tally.join(", ") || "No case that was tried fits this address.";
    const columns = fields[kind].filter((field) => !given.has(field) && rows.some((row) => row.values[field]));
    const top = made("tr");
    for (const title of ["verdict", ...columns.map((field) => TITLES[field] || field), "ranks", "times", "tests and requirements"]) {
      const cell = made("th", title);
      cell.scope = "col";
      top.append(cell);
    }
    const body = made("tbody");
    for (const row of every ? rows : rows.slice(0, MOST)) {
      const line = made("tr");
      const verdict = verdicts[row.verdict];
      const mark = made("td");
      mark.append(made("span", `${sign[verdict] || ""} ${verdict.replace("-", " ")}`, `mark ${verdict}`));
      line.append(mark, ...columns.map((field) => made("td", row.values[field])));
      line.append(made("td", row.sizes.filter(Boolean).join(", ")), made("td", row.times ? row.times.toLocaleString("en") : "", "num"));
      const tests = made("td");
      tests.append(testsOf(row));
      line.append(tests);
      body.append(line);
    }
    const header = made("thead");
    header.append(top);
    table.replaceChildren(header, body);
    more.hidden = every || rows.length <= MOST;
    more.textContent = `Show all ${rows.length.toLocaleString("en")} rows`;
    panel.scrollIntoView({ block: "nearest" });
    panel.focus({ preventScroll: true });
  }

  one(".tried").addEventListener("mouseover", (event) => {  // what it is for a screen reader, for a mouse
    const cell = event.target.closest("a.cell");
    if (cell) cell.title = cell.getAttribute("aria-label");
  });
  more.addEventListener("click", () => { every = true; show(); });
  one("#close").addEventListener("click", () => {
    const from = one("a.cell[aria-current]:not(.vs)");
    address.set((view) => { for (const name of address.place(view.said).keys()) view.said.delete(name); });
    show();
    if (from) from.focus();
  });
  addEventListener("hashchange", () => { every = false; show(); });
  show();
})();
