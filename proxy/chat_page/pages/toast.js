// Shows a line at the foot about what just happened, perhaps with an undo button.

import { element } from "/dashboard/format.js";

const SHOWN_MS = 8000;

export class Toast {
  constructor(root) {
    this.root = root;
    this.timer = 0;
  }

  tell(text, label = "", action = null) {
    const close = () => (this.root.hidden = true);
    const closeUnused = () => {
      if (this.root.matches(":hover, :focus-within")) this.timer = setTimeout(closeUnused, SHOWN_MS);
      else close();
    };
    const parts = [element("span", { dir: "auto" }, text)];
    if (action) {
      const button = element("button", { type: "button" }, label);
      button.addEventListener("click", () => {
        close();
        action();
      });
      parts.push(button);
    }
    this.root.replaceChildren(...parts);
    this.root.hidden = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(closeUnused, SHOWN_MS);
  }
}
