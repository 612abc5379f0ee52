// Asks for the API key in a dialog over the page, so that nothing typed is lost.

import { signIn, signInState, signOut } from "./api.js";

const byId = (id) => document.getElementById(id);

export class SignInDialog {
  // Calls `signedIn` each time the page may call the API again.
  constructor(signedIn) {
    this.dialog = byId("sign-in");
    this.dialog.addEventListener("cancel", (event) => event.preventDefault()); // the page needs the key
    byId("sign-in-form").addEventListener("submit", async (event) => {
      event.preventDefault();
      byId("wrong").textContent = "";
      try {
        await signIn(byId("key").value);
      } catch (error) {
        byId("wrong").textContent = error.status === 401 ? "This key is not accepted." : error.message;
        byId("key").select();
        return;
      }
      byId("key").value = "";
      this.dialog.close();
      byId("sign-out").hidden = false;
      signedIn();
    });
    byId("sign-out").addEventListener("click", async () => {
      await signOut();
      byId("sign-out").hidden = true;
      this.ask();
    });
  }

  ask() {
    if (!this.dialog.open) this.dialog.showModal();
  }

  // Returns whether the API may be called; if not, asks for the key.
  async check() {
    const state = await signInState();
    byId("sign-out").hidden = !state.is_signed_in;
    if (state.needs_key && !state.is_signed_in) this.ask();
    return !state.needs_key || state.is_signed_in;
  }
}
