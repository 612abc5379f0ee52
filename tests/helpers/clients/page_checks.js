// What the dashboard's tests ask of a page: is it readable, does it fit, does all have a name?
window.checks = (() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  function rgba(colour) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  }

  function behind(element) {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  }

  function light(colour) {
    const [r, g, b] = colour.slice(0, 3).map((each) => {
      const share = each / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function contrast(one, other) {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }

  const isShown = (element) => element.checkVisibility() && element.getClientRects().length > 0;
  const hasText = (element) =>
    [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());

  // Every text against what is behind it: [ratio, needed, text], of those that fall short.
  function text() {
    const all = [...document.body.querySelectorAll("*")].filter((each) => isShown(each) && hasText(each));
    const rows = all.map((each) => {
      const style = getComputedStyle(each);
      const size = parseFloat(style.fontSize);
      const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      return [contrast(rgba(style.color), behind(each)), isLarge ? 3 : 4.5, each.textContent.trim().slice(0, 40)];
    });
    return { count: rows.length, short: rows.filter(([ratio, needed]) => ratio < needed) };
  }

  // Every part of a bar against its card: 3 to 1 is what graphics need.
  function bars() {
    const rows = [...document.querySelectorAll(".bar")].filter(isShown).map((each) => [
      contrast(rgba(getComputedStyle(each).backgroundColor), behind(each.parentElement)), 3, each.className,
    ]);
    return { count: rows.length, short: rows.filter(([ratio, needed]) => ratio < needed) };
  }

  const overflow = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;
  return { text, bars, overflow };
})();
