// The button that changes between light and dark colors, which begin as the reader's.
(() => {
  const theme = one("#theme");
  let dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const paint = () => { theme.textContent = dark ? "Light colors" : "Dark colors"; };
  theme.addEventListener("click", () => { dark = !dark; document.documentElement.dataset.theme = dark ? "dark" : "light"; paint(); });
  theme.hidden = false;
  paint();
})();
