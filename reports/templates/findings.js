// Filters of the list. What is chosen is in the address, after "#", so that a person can send it.
(() => {
  const all = (selector, within) => [...(within || document).querySelectorAll(selector)];
  const [form, q, area, version, report, found, reset, nothing] = ["#filters", "#q", "#area", "#in", "#report", "#found", "#reset", "#nothing"].map(one);
  const chips = all("#filters [name=kind]");
  const NAMES = ["find", "kind", "area", "in", "report"];
  const words = (text) => text.split(" ").filter(Boolean);
  const findings = all(".finding").map((node) => ({
    node,
    kind: node.dataset.kind,
    area: node.dataset.area,
    report: node.dataset.report,
    there: words(node.dataset.in),
    gone: words(node.dataset.out),
    // What is searched is everything but the script.
    text: all("h3, summary, .pairs, .report", node).map((part) => part.textContent).join(" ").toLowerCase(),
  }));
  const newest = version.options[1].value;

  // The cells of the table are links where there is a script: to the defects that they count.
  const cells = all(".go").map((place) => {
    const link = made("a", place.textContent, "go");
    Object.assign(link.dataset, place.dataset);
    place.replaceWith(link);
    return { link, kind: link.dataset.kind, area: link.dataset.area, counts: link.closest("td") !== null };
  });

  const chosen = () => ({
    find: q.value,
    kinds: chips.filter((chip) => chip.checked).map((chip) => chip.value),
    area: area.value,
    in: version.value,
    report: report.value,
  });

  const values = (view) => [["find", view.find], ...view.kinds.map((kind) => ["kind", kind]), ["area", view.area], ["in", view.in], ["report", view.report]];

  function show() {
    const view = chosen();
    const sought = words(view.find.toLowerCase());
    const counts = new Map();
    const kinds = new Map();
    const sums = new Map();
    const add = (map, ...key) => { const name = key.join("\n"); map.set(name, (map.get(name) ?? 0) + 1); };
    const get = (map, ...key) => map.get(key.join("\n")) ?? 0;
    let kept = 0;
    let there = 0;
    for (const each of findings) {
      const fits = sought.every((word) => each.text.includes(word))
        && (view.report === "" || each.report === view.report)
        && (view.in === "" || (view.in.startsWith("!") ? each.gone.includes(view.in.slice(1)) : each.there.includes(view.in)));
      const in_area = view.area === "" || each.area === view.area;
      const of_kind = view.kinds.length === 0 || view.kinds.includes(each.kind);
      each.node.hidden = !(fits && in_area && of_kind);
      if (!fits) continue;
      // The table counts what fits in each area and of each kind, so that it shows where else to look.
      for (const where of [each.area, ""]) {
        for (const kind of [each.kind, ""]) add(counts, where, kind);
        if (each.there.includes(newest)) add(sums, where, "there");
        if (each.report === "reported") add(sums, where, "reported");
      }
      if (in_area) add(kinds, each.kind);
      if (in_area && of_kind) { kept += 1; if (each.there.includes(newest)) there += 1; }
    }
    for (const { link, kind, area: where, counts: number } of cells) {
      const n = get(counts, where, kind);
      if (number) link.textContent = n || "";
      const same = where === view.area && (kind === "" ? view.kinds.length === 0 : view.kinds.length === 1 && view.kinds[0] === kind);
      if (same && (where || kind) && number) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
      link.href = `#${new URLSearchParams(values({ ...view, area: where, kinds: kind ? [kind] : [] }).filter(([, value]) => value))}`;
      link.setAttribute("aria-label", number ? `${n} ${link.dataset.says}` : link.dataset.says);
      if (number && n === 0) for (const name of ["href", "aria-label", "aria-current"]) link.removeAttribute(name);
    }
    for (const row of all("[data-row]")) for (const sum of all("[data-sum]", row)) sum.textContent = get(sums, row.dataset.row, sum.dataset.sum) || "";
    for (const each of all("[data-count]")) each.textContent = get(kinds, each.dataset.count);
    const narrowed = values(view).some(([, value]) => value);
    found.textContent = `${count(kept, "defect")}${narrowed ? ` of ${findings.length}` : ""}, ${there} of them there in ${newest}`;
    reset.hidden = !narrowed;
    nothing.hidden = kept > 0;
  }

  let later = 0;

  // Without "now", the address is written once typing pauses.
  function write(now) {
    clearTimeout(later);
    const it = () => address.set(({ said }) => address.replaced(said, NAMES, values(chosen())));
    if (now) it(); else later = setTimeout(it, 200);
  }

  function choose() { show(); write(); }

  function set(said) {
    q.value = said.get("find") ?? "";
    for (const [menu, name] of [[area, "area"], [version, "in"], [report, "report"]]) {
      menu.value = said.get(name) ?? "";
      if (menu.selectedIndex < 0) menu.value = "";
    }
    for (const chip of chips) chip.checked = said.getAll("kind").includes(chip.value);
  }

  function clear() {
    set(new URLSearchParams());
    show();
    write(true);
  }

  // A link to a defect says no filters, and leaves them as they are, unless they hide the defect.
  function reveal() {
    const { id, said } = address.read();
    if (!address.fresh() || id === "" || NAMES.some((name) => said.has(name))) set(said);
    const target = id ? document.getElementById(id) : null;
    show();
    if (target && target.matches(".finding")) {
      if (target.hidden) { set(new URLSearchParams()); show(); }
      target.querySelector("details").open = true;
      target.scrollIntoView();
      target.querySelector("summary").focus({ preventScroll: true });
    } else if (id === "" && NAMES.some((name) => said.has(name))) form.scrollIntoView();
    write(true);
  }

  // What someone opens is in the address.
  one("#findings").addEventListener("click", (event) => {
    const summary = event.target.closest("summary");
    if (!summary) return;
    const { id } = summary.closest(".finding");
    const opens = !summary.parentElement.open;
    address.set((view) => { if (opens) view.id = id; else if (view.id === id) view.id = ""; });
  });

  q.addEventListener("input", choose);
  for (const menu of [area, version, report]) menu.addEventListener("change", choose);
  for (const chip of chips) chip.addEventListener("change", choose);
  form.addEventListener("submit", (event) => event.preventDefault());
  reset.addEventListener("click", clear);
  one("#again").addEventListener("click", clear);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); q.focus(); }
    if (event.key === "Escape" && document.activeElement === q) { q.value = ""; choose(); }
  });
  addEventListener("hashchange", reveal);
  form.hidden = false;
  reveal();
})();
