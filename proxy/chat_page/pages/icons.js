// Draws the page's icons; each button with an icon has an accessible name too.

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  plus: "M12 5v14M5 12h14",
  gear: "M4 8h10M18 8h2M4 16h2M10 16h10M16 6v4M8 14v4",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  clip: "M20 11.500l-8 8a5 5 0 0 1-7-7l8.500-8.500a3.400 3.400 0 0 1 4.800 4.800l-8.500 8.500a1.700 1.700 0 0 1-2.400-2.400l7.800-7.800",
  copy: "M9 9h10v10H9zM5 15V5h10",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M19 12a7 7 0 1 1-2.200-5.100M19 4v4h-4",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

// Adds the icons to the buttons of the page's HTML.
export function drawIcons() {
  for (const button of document.querySelectorAll("[data-icon]")) button.prepend(icon(button.dataset.icon));
}
