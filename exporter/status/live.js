"use strict";
// Keeps the page as the exporter would show it now: fetches the page itself and puts its <main> in place of this
// one. What it fetches was escaped by the exporter, and a document that is parsed so runs no script.
(() => {
  const PERIOD = 3000, PATIENCE = 10000;
  const line = document.getElementById("live");
  let last = Date.now(), asking = false;

  const tell = () => {
    const stale = Date.now() - last > 15000;
    document.body.classList.toggle("stale", stale);
    const since = new Date(last).toLocaleTimeString();
    const said = stale ? `No answer from the exporter since ${since}: what follows is from then.` : `live · ${since}`;
    if (said === line.textContent) return;
    // Read aloud when it goes wrong, and not every three seconds that it does not.
    if (stale) line.setAttribute("role", "alert"); else line.removeAttribute("role");
    line.textContent = said;
  };

  const renew = async () => {
    if (asking || document.hidden) return;
    asking = true;
    try {
      const answer = await fetch(location.href, {cache: "no-store", signal: AbortSignal.timeout(PATIENCE)});
      if (!answer.ok) return;
      const made = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = made.querySelector("main"), old = document.querySelector("main");
      if (!fresh) return;
      for (const details of old.querySelectorAll("details[id]")) {
        const twin = fresh.querySelector(`#${CSS.escape(details.id)}`);
        if (twin) twin.open = details.open;
      }
      const scrolled = [...old.querySelectorAll(".wide")].map((box) => box.scrollLeft);
      if (!old.contains(document.getSelection()?.anchorNode) || document.getSelection().isCollapsed) {
        old.replaceWith(document.adoptNode(fresh));
        fresh.querySelectorAll(".wide").forEach((box, index) => { box.scrollLeft = scrolled[index] || 0; });
        document.title = made.title;
      }
      last = Date.now();
    } catch {
      // The line above the page says so when it lasts.
    } finally {
      asking = false;
    }
  };

  setInterval(renew, PERIOD);
  setInterval(tell, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { renew(); } });
  tell();
})();
