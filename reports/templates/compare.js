// Shows what differs between two reports (reading.js), as `concord compare` does, and by cell of the matrix.
const comparing = (() => {
  const BAD = ["crashed", "hung", "failed", "flaky"];
  const KINDS = new Map([["newly_failing", "newly failing"], ["lost", "no longer run"], ["removed", "removed"], ["fixed", "fixed"], ["changed", "changed"], ["added", "added"]]);
  const WORSE = ["newly_failing", "lost", "removed"];
  const SIGNS = { newly_failing: "✗", lost: "▽", removed: "−", fixed: "✓", changed: "±", added: "+", same: "=" };
  const LEVELS = ["conformant", "partial", "not shown", "not run", "not conformant"];
  const TABLES = [
    ["Collectives and dtypes", "Call", ["collective"], ["dtype"]], ["Reductions and dtypes", "Call", ["op"], ["dtype"]],
    ["Collectives and world sizes", "Call", ["collective"], ["size"]], ["Collectives and layouts of the input", "Call", ["collective"], ["layout"]],
    ["Collectives and layouts of the output", "Call", ["collective"], ["out_layout"]], ["Collectives and groups", "Call", ["collective"], ["group"]],
    ["Collectives and forms of the call", "Call", ["collective"], ["form"]], ["Options of stacks and world sizes", "Setting", ["stack", "option", "value"], ["size"]],
  ];
  const MOST = 100;
  const MOST_ROWS = 200;

  const having = (node, ...children) => { node.append(...children); return node; };
  const words = (verdict) => verdict.replace("-", " ");
  const mark = (verdict) => made("span", verdict ? words(verdict) : "not there", `mark ${verdict || "none"}`);
  const change = (was, now) => having(made("span", undefined, "change"), mark(was), made("span", " → ", "soft"), mark(now));

  // The same kinds as in reports/compare.py.
  function kind_of(was, now) {
    if (was === now) return "same";
    if (!now) return "removed";
    if (BAD.includes(now) && !BAD.includes(was)) return "newly_failing";
    if (!was) return "added";
    if (BAD.includes(was) && now === "passed") return "fixed";
    if (["passed", "waived"].includes(was) && ["not-run", "not-reached", "unsupported", "undeclared"].includes(now)) return "lost";
    return "changed";
  }

  function differences(before, after) {
    const tests = [];
    const cases = [];
    const all = (field) => [...new Set([...before[field].keys(), ...after[field].keys()])];
    for (const name of all("tests").sort()) {
      const [was, now] = [before.tests.get(name)?.verdict ?? "", after.tests.get(name)?.verdict ?? ""];
      tests.push({ name, was, now, kind: kind_of(was, now), headline: after.tests.get(name)?.headline ?? "" });
    }
    for (const key of all("cases")) {
      const [old, now] = [before.cases.get(key), after.cases.get(key)];
      cases.push({ ...(now ?? old), was: old?.verdict ?? "", now: now?.verdict ?? "", kind_of: kind_of(old?.verdict ?? "", now?.verdict ?? "") });
    }
    const around = all("around").map((name) => [name, before.around.get(name) ?? "", after.around.get(name) ?? ""]).filter(([, was, now]) => was !== now);
    const levels = all("levels").sort().map((id) => ({ id, stack: (after.levels.get(id) ?? before.levels.get(id)).stack, was: before.levels.get(id)?.state ?? "not run", now: after.levels.get(id)?.state ?? "not run" }));
    const lower = after.conformant < before.conformant && before.minimums === after.minimums;
    return { tests, cases, around, levels, worse: lower || tests.some(({ kind }) => WORSE.includes(kind)) };
  }

  const title_of = (side) => [side.profile || "no profile", side.torch && `PyTorch ${side.torch}`, side.made ? `${new Date(side.made * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC` : ""].filter(Boolean).join(", ");

  // The view of two reports in #comparison. link: the address of a test on this page, or none.
  function show(first, second, link) {
    const { said } = address.read();
    const [before, after] = said.has("vs-swap") ? [second, first] : [first, second];
    const found = differences(before, after);
    one("#vs-before").textContent = title_of(before);
    one("#vs-after").textContent = title_of(after);
    const kinds = [...KINDS].map(([kind, title]) => [kind, title, found.tests.filter((test) => test.kind === kind)]).filter(([, , tests]) => tests.length > 0);
    const unchanged = found.tests.filter(({ kind }) => kind === "same").length;
    const counts = kinds.map(([, title, tests]) => `${count(tests.length, "test")} ${title}`);
    one("#vs-sum").textContent = [...counts, `${unchanged.toLocaleString("en")} unchanged`].join(", ");
    const verdict = one("#vs-verdict");
    verdict.className = found.worse ? "bad" : "good";
    verdict.textContent = found.worse ? "✕ Worse than before:" : "✓ Not worse than before:";
    levels_of(found);
    around_of(found);
    tables_of(found);
    cases_of(found);
    kinds_of(kinds);
    tests_of(kinds, link);
    one("#comparison").hidden = false;
  }

  function levels_of({ levels }) {
    const classes = { conformant: "passed", partial: "waived", "not shown": "undeclared", "not run": "none", "not conformant": "failed" };
    const body = made("tbody");
    for (const { id, stack, was, now } of levels) {
      const head = made("th", `${id} ${stack}`);
      head.scope = "row";
      const said = was === now ? "" : LEVELS.indexOf(now) > LEVELS.indexOf(was) ? " ▽ lower" : " △ higher";
      const [old, after] = [was, now].map((state) => having(made("td"), made("span", state, `mark ${classes[state]}`)));
      body.append(having(made("tr"), head, old, having(after, said)));
    }
    one("#vs-levels").replaceChildren(heading(["level", "before", "after"]), body);
  }

  function heading(titles) {
    return having(made("thead"), having(made("tr"), ...titles.map((title) => {
      const cell = made(title ? "th" : "td", title);
      if (title) cell.scope = "col";
      return cell;
    })));
  }

  function around_of({ around }) {
    const body = made("tbody");
    for (const [name, was, now] of around) {
      const head = made("th", name);
      head.scope = "row";
      body.append(having(made("tr"), head, made("td", was || "none"), made("td", now || "none")));
    }
    one("#vs-around").replaceChildren(heading(["", "before", "after"]), body);
    one("#vs-around").hidden = around.length === 0;
    one("#vs-alike").hidden = around.length > 0;
  }

  const field = (each, name) => name === "size" ? String(each.size || "") : each.values.get(name) ?? "";

  // One table for each pair of fields in which something differs, with those rows and columns alone.
  function tables_of({ cases }) {
    const place = one("#vs-tables");
    place.after(one("#vs-cases"));
    place.replaceChildren();
    for (const [title, kind, across, down] of TABLES) {
      const cells = new Map();
      for (const each of cases) {
        if (each.kind !== kind || ![...across, ...down].every((name) => name === "value" || field(each, name))) continue;
        const [row, column] = [across, down].map((names) => new URLSearchParams(names.map((name) => [name, field(each, name)])).toString());
        if (!cells.has(row)) cells.set(row, new Map());
        const line = cells.get(row);
        if (!line.has(column)) line.set(column, []);
        line.get(column).push(each);
      }
      const differs = (several) => several.some((each) => each.kind_of !== "same");
      const rows = [...cells].filter(([, line]) => [...line.values()].some(differs)).sort(([a], [b]) => in_order(a, b));
      const columns = [...new Set(rows.flatMap(([, line]) => [...line].filter(([, several]) => differs(several)).map(([column]) => column)))].sort(in_order);
      if (rows.length > 0) place.append(table_of(title, rows.slice(0, MOST_ROWS), columns.slice(0, MOST_ROWS), rows.length));
    }
    one("#vs-no-cases").hidden = place.children.length > 0;
  }

  // The order of the vocabulary; others come after it, numbers by size.
  function in_order(one, two) {
    const place = (fields) => {
      const [name, value] = [...new URLSearchParams(fields)][0];
      const at = (FIELD_ORDER[name] ?? []).indexOf(value);
      return at < 0 ? Infinity : at;
    };
    const [a, b] = [place(one), place(two)];
    return a === b ? one.localeCompare(two, "en", { numeric: true }) : a - b;
  }

  const name_of = (fields) => [...new URLSearchParams(fields)].map(([, value]) => value).join(" ");

  function table_of(title, rows, columns, all) {
    const table = made("table", undefined, "cells");
    table.append(made("caption", title), heading(["", ...columns.map(name_of)]));
    const body = made("tbody");
    for (const [row, line] of rows) {
      const head = made("th", name_of(row));
      head.scope = "row";
      const entry = having(made("tr"), head);
      for (const column of columns) entry.append(cell_of(row, column, line.get(column)));
      body.append(entry);
    }
    table.append(body);
    const around = having(made("div", undefined, "scroll"), table);
    around.tabIndex = 0;
    around.setAttribute("role", "region");
    around.setAttribute("aria-label", `${title}, what differs`);
    if (all > rows.length) around.append(made("p", `And ${count(all - rows.length, "row")} that are not shown.`, "soft"));
    return around;
  }

  function cell_of(row, column, several) {
    if (!several) return having(made("td", undefined, "none"), made("span", "·"));
    const kind = [...KINDS.keys()].find((each) => several.some((one) => one.kind_of === each)) ?? "same";
    const figure = (side) => {
      const ran = several.filter((each) => each[side] && !["undeclared", "not-reached"].includes(each[side]));
      const passed = ran.filter((each) => each[side] === "passed").length;
      return ran.length === 0 ? "none" : passed === ran.length ? String(passed) : `${passed}/${ran.length}`;
    };
    if (kind === "same") return having(made("td", undefined, "none"), made("span", "="));
    const link = made("a", undefined, `cell vs ${kind}`);
    link.href = `#vs-cell=${encodeURIComponent(`${row}&${column}`)}`;
    link.append(made("span", SIGNS[kind], "sign"), ` ${figure("was")} → ${figure("now")}`);
    const differing = several.filter((each) => each.kind_of !== "same");
    link.setAttribute("aria-label", `${name_of(row)}, ${name_of(column)}: ${[...KINDS].map(([each, title]) => [differing.filter((one) => one.kind_of === each).length, title]).filter(([n]) => n > 0).map(([n, title]) => `${n} ${title}`).join(", ")}; passed ${figure("was")} before, ${figure("now")} after`);
    return having(made("td"), link);
  }

  // The cases of the cell that the address names, or none.
  function cases_of({ cases }) {
    const { said } = address.read();
    const panel = one("#vs-cases");
    const wanted = [...new URLSearchParams(said.get("vs-cell") ?? "")];
    panel.hidden = wanted.length === 0;
    for (const link of document.querySelectorAll("a.cell.vs")) {
      if (wanted.length > 0 && new URLSearchParams(link.hash.slice(1)).get("vs-cell") === said.get("vs-cell")) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
    if (panel.hidden) return;
    const rows = cases.filter((each) => each.kind_of !== "same" && wanted.every(([name, value]) => field(each, name) === value));
    const order = [...KINDS.keys()];
    rows.sort((a, b) => order.indexOf(a.kind_of) - order.indexOf(b.kind_of));
    one("#vs-cases-h").textContent = wanted.map(([name, value]) => name === "size" ? count(Number(value), "rank") : value).filter(Boolean).join(", ");
    one("#vs-cases-sum").textContent = rows.length > 0 ? `${count(rows.length, "case")} that ${rows.length === 1 ? "differs" : "differ"}${rows.length > MOST ? `, of which ${MOST} are shown` : ""}` : "No case that differs fits this address.";
    const given = new Set(wanted.map(([name]) => name));
    const columns = reading.FIELDS[rows[0]?.kind ?? "Call"].filter((name) => !given.has(name) && rows.some((each) => field(each, name)));
    const body = made("tbody");
    for (const each of rows.slice(0, MOST)) {
      body.append(having(made("tr"), made("td", KINDS.get(each.kind_of)), having(made("td"), change(each.was, each.now)), ...columns.map((name) => made("td", field(each, name))), made("td", field(each, "size"))));
    }
    one("#vs-cases-table").replaceChildren(heading(["what", "verdict", ...columns.map((name) => TITLES[name] ?? name), "ranks"]), body);
    const from = one("a.cell.vs[aria-current]");
    if (from) from.closest(".scroll").after(panel);
  }

  function kinds_of(kinds) {
    const chosen = address.read().said.getAll("vs-kind");
    const legend = one("#vs-kinds");
    legend.replaceChildren();
    for (const [kind, title, tests] of kinds) {
      const box = made("input");
      [box.type, box.name, box.value, box.checked] = ["checkbox", "vs-kind", kind, chosen.includes(kind)];
      legend.append(having(made("label", undefined, "chip"), box, `${SIGNS[kind]} ${title} ${tests.length.toLocaleString("en")}`));
    }
  }

  function tests_of(kinds, link) {
    const { said } = address.read();
    const chosen = said.getAll("vs-kind").filter((kind) => KINDS.has(kind));
    one("#vs-find").value = said.get("vs-find") ?? "";
    const asked = one("#vs-find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const place = one("#vs-tests");
    place.replaceChildren();
    let fitting = 0;
    for (const [kind, title, tests] of kinds) {
      if (chosen.length > 0 && !chosen.includes(kind)) continue;
      const fit = tests.filter(({ name, headline }) => asked.every((word) => `${name} ${headline}`.toLowerCase().includes(word)));
      if (fit.length === 0) continue;
      fitting += fit.length;
      const items = made("ul", undefined, "tests");
      const add = (several) => { for (const test of several) items.append(item_of(test, link, said.get("vs-test"))); };
      const at = Math.max(MOST, 1 + fit.findIndex(({ name }) => name === said.get("vs-test")));
      add(fit.slice(0, at));
      place.append(made("h4", `${SIGNS[kind]} ${count(fit.length, "test")} ${title}`), items);
      if (fit.length > at) {
        const more = made("button", `Show ${(fit.length - at).toLocaleString("en")} more`);
        more.type = "button";
        more.addEventListener("click", () => { add(fit.slice(at)); more.remove(); items.children[at].querySelector("a").focus(); });
        place.append(more);
      }
    }
    const all = kinds.reduce((n, [, , tests]) => n + tests.length, 0);
    one("#vs-found").textContent = all === 0 ? "No test differs." : `${count(fitting, "test")} of ${all.toLocaleString("en")} that differ`;
    one("#vs-filters").hidden = all === 0;
  }

  function item_of({ name, was, now, headline }, link, chosen) {
    const item = made("li", undefined, "test");
    const to = made("a");
    to.append(made("code", name));
    to.href = link(name) ?? `#vs-test=${encodeURIComponent(name)}`;
    item.append(change(was, now), " ", to);
    if (headline) item.append(made("div", headline, "what"));
    if (chosen === name) item.setAttribute("aria-current", "true");
    return item;
  }

  // Wires the controls of #comparison; shown: called when the view has to be made anew.
  function wire(shown) {
    let later = 0;
    const choose = () => {
      clearTimeout(later);
      address.set(({ said }) => {
        address.replaced(said, ["vs-kind", "vs-find"], [["vs-find", one("#vs-find").value], ...[...document.querySelectorAll("[name=vs-kind]:checked")].map((box) => ["vs-kind", box.value])]);
      });
      shown();
    };
    one("#vs-find").addEventListener("input", () => { clearTimeout(later); later = setTimeout(choose, 150); });
    one("#vs-kinds").addEventListener("change", (event) => {
      const { value } = event.target;
      choose();
      one(`[name=vs-kind][value=${value}]`).focus();
    });
    one("#vs-filters").addEventListener("submit", (event) => { event.preventDefault(); choose(); });
    one("#vs-swap").addEventListener("click", () => {
      address.set(({ said }) => { if (said.has("vs-swap")) said.delete("vs-swap"); else said.set("vs-swap", "1"); });
      shown();
    });
    one("#vs-close-cases").addEventListener("click", () => {
      const from = one("a.cell.vs[aria-current]");
      address.set(({ said }) => said.delete("vs-cell"));
      shown();
      if (from) [...document.querySelectorAll("a.cell.vs")].find(({ hash }) => hash === from.hash)?.focus();
    });
  }

  // Goes to what the address names of a comparison that is shown.
  function reveal() {
    const { said } = address.read();
    const target = said.has("vs-cell") ? one("#vs-cases") : said.has("vs-test") ? one("#vs-tests [aria-current]") : null;
    if (!target) return;
    target.scrollIntoView({ block: "nearest" });
    (target.querySelector("a, button") ?? target).focus({ preventScroll: true });
  }

  return { show, wire, reveal, differences, kind_of };
})();
