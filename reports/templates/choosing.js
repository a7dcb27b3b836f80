// Compares this page with a file that someone chooses or drops. The file stays in this browser.
(() => {
  const [picker, error, panel] = ["#other", "#compare-error", "#comparison"].map(one);
  const own = reading.of_text(one("#page-data").textContent);
  const mine = new Set([...document.querySelectorAll("#requirements .test")].map(nameOf));
  let other = null;
  let asked = 0;

  const link = (name) => mine.has(name) ? `#test=${encodeURIComponent(name)}` : null;
  const shown = () => { if (other) comparing.show(...(own.made <= other.made ? [own, other] : [other, own]), link); };

  function say(text) { error.textContent = text; }

  async function take(file) {
    const number = asked += 1;
    say("");
    let found;
    try { found = await reading.read(file); } catch (reason) {
      if (number !== asked) return;
      say(`${reading.visible(file.name.slice(0, 200))}: ${reason instanceof reading.Refused ? reason.message : "it cannot be read"}.`);
      return;
    }
    if (number !== asked) return;  // another one was chosen meanwhile
    other = found;
    shown();
    comparing.reveal();
    if (!address.read().said.toString().includes("vs-")) { panel.focus({ preventScroll: true }); panel.scrollIntoView(); }
  }

  one("#compare").addEventListener("click", () => picker.click());
  picker.addEventListener("change", () => { if (picker.files.length > 0) take(picker.files[0]); picker.value = ""; });
  const files = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  addEventListener("dragover", (event) => { if (files(event)) { event.preventDefault(); document.body.classList.add("dropping"); } });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (!files(event)) return;
    event.preventDefault();
    if (event.dataTransfer.files.length === 1) take(event.dataTransfer.files[0]); else say("Drop one file: this page is compared with one other report.");
  });
  one("#vs-close").addEventListener("click", () => {
    other = null;
    panel.hidden = true;
    address.set(({ said }) => { for (const name of [...said.keys()].filter(address.isOfComparison)) said.delete(name); });
    one("#compare").focus();
  });
  comparing.wire(shown);
  addEventListener("hashchange", () => { shown(); if (other) comparing.reveal(); });
  if ([...address.read().said.keys()].some(address.isOfComparison)) say("This address is of a comparison. Choose the other report again (Compare with…) to see it.");
})();
