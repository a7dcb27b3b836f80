// Reads a report that someone chose: a page, JSON or a bundle. It comes from anyone, so all of it stays text.
const reading = (() => {
  const LARGEST = 48 << 20;  // bytes, as of a bundle that is unpacked
  const MOST = { test: 20_000, case: 200_000, fact: 2_000, level: 100, word: 100_000 };
  const LONGEST = 1_000;
  const BEGIN = '<script type="application/json" id="page-data">';
  const ANSWERS = ["conformant", "not conformant", "not shown", "partial", "not run"];
  const FIELDS = { Call: ["collective", "op", "dtype", "layout", "out_layout", "group", "form"], Setting: ["stack", "option", "value"] };

  class Refused extends Error {}

  const escape = (character) => {
    const code = character.codePointAt(0);
    if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  };
  const visible = (text) => text.replace(/[\p{C}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/gu, escape);

  function text(value, what) {
    if (typeof value !== "string") throw new Refused(`its ${what} is no text`);
    return visible(value.length > LONGEST ? `${value.slice(0, LONGEST)}…` : value);
  }
  function number(value, what) {
    if (!Number.isFinite(value) || value < 0) throw new Refused(`its ${what} is no number`);
    return value;
  }
  function list(value, what) {
    if (!Array.isArray(value)) throw new Refused(`its ${what}s are no list`);
    if (value.length > MOST[what]) throw new Refused(`it has ${value.length.toLocaleString("en")} ${what}s, and at most ${MOST[what].toLocaleString("en")} are compared`);
    return value;
  }
  function one_of(value, known, what) {
    if (!known.includes(value)) throw new Refused(`it has an unknown ${what}`);
    return value;
  }
  const record = (value, what) => {
    if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Refused(`its ${what} is no object`);
    return value;
  };

  // A report to compare: facts, and maps of levels, tests and cases. No key of a file becomes a property of an object.
  class Side {
    constructor({ profile, torch, made, conformant, minimums }) {
      this.profile = text(profile, "profile");
      this.torch = text(torch ?? "", "version of PyTorch");
      this.made = number(made, "time");
      this.conformant = text(conformant, "level");
      this.minimums = number(minimums ?? 0, "version of minimums");
      [this.around, this.levels, this.tests, this.cases] = [new Map(), new Map(), new Map(), new Map()];
    }
    fact(name, value) { this.around.set(text(name, "fact").slice(0, 200), text(value, "fact").slice(0, 200).trim()); }
    level(id, stack, state) { this.levels.set(text(id, "level"), { stack: text(stack, "stack"), state: one_of(state, ANSWERS, "answer") }); }
    test(name, verdict, headline) {
      this.tests.set(text(name, "test"), { verdict: one_of(verdict, VERDICTS, "verdict"), headline: text(headline ?? "", "headline").slice(0, 200) });
      if (this.tests.size > MOST.test) throw new Refused(`it has more than ${MOST.test.toLocaleString("en")} tests`);
    }
    tried(kind, values, size, verdict, times) {
      one_of(kind, Object.keys(FIELDS), "kind of case");
      if (values.length !== FIELDS[kind].length) throw new Refused("one of its cases has other fields");
      one_of(verdict, CASE_VERDICTS, "verdict of a case");
      const key = JSON.stringify([kind, ...values, number(size, "world size")]);
      this.cases.set(key, { kind, values: new Map(FIELDS[kind].map((field, at) => [field, values[at]])), size, verdict, times: number(times, "count") });
      if (this.cases.size > MOST.case) throw new Refused(`it has more than ${MOST.case.toLocaleString("en")} cases`);
    }
  }

  // The data of a page (reports/embedded.py).
  function of_page(data) {
    if (data.version !== 1) throw new Refused("it is a page of another Concord, which compares otherwise; make it anew from its results");
    const side = new Side(data);
    for (const fact of list(data.around, "fact")) side.fact(...list(fact, "fact"));
    for (const level of list(data.levels, "level")) side.level(...list(level, "level"));
    const order = list(data.order, "word");
    for (const [stem, ...several] of list(data.tests, "test")) {
      for (const [rest, verdict, headline] of several) side.test(`${text(stem, "test")}${text(rest, "test")}`, order[verdict], headline);
    }
    const words = list(data.words, "word").map((word) => text(word, "word"));
    for (const [numbers, ...sizes] of list(data.cases, "case")) {
      const [kind, ...values] = list(numbers, "word").map((at) => text(words[at], "word"));
      for (const [size, verdict, times] of sizes) side.tried(kind, values, size, list(data.verdicts, "word")[verdict], times);
    }
    return side;
  }

  // A report as JSON (reports/model.py). Facts have the names of reports/compare.py.
  function of_report(data) {
    if (!(data.version <= REPORT_VERSION)) throw new Refused("a newer Concord wrote it; open it with a page of that Concord");
    const environment = Object.entries(record(data.environment, "environment"));
    const side = new Side({ ...data, torch: environment.find(([name]) => name === "torch")?.[1], minimums: data.levels_version });
    for (const [name, value] of list(environment, "fact")) side.fact(name, value);
    side.fact("profile", `${text(data.profile, "profile")} ${text(data.profile_hash, "profile").slice(0, 12)}`);
    side.fact("subject", data.subject);
    side.fact("suite", text(data.suite_hash, "suite").slice(0, 12));
    side.fact("concord", data.concord);
    side.fact("version of the levels' minimums", data.levels_version ? String(number(data.levels_version, "version of minimums")) : "");
    side.fact("seeds", list(data.runs, "fact").map((run) => text(record(run, "run").seed, "seed")).join(", "));
    for (const level of list(data.levels, "level")) {
      const tested = Object.keys(record(record(level, "level").tests, "level")).length > 0;
      const answer = level.answer || (level.conformant === true ? "conformant" : "not conformant");
      side.level(level.id, level.stack, level.partial ? "partial" : tested || answer === "conformant" ? answer : "not run");
    }
    const fine = ["passed", "undeclared", "unsupported"];
    for (const test of list(data.tests, "test")) side.test(record(test, "test").nodeid, test.verdict, fine.includes(test.verdict) ? "" : test.headline);
    for (const each of list(data.cases ?? [], "case")) {
      const [tag, ...values] = list(record(each, "case").case, "word").map((word) => text(word, "word"));
      side.tried(tag === "call" ? "Call" : "Setting", values, each.size, each.verdict, each.count ?? 0);
    }
    return side;
  }

  // The file report.json of a bundle, inflated to no more than the size that the zip file says.
  async function unpacked(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    const damaged = new Refused("it is not a bundle that can be read; concord verify says why");
    const end = bytes.length - 22;
    if (end < 0 || view.getUint32(end, true) !== 0x06054b50) throw damaged;
    let at = view.getUint32(end + 16, true);
    for (let left = view.getUint16(end + 10, true); left > 0; left -= 1) {
      if (at + 46 > end || view.getUint32(at, true) !== 0x02014b50) throw damaged;
      const [method, packed, size, long] = [view.getUint16(at + 10, true), view.getUint32(at + 20, true), view.getUint32(at + 24, true), view.getUint16(at + 28, true)];
      const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + long));
      if (name === "report.json") {
        if (size > LARGEST) throw too_large("its report", size);
        const head = view.getUint32(at + 42, true);
        if (head + 30 > end || view.getUint32(head, true) !== 0x04034b50 || method !== 8) throw damaged;
        const from = head + 30 + view.getUint16(head + 26, true) + view.getUint16(head + 28, true);
        return inflated(bytes.subarray(from, Math.min(from + packed, end)), size, damaged);
      }
      at += 46 + long + view.getUint16(at + 30, true) + view.getUint16(at + 32, true);
    }
    throw new Refused("it is a zip file without a report.json, so no bundle");
  }

  async function inflated(bytes, size, damaged) {
    if (typeof DecompressionStream === "undefined") throw new Refused("this browser cannot unpack a bundle; choose its report.json or report.html");
    const data = new Uint8Array(size);
    let length = 0;
    const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
    try {
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        if (length + part.value.length > size) { await reader.cancel(); throw damaged; }
        data.set(part.value, length);
        length += part.value.length;
      }
    } catch { throw damaged; }
    if (length !== size) throw damaged;
    return data;
  }

  const too_large = (what, size) => new Refused(`${what} has ${Math.ceil(size / (1 << 20)).toLocaleString("en")} MiB, and at most ${LARGEST >> 20} are read`);

  function parsed(source) {
    let data;
    try { data = JSON.parse(source); } catch { throw new Refused("it is no report: choose a report.html, a report.json or a bundle (.zip)"); }
    if (data?.record === "run") throw new Refused("these are raw results; make a report of them: concord report FILE");
    if (data?.schema === "concord.page") return of_page(data);
    if (data?.schema === "concord.report") return of_report(data);
    throw new Refused("it is no report: choose a report.html, a report.json or a bundle (.zip)");
  }

  // Errors: Refused with a reason that follows the name of the file.
  async function read(file) {
    if (file.size > LARGEST) throw too_large("it", file.size);
    let bytes;
    try { bytes = new Uint8Array(await file.arrayBuffer()); } catch { throw new Refused("it cannot be read; is it a file?"); }
    if (bytes[0] === 0x50 && bytes[1] === 0x4b) bytes = await unpacked(bytes);
    let source;
    try { source = new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { throw new Refused("it is no text: choose a report.html, a report.json or a bundle (.zip)"); }
    const begin = source.indexOf(BEGIN);
    if (begin >= 0) source = source.slice(begin + BEGIN.length, source.indexOf("</", begin + BEGIN.length));
    else if (/^\s{0,9}</.test(source)) throw new Refused("it is a page without data to compare: an older Concord wrote it, or it is no report. Make it anew from its results, or choose its report.json");
    else if (/^\{"record":/.test(source)) throw new Refused("these are raw results; make a report of them: concord report FILE");
    return checked(() => parsed(source));
  }

  // Whatever a file has in place of what is expected, its reader fails with one clear error.
  function checked(make) {
    try { return make(); } catch (error) {
      throw error instanceof Refused ? error : new Refused("it is damaged: something in it is not what a report has");
    }
  }

  return { read, Refused, visible, FIELDS, LARGEST, of_text: (source) => checked(() => parsed(source)) };
})();
