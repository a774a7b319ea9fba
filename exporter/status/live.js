"use strict";
// Refreshes the page: fetches the page itself and replaces <main>. The exporter has escaped the fetched text, and
// DOMParser runs no script. uPlot draws the plots from the data of each figure; a plot and its cursor survive a refresh.
// While text of <main> is selected, <main> is not replaced, because the replacement would clear the selection.
// All times are UTC with 24 hours, as in the text of the page.
(() => {
  const REFRESH_MS = 3000, TIMEOUT_MS = 10000, STALE_MS = 15000, HEIGHT = 170, COLORS = 8;
  const statusLine = document.getElementById("live");
  const plots = new Map();
  let lastFetchTime = Date.now(), contentTime = lastFetchTime, isFetching = false;

  const clock = (seconds, withSeconds) => new Date(seconds * 1000).toISOString().slice(11, withSeconds ? 19 : 16);

  const isTextSelected = () => {
    const selection = document.getSelection(), main = document.querySelector("main");
    return selection !== null && !selection.isCollapsed && selection.getRangeAt(0).intersectsNode(main);
  };

  const statusText = (isStale) => {
    const content = `${clock(contentTime / 1000, true)} UTC`;
    if (isStale) return `No page from the exporter since ${clock(lastFetchTime / 1000, true)} UTC; the page is as of ${content}.`;
    return isTextSelected() ? `paused while text is selected · ${content}` : `live · ${content}`;
  };

  const updateStatusLine = () => {
    const isStale = Date.now() - lastFetchTime > STALE_MS;
    document.body.classList.toggle("stale", isStale);
    const text = statusText(isStale);
    if (text === statusLine.textContent) return;
    // Screen readers announce an outage, but not each refresh.
    if (isStale) statusLine.setAttribute("role", "alert"); else statusLine.removeAttribute("role");
    statusLine.textContent = text;
  };

  const scaled = (value, base, units) => {
    let index = 0;
    while (Math.abs(value) >= base && index < units.length - 1) { value /= base; index += 1; }
    return `${+value.toPrecision(3)}${units[index]}`;
  };
  const formatters = {
    seconds: (value) => value < 1 ? `${+(value * 1000).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`,
    bytes: (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
    ratio: (value) => `${+(value * 100).toPrecision(3)} %`,
    watts: (value) => `${+value.toPrecision(4)} W`,
    "": (value) => Math.abs(value) < 1e4 ? `${+value.toPrecision(4)}` : scaled(value, 1000, ["", "k", "M", "G", "T"]),
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const createPlot = (area, content) => {
    const format = (value) => value == null ? "–" : (formatters[content.unit] || formatters[""])(value);
    // Without a cursor the legend has the last value of each line.
    const latestOrValue = (plot, value, line, index) => format(index == null ? plot.data[line].at(-1) : value);
    const axis = {stroke: color("--dim"), grid: {stroke: color("--line"), width: 1}, ticks: {show: false}};
    const powers = Array.from({length: 50}, (_, power) => 2 ** power);
    const plot = new uPlot({
      width: area.clientWidth, height: HEIGHT,
      cursor: {drag: {x: false, y: false}},
      scales: {y: {range: (_, low, high) => {
        // At least a tenth of the value: noise is not drawn as a change, and the labels of the axis differ.
        const bottom = content.floor ?? Math.min(low, high - Math.abs(high) * 0.1);
        const room = (high - bottom) * 0.05 || Math.abs(high) * 0.05 || 1;
        return [content.floor ?? bottom - room, high + room];
      }}},
      axes: [
        {...axis, size: 26, space: 70, values: (_, times) => times.map((time) => clock(time, times.at(-1) - times[0] < 600))},
        {...axis, size: 66, values: (_, ticks) => ticks.map(format), ...(content.unit === "bytes" && {incrs: powers})},
      ],
      series: [
        {label: "UTC", value: (_, time) => time == null ? "–" : clock(time, true)},
        ...content.names.map((name, index) => (
          {label: name, stroke: color(`--c${content.colors[index] % COLORS}`), width: 1.5, points: {show: false}, value: latestOrValue}
        )),
      ],
    }, content.data, area);
    const canvas = plot.root.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", area.querySelector("svg").getAttribute("aria-label"));
    return plot;
  };

  const draw = () => {
    const previousPlots = new Map(plots);
    plots.clear();
    for (const figure of document.querySelectorAll("figure[data-plot]")) {
      const area = figure.querySelector(".area"), content = JSON.parse(figure.dataset.plot);
      const names = [...content.names, ...content.colors].join("\n"), previous = previousPlots.get(figure.id);
      const plot = previous && previous.names === names ? previous.plot : createPlot(area, content);
      area.classList.toggle("single", content.names.length === 1);
      area.replaceChildren(plot.root);
      if (previous && previous.plot === plot) plot.setData(content.data);
      plots.set(figure.id, {plot, names});
    }
  };
  const resize = () => {
    for (const {plot} of plots.values()) plot.setSize({width: plot.root.parentElement.clientWidth, height: HEIGHT});
  };
  const redraw = () => { plots.clear(); refresh(); };

  const identity = (element) => [element.tagName, element.getAttribute("href"), element.closest("[id]")?.id].join();
  const similarElements = (root, element) =>
    [...root.querySelectorAll("a, summary, [tabindex]")].filter((other) => identity(other) === identity(element));

  const refresh = async () => {
    if (isFetching || document.hidden) return;
    isFetching = true;
    try {
      const response = await fetch(location.href, {cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS)});
      if (!response.ok) return;
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const newMain = page.querySelector("main"), oldMain = document.querySelector("main");
      if (!newMain) return;
      for (const details of oldMain.querySelectorAll("details[id]")) {
        const newDetails = newMain.querySelector(`#${CSS.escape(details.id)}`);
        if (newDetails) newDetails.open = details.open;
      }
      lastFetchTime = Date.now();
      if (!isTextSelected()) {
        const focused = document.activeElement ?? document.body, position = similarElements(oldMain, focused).indexOf(focused);
        oldMain.replaceWith(document.adoptNode(newMain));
        similarElements(newMain, focused)[position]?.focus({preventScroll: true});
        document.title = page.title;
        draw();
        contentTime = lastFetchTime;
      }
    } catch {
      // updateStatusLine reports an outage after STALE_MS.
    } finally {
      isFetching = false;
    }
  };

  draw();
  setInterval(refresh, REFRESH_MS);
  setInterval(updateStatusLine, 1000);
  addEventListener("resize", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { refresh(); } });
  updateStatusLine();
})();
