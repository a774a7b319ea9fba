"use strict";
// Keeps the page as the exporter would show it now: fetches the page itself and puts its <main> in place of this
// one. What it fetches was escaped by the exporter, and a document that is parsed so runs no script. Draws the plots
// with uPlot from the numbers that come along with each; a plot stays the same over renewals, with what it points at.
(() => {
  const PERIOD = 3000, PATIENCE = 10000, HEIGHT = 170, COLOURS = 8;
  const line = document.getElementById("live");
  const plots = new Map();
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

  const scaled = (value, base, units) => {
    let place = 0;
    while (Math.abs(value) >= base && place < units.length - 1) { value /= base; place += 1; }
    return `${+value.toPrecision(3)}${units[place]}`;
  };
  const words = {
    seconds: (value) => value < 1 ? `${+(value * 1000).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`,
    bytes: (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
    ratio: (value) => `${+(value * 100).toPrecision(3)} %`,
    watts: (value) => `${+value.toPrecision(4)} W`,
    "": (value) => Math.abs(value) < 1e4 ? `${+value.toPrecision(4)}` : scaled(value, 1000, ["", "k", "M", "G", "T"]),
  };
  const clock = (at, seconds) => new Date(at * 1000).toLocaleTimeString(
    [], {hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(seconds && {second: "2-digit"})});
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const make = (area, told) => {
    const say = (value) => value == null ? "–" : (words[told.unit] || words[""])(value);
    const axis = {stroke: colour("--dim"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}};
    const powers = Array.from({length: 50}, (_, power) => 2 ** power);
    const plot = new uPlot({
      width: area.clientWidth, height: HEIGHT,
      cursor: {drag: {x: false, y: false}},
      scales: {y: {range: (_, low, high) => {
        // At least a tenth of the value: noise is not drawn as a change, and the labels of the axis differ.
        const bottom = told.floor ?? Math.min(low, high - Math.abs(high) * 0.1);
        const room = (high - bottom) * 0.05 || Math.abs(high) * 0.05 || 1;
        return [told.floor ?? bottom - room, high + room];
      }}},
      axes: [
        {...axis, size: 26, space: 70, values: (_, times) => times.map((at) => clock(at, times.at(-1) - times[0] < 600))},
        {...axis, size: 66, values: (_, ticks) => ticks.map(say), ...(told.unit === "bytes" && {incrs: powers})},
      ],
      series: [
        {label: "at", value: (_, at) => at == null ? "–" : clock(at, true)},
        ...told.names.map((name, place) => (
          {label: name, stroke: colour(`--c${place % COLOURS}`), width: 1.5, points: {show: false}, value: (_, value) => say(value)}
        )),
      ],
    }, told.data, area);
    const canvas = plot.root.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", area.querySelector("svg").getAttribute("aria-label"));
    return plot;
  };

  const draw = () => {
    const before = new Map(plots);
    plots.clear();
    for (const figure of document.querySelectorAll("figure[data-plot]")) {
      const area = figure.querySelector(".area"), told = JSON.parse(figure.dataset.plot);
      const names = told.names.join("\n"), known = before.get(figure.id);
      const plot = known && known.names === names ? known.plot : make(area, told);
      area.classList.toggle("single", told.names.length === 1);
      area.replaceChildren(plot.root);
      if (known && known.plot === plot) plot.setData(told.data);
      plots.set(figure.id, {plot, names});
    }
  };
  const fit = () => {
    for (const {plot} of plots.values()) plot.setSize({width: plot.root.parentElement.clientWidth, height: HEIGHT});
  };
  const redraw = () => { plots.clear(); renew(); };

  const reachable = (root) => [...root.querySelectorAll("a, summary, [tabindex]")];

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
      if (!old.contains(document.getSelection()?.anchorNode) || document.getSelection().isCollapsed) {
        const focused = reachable(old).indexOf(document.activeElement);
        old.replaceWith(document.adoptNode(fresh));
        reachable(fresh)[focused]?.focus({preventScroll: true});
        document.title = made.title;
        draw();
      }
      last = Date.now();
    } catch {
      // The line above the page says so when it lasts.
    } finally {
      asking = false;
    }
  };

  draw();
  setInterval(renew, PERIOD);
  setInterval(tell, 1000);
  addEventListener("resize", fit);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { renew(); } });
  tell();
})();
