// Light, dark, or as the system has it.

const THEMES = ["auto", "light", "dark"];
const KEPT = "outpace-theme";

export function listenForTheme(button) {
  let theme = kept();
  const show = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem(KEPT, theme);
    } catch {
      // a browser that keeps nothing
    }
    show();
  });
  show();
}

function kept() {
  try {
    const found = localStorage.getItem(KEPT);
    return THEMES.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}
