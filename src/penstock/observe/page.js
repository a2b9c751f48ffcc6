// Zooming, phase toggles and the cursor. The page can be read without this script.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const WIDTH = 1000, LANE_HEIGHT = 24; // as in plots.py and timeline.py
  const MIN_WIDTH = 0.2; // the narrowest part of 0..1000 that can be shown
  const figures = [...document.querySelectorAll("figure.plot")];
  const views = new Map(); // the visible part of 0..1000 of each time window
  let active = document.getElementById("timeline") || figures[0];

  // Formatting, the same as in labels.py.

  function threeDigits(value) {
    const whole = String(Math.trunc(Math.abs(value))).length;
    return value.toFixed(Math.max(0, 3 - whole));
  }
  function scaled(value, units) {
    for (const [unit, scale] of units) if (Math.abs(value) >= scale) return threeDigits(value / scale) + " " + unit;
    const [unit, scale] = units[units.length - 1];
    return (value / scale).toFixed(0) + " " + unit;
  }
  const K = 1024;
  const BYTES = [["TiB", K ** 4], ["GiB", K ** 3], ["MiB", K ** 2], ["KiB", K], ["B", 1]];
  const MOVED = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
  const TIME = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  const say = {
    bytes: (v) => scaled(v, BYTES),
    rate: (v) => scaled(v, MOVED) + "/s",
    share: (v) => Math.round(100 * v) + " %",
    seconds: (v) => (v === 0 ? "0 s" : scaled(v, TIME)),
    number: (v) => String(+v.toPrecision(6)),
    step: (v) => Math.round(v).toLocaleString("en"),
  };

  // The time since the start of a plot's window, or the step, at an x of 0..1000.
  function sayX(figure, x) {
    const start = +figure.dataset.start, width = figure.dataset.end - start;
    return figure.dataset.x === "step" ? say.step(start + (width * x) / WIDTH) : say.seconds((width * x) / WIDTH);
  }

  // Zooming: plots of the same time window move together.

  const windowOf = (figure) => figure.dataset.start + "|" + figure.dataset.end;
  const viewOf = (figure) => views.get(windowOf(figure)) || [0, WIDTH];

  function show(figure, a, b) {
    const width = Math.min(WIDTH, Math.max(MIN_WIDTH, b - a));
    a = Math.min(WIDTH - width, Math.max(0, a));
    views.set(windowOf(figure), [a, a + width]);
    for (const other of figures) if (windowOf(other) === windowOf(figure)) redraw(other);
  }

  function redraw(figure) {
    const [a, b] = viewOf(figure), svg = figure.querySelector(".area svg");
    const box = svg.getAttribute("viewBox").split(" ");
    svg.setAttribute("viewBox", [a, box[1], b - a, box[3]].join(" "));
    figure.dataset.view = a.toFixed(3) + " " + b.toFixed(3);
    for (const name of figure.querySelectorAll(".band .phase")) {
      const left = Math.max(a, +name.dataset.a), right = Math.min(b, +name.dataset.b);
      name.style.left = (100 * (left - a)) / (b - a) + "%";
      name.style.width = (100 * Math.max(0, right - left)) / (b - a) + "%";
      name.style.visibility = right > left ? "" : "hidden";
    }
    const labels = [...figure.querySelectorAll(".x span")];
    labels.forEach((label, k) => {
      label.textContent = sayX(figure, a + ((b - a) * k) / (labels.length - 1));
    });
  }

  function zoom(figure, factor, at = 0.5) {
    const [a, b] = viewOf(figure), middle = a + at * (b - a);
    show(figure, middle - (middle - a) * factor, middle + (b - middle) * factor);
  }
  function move(figure, share) {
    const [a, b] = viewOf(figure);
    show(figure, a + share * (b - a), b + share * (b - a));
  }
  const actions = {
    in: (figure) => zoom(figure, 0.5), out: (figure) => zoom(figure, 2),
    left: (figure) => move(figure, -0.25), right: (figure) => move(figure, 0.25),
    all: (figure) => show(figure, 0, WIDTH),
  };
  const keys = {
    "+": "in", "=": "in", "-": "out", _: "out", 0: "all", ArrowLeft: "left", ArrowRight: "right",
  };

  // The cursor and the values under it.

  const part = (area, event) => {
    const box = area.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };

  function mark(area, name, left, width) {
    let overlay = area.querySelector("." + name);
    if (!overlay) {
      overlay = document.createElement("div");
      overlay.className = name;
      area.append(overlay);
    }
    overlay.style.left = 100 * left + "%";
    if (width !== undefined) overlay.style.width = 100 * width + "%";
  }
  const unmark = (area, name) => area.querySelector("." + name)?.remove();

  function before(list, value) { // index of the last x that is not above value
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] <= value) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  function showReadout(figure, x, target) {
    const parts = [(figure.dataset.x === "step" ? "step " : "at ") + sayX(figure, x)];
    if (figure.id === "timeline") {
      const step = data.steps[selected], box = step.boxes[target?.dataset?.i];
      if (box) parts.push(describe(step, box));
    } else {
      for (const line of data.plots[figure.id]?.lines || []) {
        const at = before(line.x, x);
        if (at >= 0) parts.push(line.name + " " + say[figure.dataset.unit](line.y[at]));
      }
    }
    figure.querySelector(".readout").textContent = parts.join(" · ");
  }

  function describe(step, [track, a, b, name, phase, nbytes, count]) {
    const seconds = (step.seconds * (b - a)) / WIDTH;
    const parts = [step.tracks[track], step.names[name] + (count > 1 ? " and " + (count - 1) + " more" : "")];
    parts.push(say.seconds(seconds));
    if (nbytes) parts.push(scaled(nbytes, MOVED) + (count === 1 && seconds > 0 ? ", " + say.rate(nbytes / seconds) : ""));
    if (phase >= 0) parts.push(data.phases[phase]);
    return parts.join(" · ");
  }

  // Mouse and keyboard input of one figure.

  function listen(figure) {
    const area = figure.querySelector(".area");
    let from = null;
    area.tabIndex = 0;
    area.setAttribute("role", "group");
    area.setAttribute("aria-label", "Plot: plus and minus zoom, arrow keys move, 0 shows everything");
    const toX = (share) => { const [a, b] = viewOf(figure); return a + share * (b - a); };
    area.addEventListener("focus", () => { active = figure; });
    area.addEventListener("keydown", (event) => {
      const action = !event.ctrlKey && !event.metaKey && !event.altKey && actions[keys[event.key]];
      if (action) { event.preventDefault(); action(figure); }
    });
    area.addEventListener("wheel", (event) => {
      // The wheel must scroll the page: it zooms only a plot that has been clicked, or with a key held.
      if (document.activeElement !== area && !event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      zoom(figure, (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, part(area, event));
    }, { passive: false });
    area.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      active = figure;
      from = part(area, event);
      area.focus({ preventScroll: true });
      area.setPointerCapture(event.pointerId);
    });
    area.addEventListener("pointermove", (event) => {
      const at = part(area, event);
      if (from !== null) mark(area, "chosen", Math.min(from, at), Math.abs(at - from));
      mark(area, "cursor", at);
      showReadout(figure, toX(at), document.elementFromPoint(event.clientX, event.clientY));
    });
    area.addEventListener("pointerup", (event) => {
      const at = part(area, event), a = Math.min(from ?? at, at), b = Math.max(from ?? at, at);
      if (from !== null && b - a > 0.015) show(figure, toX(a), toX(b));
      from = null;
      unmark(area, "chosen");
    });
    area.addEventListener("pointercancel", () => { from = null; unmark(area, "chosen"); });
    area.addEventListener("pointerleave", () => { if (from === null) unmark(area, "cursor"); });
  }

  // Selecting another step in the timeline.

  let selected = 0;
  function svgElement(name, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }
  function selectStep(at) {
    const figure = document.getElementById("timeline"), step = data.steps[at];
    const svg = figure.querySelector(".area svg"), [lanes, boxes] = svg.querySelectorAll("g");
    selected = at;
    lanes.replaceChildren(...step.tracks.map((_, k) =>
      svgElement("rect", { x: 0, y: LANE_HEIGHT * k, width: WIDTH, height: LANE_HEIGHT - 2, class: "lane" })));
    boxes.replaceChildren(...step.boxes.map(([track, a, b, , phase], i) => svgElement("rect", {
      x: a, y: LANE_HEIGHT * track, width: Math.max(0.3, b - a), height: LANE_HEIGHT - 2,
      class: "box c" + step.colours[track] + " p" + phase, "data-i": i,
    })));
    const height = LANE_HEIGHT * step.tracks.length;
    svg.setAttribute("viewBox", "0 0 " + WIDTH + " " + height);
    svg.style.height = height + "px";
    svg.setAttribute("aria-label", "Timeline of step " + step.number + ", " + step.boxes.length + " boxes.");
    const span = (text) => { const element = document.createElement("span"); element.textContent = text; return element; };
    figure.querySelector(".tracks").replaceChildren(...step.tracks.map(span));
    figure.querySelector(".band").replaceChildren(...step.segments.map(([phase, a, b]) => {
      const label = span(data.phases[phase]);
      label.className = "phase p" + phase;
      label.dataset.a = a;
      label.dataset.b = b;
      return label;
    }));
    figure.querySelector(".merged").textContent = step.merged;
    figure.querySelector("details").hidden = at !== 0; // its table describes the step that was shown first
    figure.dataset.start = step.start;
    figure.dataset.end = step.start + step.seconds;
    figure.dataset.step = step.number;
    show(figure, 0, WIDTH);
  }

  for (const hidden of document.querySelectorAll(".tools")) hidden.hidden = false;
  figures.forEach(listen);
  for (const button of document.querySelectorAll("button[data-do]"))
    button.addEventListener("click", () => active && actions[button.dataset.do](active));
  for (const toggle of document.querySelectorAll("button[data-phase]"))
    toggle.addEventListener("click", () => {
      const off = document.body.classList.toggle("off" + toggle.dataset.phase);
      toggle.setAttribute("aria-pressed", String(!off));
    });
  document.getElementById("step")?.addEventListener("change", (event) => selectStep(+event.target.value));
  document.documentElement.dataset.ready = "true";
})();
