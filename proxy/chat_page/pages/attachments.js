// Accepts images and files by paste, drop and file dialog, and shows those of the next message.

import { bytes, element } from "/dashboard/format.js";

import { icon } from "./icons.js";
import { plainName } from "./plain_text.js";

const IMAGES = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const FILE_BYTES_MAX = 20 * 1024 * 1024; // of one file
const SUM_BYTES_MAX = 40 * 1024 * 1024; // of a message; a request may have 64 MB of base64

export class Attachments {
  // Calls `refused(reason)` for a rejected file; `imageReason` returns why images are rejected, or "".
  constructor(list, { refused, imageReason }) {
    this.list = list;
    this.refused = refused;
    this.imageReason = imageReason;
    this.files = [];
    this.drafts = new Map(); // name -> the files of a message that is not sent yet
    this.name = "";
    this.reading = Promise.resolve(); // resolves once all chosen files are read
  }

  // Shows the files of the draft with this name.
  choose(name) {
    if (name === this.name) return;
    this.drafts.set(this.name, this.files);
    this.name = name;
    this.files = this.drafts.get(name) ?? [];
    this.#show();
  }

  add(files) {
    this.reading = this.reading.then(() => this.#read(files));
    return this.reading;
  }

  async #read(files) {
    const draft = this.files;
    for (const file of files) {
      const reason = this.#reasonAgainst(file);
      if (reason) this.refused(reason);
      else await attached(file).then((made) => draft.push(made), (error) => this.refused(error.message));
    }
    this.#show();
  }

  #reasonAgainst(file) {
    const name = plainName(file.name || "The picture", 80);
    const sum = this.files.reduce((size, each) => size + each.size, file.size);
    if (IMAGES.includes(file.type) && this.imageReason()) return `${name} is not taken: ${this.imageReason()}`;
    if (file.type.startsWith("image/") && !IMAGES.includes(file.type)) return `${name} is ${file.type}; PNG, JPEG, GIF and WebP are taken.`;
    if (file.size > FILE_BYTES_MAX) return `${name} has ${bytes(file.size)}; ${bytes(FILE_BYTES_MAX)} are taken.`;
    if (sum > SUM_BYTES_MAX) return `With ${name} the message has ${bytes(sum)}; ${bytes(SUM_BYTES_MAX)} are taken.`;
    return "";
  }

  take() {
    const files = this.files;
    this.files = [];
    this.#show();
    return files;
  }

  #show() {
    this.list.hidden = !this.files.length;
    this.list.replaceChildren(...this.files.map((file) => {
      const remove = element("button", { type: "button", className: "remove" }, icon("close"));
      remove.setAttribute("aria-label", `Remove ${file.name}`);
      remove.addEventListener("click", () => {
        this.files.splice(this.files.indexOf(file), 1);
        this.#show();
      });
      return element("li", {}, shown(file), remove);
    }));
  }
}

async function attached(file) {
  const kind = IMAGES.includes(file.type) ? "image" : "file";
  const data = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  return { kind, name: plainName(file.name || kind, 120), size: file.size, data };
}

// Returns an element that shows the file: its image, or its name.
export function shown(file) {
  if (file.kind === "image") return element("img", { src: file.data, alt: file.name, className: "picture" });
  const name = element("span", { dir: "auto", className: "file-name" }, file.name);
  return element("span", { className: "file" }, name, element("span", { className: "note" }, bytes(file.size)));
}
