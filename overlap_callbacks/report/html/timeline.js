"use strict";
// Kernels of a step by stream, by name: what is pointed at is told, and a part of the step can be looked at closely.
// page.js draws it with the tools that all charts share.
globalThis.overlapStreams = ({ plot, axis, heading, figure, fitted, labels, color, line, muted }) => (data, width) => {
  const end = d3.max(data.modes, (d) => d.step_ms);
  const least = end / 2000; // a call of a thousandth of a step can be made as wide as half of the chart
  let [from, to] = data.zoom ?? [0, end]; // kept when the width changes
  const bar = Object.assign(document.createElement("div"), { className: "zoom" });
  const place = document.createElement("div");

  const zoomed = (a, b) => {
    const length = Math.min(Math.max(b - a, least), end);
    const start = Math.min(Math.max(a, 0), end - length);
    [from, to] = data.zoom = [start, start + length];
    show();
  };
  const by = (factor) => zoomed((from + to) / 2 - ((to - from) * factor) / 2, (from + to) / 2 + ((to - from) * factor) / 2);
  const along = (share) => zoomed(from + (to - from) * share, to + (to - from) * share);
  const button = (text, name, act, idle) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, ariaLabel: name });
    made.addEventListener("click", act);
    bar.append(made);
    return () => { made.disabled = idle(); };
  };
  const buttons = [
    button("+", "Zoom in", () => by(0.5), () => to - from <= least),
    button("−", "Zoom out", () => by(2), () => to - from >= end),
    button("←", "Earlier", () => along(-0.5), () => from <= 0),
    button("→", "Later", () => along(0.5), () => to >= end),
    button("Whole step", "Show the whole step", () => zoomed(0, end), () => to - from >= end),
  ];
  const range = bar.appendChild(document.createElement("output"));

  function show() {
    for (const update of buttons) update();
    range.textContent = to - from >= end ? "Drag over a part of the step to look closely at it." : `${figure(from, "ms")} to ${figure(to, "ms")}`;
    place.replaceChildren(...data.modes.flatMap(drawn));
  }

  function drawn(mode, i) {
    const last = i === data.modes.length - 1;
    const { margin, tick } = labels(mode.lanes, width);
    const inner = width - margin - 16;
    const calls = mode.calls.map(([name, lane, start, length]) => {
      const [text, communicates] = mode.names[name];
      const x1 = Math.max(start, from), x2 = Math.min(start + length, to);
      return {
        x1, x2, lane: mode.lanes[lane], text, fill: communicates ? "communication" : "compute", room: ((x2 - x1) / (to - from)) * inner,
        tip: `${text}\n${figure(length, "ms")}, from ${figure(start, "ms")}\n${mode.lanes[lane]}, ${mode.mode.toLowerCase()} step`,
      };
    }).filter((d) => d.x2 > d.x1);
    const shape = { x1: "x1", x2: "x2", y: "lane", fill: (d) => color(d.fill) };
    const height = mode.lanes.length * 26 + 4 + (last ? 34 : 4);
    const svg = plot({
      width, marginLeft: margin, marginTop: 4, marginBottom: last ? 34 : 4, height,
      x: axis("ms from the start of the step", { domain: [from, to], ticks: Math.max(3, width / 110), axis: last ? "bottom" : null }),
      y: { domain: mode.lanes, label: null, tickSize: 0, tickFormat: tick, padding: 0.16 },
      marks: [
        Plot.gridX({ stroke: line, strokeOpacity: 1, ticks: Math.max(3, width / 110) }),
        Plot.barX(calls.filter((d) => d.room <= 4), shape),
        Plot.barX(calls.filter((d) => d.room > 4), { ...shape, insetRight: 1 }),
        Plot.text(calls.filter((d) => d.room > 44), {
          x: (d) => (d.x1 + d.x2) / 2, y: "lane", text: (d) => fitted(d.text, d.room - 8), fill: (d) => color(`on-${d.fill}`), pointerEvents: "none",
        }),
        mode.step_ms >= from && mode.step_ms <= to ? Plot.ruleX([mode.step_ms], { stroke: muted, strokeDasharray: "3,3" }) : null,
        Plot.tip(calls, Plot.pointer({ x: (d) => (d.x1 + d.x2) / 2, y: "lane", title: "tip", maxRadius: Infinity, px: (d) => (d.x1 + d.x2) / 2 })),
      ],
    }, `${data.title}: ${mode.mode}, ${calls.length} calls`);
    select(svg);
    return [heading(`${mode.mode}, ${figure(mode.step_ms, "ms")}${mode.left_out}`), svg];
  }

  // Dragging chooses a part of the step; a double click shows the whole.
  function select(svg) {
    const scale = svg.scale("x");
    let start = null, mark = null;
    const at = (event) => d3.pointer(event, svg)[0];
    svg.classList.add("selectable");
    // Before the tip, which keeps a press to itself.
    svg.addEventListener("pointerdown", (event) => { start = at(event); }, { capture: true });
    svg.addEventListener("pointermove", (event) => {
      if (start === null || Math.abs(at(event) - start) < 4) return;
      mark ??= svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "rect"));
      const [low, high] = d3.extent([start, at(event)]);
      for (const [name, value] of Object.entries({ class: "selection", x: low, width: high - low, y: 0, height: svg.getAttribute("height") })) mark.setAttribute(name, value);
    });
    const done = (event) => {
      const began = start;
      start = null;
      if (mark === null) return;
      mark.remove();
      mark = null;
      const [low, high] = d3.extent([began, at(event)]);
      zoomed(scale.invert(low), scale.invert(high));
    };
    svg.addEventListener("pointerup", done);
    svg.addEventListener("pointerleave", done);
    svg.addEventListener("dblclick", () => zoomed(0, end));
  }

  show();
  return [bar, place];
};
