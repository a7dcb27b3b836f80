// What is after "#" in the address holds the view: an id or a place, filters, and what is chosen of a comparison.
const address = (() => {
  const FILTERS = ["find", "in", "verdict"];
  const isFilter = (name) => FILTERS.includes(name);
  const isOfComparison = (name) => name.startsWith("vs-");

  function read() {
    const parts = location.hash.slice(1).split("&").filter(Boolean);
    let id = "";
    if (parts.length > 0 && !parts[0].includes("=")) {
      id = parts.shift();
      try { id = decodeURIComponent(id); } catch { /* not of ours */ }
    }
    return { id, said: new URLSearchParams(parts.join("&")) };
  }

  function written({ id, said }) {
    const text = [encodeURIComponent(id), said.toString()].filter(Boolean).join("&");
    return text ? `#${text}` : location.pathname + location.search;
  }

  // Replace the address without a step in the browser's history, and without going anywhere.
  function set(change) {
    const view = read();
    change(view);
    try { history.replaceState({ ours: true }, "", written(view)); } catch { /* a browser refuses too many at once */ }
  }

  function replaced(said, names, values) {
    for (const name of names) said.delete(name);
    for (const [name, value] of values) if (value) said.append(name, value);
  }

  // The names and values of a place: without filters, the test and the comparison.
  const place = (said) => new URLSearchParams([...said].filter(([name]) => !isFilter(name) && !isOfComparison(name) && name !== "test"));

  return { read, written, set, replaced, place, FILTERS, isFilter, isOfComparison, fresh: () => history.state === null };
})();
