"use strict";
// Draws the charts, each for the width that there is. Colours are variables of the style sheet, so neither a change of
// theme nor print needs a new drawing.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const color = (name) => `var(--${name})`;
  const ink = color("ink"), muted = color("muted"), line = color("line");

  // -- figures in words

  const scale = (unit) => (unit === "fraction" ? 100 : 1);
  const unitName = (unit) => (unit === "fraction" ? "%" : unit);
  // As decimals_of of analysis/formatting.py has it: a figure has the same digits in words, tables and charts.
  const digits = (value, unit) => {
    const size = Math.abs(value) * (unit === "W" ? 10 : 1);
    if (unit === "fraction") return size < 10 ? 1 : 0;
    if (unit === "MHz") return 0;
    return size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 || !size ? 2 : 3;
  };
  // A bandwidth in GB/s, as rate_in_words has it: three digits that count.
  const rate = (value) => {
    const [name, size] = [["GB/s", 1], ["MB/s", 1e-3], ["kB/s", 1e-6]].find(([, size]) => value.toPrecision(3) >= size) ?? ["B/s", 1e-9];
    return `${Number((value / size).toPrecision(3)).toLocaleString("en-US")} ${name}`;
  };
  const figure = (value, unit, decimals = digits(value, unit)) => {
    if (unit === "rate") return rate(value);
    const shown = value * scale(unit);
    const text = shown.toLocaleString("en-US", {
      minimumFractionDigits: decimals, maximumFractionDigits: decimals,
    }).replace(/^-(?=[0.,]*$)/, "").replace("-", "−");
    return unit === "fraction" ? `${text}%` : `${text} ${unit}`;
  };
  const bytes = (value) => {
    const [name, size] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, size]) => value >= size) ?? ["B", 1];
    return `${Number((value / size).toPrecision(3))} ${name}`;
  };
  const withInterval = (d, unit) =>
    figure(d.value, unit) + (d.low == null ? "" : `\n95% interval ${figure(d.low, unit, digits(d.value, unit))} to ${figure(d.high, unit, digits(d.value, unit))}`);

  // -- text of a width

  const pen = document.createElement("canvas").getContext("2d");
  const widthOf = (text) => {
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(text).width;
  };
  const fitted = (text, room) => {
    if (widthOf(text) <= room) return text;
    // Names that begin alike often differ at their ends, so it is the middle that goes.
    const cut = (kept) => `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
    let [low, high] = [0, text.length];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (widthOf(cut(middle)) <= room) low = middle;
      else high = middle - 1;
    }
    return cut(low);
  };
  // Room for labels at the left: what they need, and at most two fifths of the chart.
  const labels = (names, width) => {
    const room = Math.min(Math.max(0, ...names.map(widthOf)), 0.4 * width - 12);
    return { margin: Math.ceil(room) + 12, tick: (name) => fitted(name, room + 0.5) };
  };

  const plot = (options, summary) =>
    Plot.plot({
      marginTop: 8,
      marginRight: 16,
      marginBottom: 34,
      ...options,
      ariaLabel: summary,
      style: { fontFamily: "inherit", fontSize: "12px", background: "none", color: ink },
    });
  const axis = (label, more) => ({ label, labelAnchor: "right", labelArrow: "none", tickSize: 3, ...more });
  const heading = (text) => Object.assign(document.createElement("h5"), { textContent: text });
  const extent = (values) => d3.extent(values.filter((value) => value != null));

  // -- charts: each takes its data and a width, and gives elements

  const draw = {
    // Horizontal bars from zero, with whiskers and their values; one set for each run, on one scale.
    bars({ rows, unit, title }, width) {
      // A very wide interval is cut at the frame, so that the bars stay long enough to be compared.
      const frame = 1.01 * Math.min(d3.max(rows, (d) => Math.max(d.value, d.high ?? 0)), 1.6 * d3.max(rows, (d) => d.value));
      const { margin, tick } = labels(rows.map((d) => d.label), width);
      const runs = d3.groups(rows, (d) => d.run);
      return runs.flatMap(([run, found], i) => {
        const last = i === runs.length - 1;
        const drawn = plot({
          width, marginLeft: margin, marginRight: 84, marginBottom: last ? 34 : 4,
          height: found.length * 30 + 8 + (last ? 34 : 4),
          x: axis(`${unit} per step`, { domain: [0, frame], ticks: Math.max(3, width / 110), axis: last ? "bottom" : null }),
          y: { domain: found.map((d) => d.label), label: null, tickSize: 0, tickFormat: tick, padding: 0.28 },
          marks: [
            Plot.gridX({ stroke: line, strokeOpacity: 1, ticks: Math.max(3, width / 110) }),
            Plot.barX(found, { x: "value", y: "label", fill: (d) => color(d.color), title: (d) => withInterval(d, unit), tip: "y" }),
            Plot.ruleX([0], { stroke: muted }),
            ...whiskersX(found.filter((d) => d.low != null), "label", 7, [0, frame]),
            Plot.text(found, {
              x: (d) => Math.min(Math.max(d.value, d.high ?? 0), frame), y: "label", text: (d) => figure(d.value, unit),
              textAnchor: "start", dx: 7, fill: ink,
            }),
          ],
        }, `${title}: ${run} ${found.map((d) => `${d.label} ${figure(d.value, unit)}`).join(", ")}`);
        return run && runs.length > 1 ? [heading(run), drawn] : [drawn];
      });
    },

    // Parts of a whole, end to end from zero.
    stack({ rows, unit, title, name_parts }, width) {
      const parts = rows.flatMap((row) => {
        let end = 0;
        return row.parts.map((part) => ({ ...part, label: row.label, start: end, end: (end += scale(unit) * part.value) }));
      });
      const most = d3.max(parts, (d) => d.end);
      const { margin, tick } = labels(rows.map((d) => d.label), width);
      const marginLeft = name_parts ? 2 : margin;
      const room = (d) => ((d.end - d.start) / most) * (width - marginLeft - 16) - 8;
      return [plot({
        width, marginLeft, height: rows.length * (name_parts ? 44 : 28) + 42,
        x: axis(unit === "fraction" ? "% of a step" : `${unit} per step`, { domain: [0, most || 1], ticks: Math.max(3, width / 110) }),
        y: { domain: rows.map((d) => d.label), label: null, tickSize: 0, tickFormat: tick, padding: 0.2 },
        marks: [
          Plot.barX(parts, {
            x1: "start", x2: "end", y: "label", fill: (d) => color(d.color), insetRight: 1,
            title: (d) => `${d.label ? `${d.label}, ` : ""}${d.name}: ${figure(d.value, unit)}`, tip: "xy",
          }),
          Plot.text(parts.filter((d) => name_parts && widthOf(figure(d.value, unit)) < room(d)), {
            x: (d) => (d.start + d.end) / 2, y: "label", text: (d) => figure(d.value, unit),
            fill: (d) => color(`on-${d.color}`),
          }),
          Plot.ruleX([0], { stroke: muted }),
        ],
      }, `${title}: ${parts.map((d) => `${d.label} ${d.name} ${figure(d.value, unit)}`).join(", ")}`)];
    },

    // Lanes of compute, communication and both, for each mode on one scale.
    timeline({ modes, title }, width) {
      const end = d3.max(modes, (d) => d.step_ms);
      const lanes = ["compute", "communication", "both"];
      const { margin, tick } = labels(lanes, width);
      return modes.flatMap((mode, i) => {
        const last = i === modes.length - 1;
        const rows = lanes.flatMap((lane) => mode[lane].map(([a, b]) => ({ lane, a, b })));
        return [heading(`${mode.mode}, ${figure(mode.step_ms, "ms")}`), plot({
          width, marginLeft: margin, marginTop: 4, marginBottom: last ? 34 : 4, height: 3 * 24 + 4 + (last ? 34 : 4),
          x: axis("ms from the start of the step", { domain: [0, end], ticks: Math.max(3, width / 110), axis: last ? "bottom" : null }),
          y: { domain: lanes, label: null, tickSize: 0, tickFormat: tick, padding: 0.16 },
          marks: [
            Plot.gridX({ stroke: line, strokeOpacity: 1, ticks: Math.max(3, width / 110) }),
            Plot.barX(rows, { x1: "a", x2: "b", y: "lane", fill: (d) => color(d.lane) }),
            Plot.ruleX([mode.step_ms], { stroke: muted, strokeDasharray: "3,3" }),
          ],
        }, `${title}: ${mode.mode}`)];
      });
    },

    // Every call of a step by name, in the lanes of its streams.
    streams: (data, width) => overlapStreams({ plot, axis, heading, figure, fitted, labels, color, line, muted })(data, width),

    // Figures along the run. Few windows: points with whiskers; many: a line in a band.
    lines({ series, unit, excluded, few, zero, title }, width) {
      const k = scale(unit);
      const points = series.flatMap((s) => s.points.map(([step, window, value, low, high]) => ({
        name: s.name, color: color(s.color), step, window, value, low, high,
      })));
      const bounded = points.filter((d) => d.low != null);
      let [low, high] = extent(points.map((d) => d.value));
      // A few wide intervals must not flatten the rest; what goes beyond the frame is cut there.
      if (bounded.length) {
        low = Math.min(low, d3.quantile(bounded, few ? 0 : 0.02, (d) => d.low));
        high = Math.max(high, d3.quantile(bounded, few ? 1 : 0.98, (d) => d.high));
      }
      if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
      // An axis of less than a tenth of its values would make much of little.
      const least = Math.max(Math.abs(low), Math.abs(high)) * 0.1 || 0.01 / k;
      if (high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
      const domain = d3.nice(low * k, high * k, 6);
      const y = (key) => (d) => (d[key] == null ? null : d[key] * k);
      const stroke = "color", z = "name";
      const inner = few
        ? [
            Plot.ruleX(bounded, { x: "step", y1: y("low"), y2: y("high"), stroke, strokeOpacity: 0.55, strokeWidth: 1.5, clip: true }),
            Plot.lineY(points, { x: "step", y: y("value"), z, stroke, strokeOpacity: 0.35, clip: true }),
            Plot.dot(points, { x: "step", y: y("value"), fill: stroke, r: 3 }),
          ]
        : [
            Plot.areaY(bounded, { x: "step", y1: y("low"), y2: y("high"), z, fill: stroke, fillOpacity: 0.18, clip: true }),
            Plot.lineY(points, { x: "step", y: y("value"), z, stroke, strokeWidth: 1.2, clip: true }),
          ];
      return [plot({
        width, height: 210, marginLeft: 48, marginTop: 22,
        x: axis("training step", { ticks: Math.max(3, width / 110), tickFormat: (d) => d.toLocaleString("en-US"), inset: 6 }),
        y: { domain, label: unitName(unit), labelAnchor: "top", labelArrow: "none", tickSize: 0, ticks: 5 },
        marks: [
          Plot.gridY({ stroke: line, strokeOpacity: 1, ticks: 5 }),
          domain[0] <= 0 && domain[1] >= 0 ? Plot.ruleY([0], { stroke: muted }) : null,
          ...inner,
          Plot.dot(excluded, { x: (d) => d, frameAnchor: "bottom", dy: -5, symbol: "times", r: 3, stroke: muted }),
          Plot.tip(points, Plot.pointer({
            x: "step", y: y("value"),
            title: (d) => `${d.name}, window ${d.window}, step ${d.step}\n${withInterval(d, unit)}`,
          })),
        ],
      }, `${title} along ${new Set(points.map((d) => d.step)).size} windows, from ${figure(low, unit)} to ${figure(high, unit)}`)];
    },

    // Figures of several runs against what varies between them. Sizes that double stand at equal distances.
    // What intervals beyond the frame have is cut there. Signed ones of several series stand side by side.
    against({ series, unit, x_label, numeric, ideal, signed, frame, title }, width) {
      const k = scale(unit);
      const points = series.flatMap((s, i) => s.points.map(([x, run, value, low, high]) => ({
        name: s.name, color: color(s.color), x, run, value, low, high, dx: signed ? 4 * (i - (series.length - 1) / 2) : 0,
      })));
      const [least, most] = frame ?? [-Infinity, Infinity];
      const places = [...new Set(points.map((d) => d.x))];
      const [first, last] = numeric ? extent(places) : [0, 0];
      const doubling = numeric && first > 0 && last >= 4 * first;
      // Through the means of the runs at one place.
      const means = d3.groups(points, (d) => d.name).flatMap(([name, found]) =>
        d3.groups(found, (d) => d.x).map(([x, same]) => ({ name, x, color: same[0].color, dx: same[0].dx, value: d3.mean(same, (d) => d.value) })));
      const asRanks = ideal ? places.map((x) => ({ x, value: x / ideal })) : [];
      const top = d3.max([0, ...points.map((d) => Math.max(d.value, Math.min(d.high ?? d.value, most))), ...asRanks.map((d) => d.value)]);
      const bottom = signed ? d3.min([0, ...points.map((d) => Math.min(d.value, Math.max(d.low ?? d.value, least)))]) : 0;
      const domain = d3.nice(bottom * k, (top || (bottom ? 0 : 1)) * k, 6);
      const y = (key) => (d) => (d[key] == null ? null : d[key] * k);
      const room = width / Math.max(1, places.length) - 8;
      const shown = (x) => (numeric ? x.toLocaleString("en-US") : fitted(x, Math.max(room, 24)));
      // Every place has its tick, as long as there is room beside the next.
      const apart = d3.max(places, (x) => widthOf(shown(x))) + 10;
      const share = (x) => (doubling ? Math.log2(x / first) / Math.log2(last / first) : (x - first) / (last - first || 1));
      const ticks = numeric ? d3.sort(places, d3.descending).reduce((kept, x) =>
        (kept.length && share(kept.at(-1)) - share(x) < apart / (width - 92) ? kept : [...kept, x]), []) : [];
      const besides = d3.groups(points, (d) => d.dx);
      const x = numeric
        ? { type: doubling ? "log" : "linear", ...(doubling ? { base: 2 } : {}), ticks, tickFormat: shown, inset: 14 }
        : { type: "point", domain: places, tickFormat: shown, padding: 0.5 };
      return [plot({
        width, height: 210, marginLeft: Math.max(48, 14 + widthOf(domain[1].toLocaleString("en-US"))), marginTop: 22,
        x: axis(x_label, x),
        y: { domain, label: unitName(unit), labelAnchor: "top", labelArrow: "none", tickSize: 0, ticks: 5 },
        marks: [
          Plot.gridY({ stroke: line, strokeOpacity: 1, ticks: 5 }),
          Plot.ruleY([0], { stroke: muted }),
          Plot.lineY(asRanks, { x: "x", y: y("value"), stroke: muted, strokeDasharray: "4,3" }),
          ...besides.flatMap(([dx, found]) => [
            Plot.ruleX(found.filter((d) => d.low != null), { x: "x", y1: y("low"), y2: y("high"), stroke: "color", strokeOpacity: 0.55, strokeWidth: 1.5, dx, clip: true }),
            numeric ? Plot.lineY(means.filter((d) => d.dx === dx), { x: "x", y: y("value"), z: "name", stroke: "color", strokeOpacity: 0.5, dx }) : null,
            Plot.dot(found, { x: "x", y: y("value"), fill: "color", r: 3.5, dx }),
          ]),
          Plot.tip(points, Plot.pointer({
            x: "x", y: y("value"),
            title: (d) => `${d.run}\n${x_label} ${d.x.toLocaleString("en-US")}\n${series.length > 1 ? `${d.name}: ` : ""}${withInterval(d, unit)}`,
          })),
        ],
      }, `${title} against ${x_label}: ${points.map((d) => `${d.x.toLocaleString("en-US")} ${figure(d.value, unit)}`).join(", ")}`)];
    },

    // Figures of a sweep against a size that doubles; on a logarithmic scale of theirs too, where one asks for it.
    sweep({ series, unit, x_label, x_bytes, log_y, limits, title }, width) {
      const k = scale(unit);
      const points = series.flatMap((s) => s.points.map(([x, value, low, high]) => ({
        name: s.name, color: color(s.color), dashed: s.dashed, x, value: value * k,
        low: low == null ? null : low * k, high: high == null ? null : high * k,
        tip: `${s.name}\n${x_label} ${x_bytes ? bytes(x) : x.toLocaleString("en-US")}\n${withInterval({ value, low, high }, unit)}`,
      })));
      const bounds = (limits ?? []).map(([name, value]) => ({ name, value: value * k }));
      const bounded = points.filter((d) => d.low != null && (!log_y || d.low > 0));
      const values = [...points.map((d) => d.value), ...bounds.map((d) => d.value)];
      let [low, high] = extent([...values, ...bounded.flatMap((d) => [d.low, d.high])]);
      // A few wide intervals must not flatten the rest; what goes beyond the frame is cut there.
      const [least, most] = extent(values);
      const pad = (most - least || Math.abs(most) || 1) * 1.5;
      [low, high] = [Math.max(low, least - pad), Math.min(high, most + pad)];
      if (!log_y) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
      else [low, high] = [Math.max(low, least / 3), Math.min(high, most * 3)];
      const domain = log_y ? [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))] : d3.nice(low, high || 1, 6);
      const places = [...new Set(points.map((d) => d.x))].sort((a, b) => a - b);
      const shown = (x) => (x_bytes ? bytes(x) : x.toLocaleString("en-US"));
      const widest = d3.max(places, (x) => widthOf(shown(x)));
      // Ticks at whole powers, as many as there is room for.
      const room = Math.max(2, Math.floor((width - 70) / (widest + 14)));
      const span = Math.log2(places.at(-1) / places[0]) || 1;
      const every = places.length <= room ? 0 : Math.ceil(span / (room - 1));
      const ticks = every ? d3.range(0, span + 0.001, every).map((i) => places[0] * 2 ** i) : places;
      const decades = log_y ? d3.range(Math.log10(domain[0]), Math.log10(domain[1]) + 0.5).map((e) => 10 ** Math.round(e)) : 5;
      const few = log_y && decades.length > 7 ? decades.filter((_, i) => i % 2 === 0) : decades;
      const tickY = unit === "rate" ? rate : log_y ? (d) => (d >= 1 ? d.toLocaleString("en-US") : String(Number(d.toPrecision(1)))) : undefined;
      const wide = log_y ? d3.max(few, (d) => widthOf(tickY(d))) : widthOf(domain[1].toLocaleString("en-US")) + 8;
      const lines = d3.groups(points, (d) => d.name).map(([, found]) => found);
      return [plot({
        width, height: log_y ? 300 : 220, marginLeft: Math.max(40, 14 + wide), marginTop: 22, marginRight: 20,
        x: axis(x_label, { type: "log", base: 2, ticks, tickFormat: shown, inset: 10 }),
        y: { type: log_y ? "log" : "linear", domain, label: unit === "rate" ? null : unitName(unit), labelAnchor: "top", labelArrow: "none", tickSize: 0, ticks: few, tickFormat: tickY },
        marks: [
          Plot.gridY(log_y ? few : undefined, { stroke: line, strokeOpacity: 1, ...(log_y ? {} : { ticks: 5 }) }),
          log_y ? null : Plot.ruleY([0], { stroke: muted }),
          Plot.ruleY(bounds, { y: "value", stroke: muted, strokeDasharray: "4,3" }),
          Plot.text(bounds, { y: "value", frameAnchor: "left", textAnchor: "start", dx: 4, dy: -7, text: "name", fill: muted, stroke: color("paper"), strokeWidth: 4 }),
          Plot.ruleX(bounded, { x: "x", y1: "low", y2: "high", stroke: "color", strokeOpacity: 0.5, strokeWidth: 1.5, clip: true }),
          ...lines.map((found) => Plot.lineY(found, { x: "x", y: "value", stroke: found[0].color, strokeWidth: 1.3, strokeDasharray: found[0].dashed ? "5,3" : null, clip: true })),
          Plot.dot(points, { x: "x", y: "value", fill: "color", r: places.length > 12 ? 2 : 3.2 }),
          Plot.tip(points, Plot.pointer({ x: "x", y: "value", title: "tip" })),
        ],
      }, `${title} against ${x_label}: ${lines.map((found) => `${found[0].name} from ${figure(found[0].value / k, unit)} to ${figure(found.at(-1).value / k, unit)}`).join(", ")}`)];
    },

    // Power from zero, the modes shaded; the clock below it.
    power({ time, power, clock, segments, communication, both, limits, title }, width) {
      const rows = time.map((t, i) => ({ t: t / 1000, power: power[i], clock: clock[i] }));
      const shades = segments.map(([mode, a, b, counted, profiled]) => ({ mode: counted ? mode : "idle", profiled, a: a / 1000, b: b / 1000 }));
      const seconds = (intervals) => intervals.map(([a, b]) => ({ a: a / 1000, b: b / 1000 }));
      const end = d3.max([...rows.map((d) => d.t), ...shades.map((d) => d.b)]);
      const panel = (key, unit, domain, marks, last) => plot({
        width, height: last ? 190 : 150, marginLeft: 48, marginTop: 22, marginBottom: last ? 34 : 10,
        x: axis("seconds from the start of the trace", { domain: [0, end], ticks: Math.max(3, width / 110), axis: last ? "bottom" : null }),
        y: { domain, label: unit, labelAnchor: "top", labelArrow: "none", tickSize: 0, ticks: 5 },
        marks: [
          Plot.rect(shades, { x1: "a", x2: "b", y1: domain[0], y2: domain[1], fill: (d) => color(d.mode), fillOpacity: (d) => (d.mode === "idle" ? 0.75 : 0.22) }),
          Plot.link(shades.filter((d) => d.profiled), { x1: "a", x2: "b", y1: domain[1], y2: domain[1], stroke: ink, strokeWidth: 4 }),
          Plot.gridY({ stroke: line, strokeOpacity: 1, ticks: 5 }),
          // Held, not interpolated: a reading stands until the next.
          Plot.lineY(rows, { x: "t", y: key, stroke: ink, strokeWidth: 1.2, curve: "step-after" }),
          ...marks,
          Plot.tip(rows, Plot.pointerX({ x: "t", y: key, title: (d) => `${figure(d.t, "s")}\n${figure(d[key], unit)}` })),
        ],
      }, `${title}: ${key}`);
      const most = d3.max([...power, ...limits.map(([, value]) => value)]);
      const bounds = limits.map(([name, value]) => ({ name, value }));
      const limitMarks = [
        Plot.ruleY(bounds, { y: "value", stroke: muted, strokeDasharray: "4,3" }),
        Plot.text(bounds, { y: "value", frameAnchor: "right", textAnchor: "end", dy: -7, text: (d) => `${d.name}, ${figure(d.value, "W")}`, fill: muted, stroke: color("paper"), strokeWidth: 4 }),
      ];
      const watts = d3.nice(0, most * 1.05, 5);
      // Compute beside communication is drawn over the communication that it is part of.
      const band = (intervals, name) =>
        Plot.rect(seconds(intervals), { x1: "a", x2: "b", y1: 0, y2: watts[1] * 0.08, fill: color(name) });
      const foot = [band(communication, "communication"), band(both, "both")];
      const drawn = [panel("power", "W", watts, [...foot, ...limitMarks], !clock.length)];
      if (clock.length) {
        const [low, high] = d3.extent(clock);
        const pad = Math.max(10, (high - low) * 0.1);
        drawn.push(panel("clock", "MHz", d3.nice(low - pad, high + pad, 5), [], true));
      }
      return drawn;
    },

    // A matrix of cells: rows send, columns receive; the stronger the more.
    heatMap({ labels: names, cells, bounds, title }, width) {
      const number = names.length;
      const { margin } = labels(names, 0.7 * width);
      const room = Math.min(width - margin - 8, 46 * number, 620);
      const side = room / number;
      const every = Math.max(1, Math.ceil(20 / side));
      const shown = names.map((_, i) => i).filter((i) => i % every === 0);
      const tick = (i) => fitted(names[i], margin - 12);
      const upright = d3.max(shown, (i) => widthOf(tick(i))) > every * side - 4;
      const marginTop = upright ? margin + 4 : 24;
      const edges = bounds.map((i) => i - 0.5);
      const lineOf = { stroke: muted, strokeWidth: 1 };
      const scale = (i) => ({ domain: [-0.5, number - 0.5], label: null, tickSize: 0, ticks: shown, tickFormat: tick, ...i });
      return [plot({
        width: margin + room + 8, height: marginTop + room + 8, marginLeft: margin, marginTop, marginRight: 8, marginBottom: 8,
        x: scale({ axis: "top", tickRotate: upright ? -90 : 0 }),
        y: scale({ reverse: true }),
        marks: [
          Plot.rect([0], { x1: -0.5, x2: number - 0.5, y1: -0.5, y2: number - 0.5, fill: line, fillOpacity: 0.35 }),
          Plot.rect(cells, {
            x1: (d) => d[1] - 0.5, x2: (d) => d[1] + 0.5, y1: (d) => d[0] - 0.5, y2: (d) => d[0] + 0.5, inset: side > 8 ? 0.5 : 0,
            fill: color("overlapped"), fillOpacity: (d) => d[3],
            title: (d) => `${names[d[0]]} to ${names[d[1]]}: ${d[4]} a step`, tip: "xy",
          }),
          Plot.ruleX(edges, lineOf),
          Plot.ruleY(edges, lineOf),
        ],
      }, `${title}: ${cells.length} pairs with traffic`)];
    },

    // Dots with intervals, a panel for each figure, a row for each run.
    intervals({ rows, unit, title }, width) {
      const { margin, tick } = labels(rows.map((d) => d.run), width);
      const k = scale(unit);
      return d3.groups(rows, (d) => d.figure).flatMap(([name, found]) => {
        const [low, high] = extent([0, ...found.flatMap((d) => [d.value, d.low, d.high])]);
        const scaled = found.map((d) => ({ ...d, x: d.value * k, low: d.low == null ? null : d.low * k, high: d.high == null ? null : d.high * k, tip: withInterval(d, unit) }));
        return [heading(name), plot({
          width, marginLeft: margin, marginRight: 84, height: found.length * 24 + 42,
          x: axis(unitName(unit), { domain: d3.nice(low * k, high * k, 6), ticks: Math.max(3, width / 110) }),
          y: { domain: found.map((d) => d.run), label: null, tickSize: 0, tickFormat: tick },
          marks: [
            Plot.gridX({ stroke: line, strokeOpacity: 1, ticks: Math.max(3, width / 110) }),
            Plot.ruleX([0], { stroke: muted }),
            ...whiskersX(scaled.filter((d) => d.low != null), "run", 8),
            Plot.dot(scaled, { x: "x", y: "run", fill: color("overlapped"), r: 4, title: "tip", tip: "y" }),
            Plot.text(scaled, { x: (d) => Math.max(d.x, d.high ?? d.x), y: "run", text: (d) => figure(d.value, unit), textAnchor: "start", dx: 7 }),
          ],
        }, `${title}: ${name}`)];
      });
    },

    // Points with intervals, a row for each configuration, under headings, on one scale; dashed lines to compare with.
    // Where there is little room, a row's name stands above it.
    rows({ groups, unit, x_label, limits, zero, title }, width) {
      const k = scale(unit), names = groups.flatMap((group) => group.rows.map((row) => row.label));
      const stacked = d3.max(names, widthOf) > 0.3 * width;
      const all = groups.flatMap((group) => group.rows.flatMap((row) => row.points));
      const [least, most] = extent([...all.map((d) => d.value), ...limits.map(([, value]) => value), zero ? 0 : null]);
      const [lowest, highest] = extent(all.flatMap((d) => [d.value, d.low, d.high]));
      // A few wide intervals must not flatten the rest; what goes beyond the frame is cut there.
      const pad = (most - least || Math.abs(most) || 1) * 0.6;
      const [low, high] = [Math.max(Math.min(least, lowest), least - pad), Math.min(Math.max(most, highest), most + pad)];
      const frame = [low * k, high * k], apart = (high - low) * 0.03 * k;
      const domain = [low < 0 || !zero ? frame[0] - apart : 0, frame[1] + apart];
      const { margin, tick } = labels(names, width);
      const notes = Math.max(0, ...groups.flatMap((group) => group.rows.map((row) => widthOf(row.note))));
      const bounds = limits.map(([name, value]) => ({ value: value * k, long: `${name} ${figure(value, unit)}`, short: figure(value, unit) }));
      const gap = ((bounds.at(-1)?.value - bounds[0]?.value) / (domain[1] - domain[0])) * (width - (stacked ? 0 : margin) - notes);
      const name = bounds.some((d) => widthOf(d.long) > (bounds.length > 1 ? gap - 12 : width / 3)) ? "short" : "long";
      return groups.flatMap((group, i) => {
        const first = i === 0, last = i === groups.length - 1;
        const points = group.rows.flatMap((row) => row.points.map((d) => ({
          ...d, label: row.label, tip: `${[group.name, row.label].filter(Boolean).join(", ")}\n${d.name}: ${withInterval(d, unit)}`,
          x: d.value * k, low: d.low == null ? null : d.low * k, high: d.high == null ? null : d.high * k,
        })));
        const bounded = points.filter((d) => d.low != null && d.high > frame[0] && d.low < frame[1]);
        const place = { y: "label", dy: stacked ? 6 : 0 };
        const drawn = plot({
          width, marginLeft: stacked ? 8 : margin, marginRight: notes + 18, marginTop: first && bounds.length ? 20 : 2, marginBottom: last ? 34 : 2,
          height: group.rows.length * (stacked ? 38 : 26) + (first && bounds.length ? 20 : 2) + (last ? 34 : 2),
          x: axis(x_label, { domain, ticks: Math.max(3, width / 110), axis: last ? "bottom" : null }),
          y: { domain: group.rows.map((row) => row.label), label: null, tickSize: 0, tickFormat: tick, axis: stacked ? null : "left", type: "band", padding: 0.1 },
          marks: [
            Plot.gridX({ stroke: line, strokeOpacity: 1, ticks: Math.max(3, width / 110) }),
            domain[0] <= 0 ? Plot.ruleX([0], { stroke: muted }) : null,
            Plot.ruleX(bounds, { x: "value", stroke: muted, strokeDasharray: "4,3" }),
            // Two that are close stand apart, each on its own side.
            ...(first ? bounds : []).map((d, i) => Plot.text([d], { x: "value", frameAnchor: "top", dy: -11, text: name, fill: muted, textAnchor: gap > widthOf(d[name]) + 8 || bounds.length < 2 ? "middle" : i ? "start" : "end" })),
            stacked ? Plot.text(group.rows, { y: "label", frameAnchor: "left", textAnchor: "start", dx: 3, dy: -9, text: (d) => fitted(d.label, width - notes - 30), fill: ink, stroke: color("paper"), strokeWidth: 4 }) : null,
            Plot.link(bounded, { ...place, x1: (d) => Math.max(d.low, domain[0]), x2: (d) => Math.min(d.high, domain[1]), y1: "label", y2: "label", stroke: (d) => color(d.color), strokeOpacity: 0.6, strokeWidth: 2 }),
            Plot.dot(points, { ...place, x: "x", r: width < 520 ? 3.5 : 4.5, stroke: (d) => color(d.color), strokeWidth: 1.8, fill: (d) => (d.hollow ? color("paper") : color(d.color)), title: "tip", tip: "xy" }),
            Plot.text(group.rows, { ...place, frameAnchor: "right", textAnchor: "start", dx: 8, text: "note", fill: muted }),
          ],
        }, `${title}: ${points.map((d) => `${group.name} ${d.label} ${d.name} ${figure(d.value, unit)}`).join(", ")}`);
        return group.name ? [heading(group.name), drawn] : [drawn];
      });
    },

    // One fraction against another, a point for each configuration.
    scatter({ series, x_label, y_label, limits, title }, width) {
      const points = series.flatMap((s) => s.points.map(([place, x, value, low, high]) => ({
        color: color(s.color), x: 100 * x, y: 100 * value, low: low == null ? null : 100 * low, high: high == null ? null : 100 * high,
        tip: `${place}\n${x_label}: ${figure(x, "fraction")}\n${y_label}: ${withInterval({ value, low, high }, "fraction")}`,
      })));
      const bounds = limits.map(([name, value]) => ({ name: `${name} ${figure(value, "fraction")}`, y: 100 * value }));
      const [left, right] = extent([0, ...points.map((d) => d.x)]);
      const [least, most] = extent([0, ...points.map((d) => d.y), ...bounds.map((d) => d.y)]);
      const pad = (most - least) * 0.4;
      const domain = [Math.max(d3.min(points, (d) => d.low ?? d.y), least - pad), Math.min(d3.max(points, (d) => d.high ?? d.y), most + pad)];
      return [plot({
        width, height: 280, marginLeft: 48, marginTop: 26,
        x: axis(`${x_label}, %`, { domain: d3.nice(left, right || 1, 5), ticks: Math.max(3, width / 110), insetRight: 8 }),
        y: { domain: d3.nice(Math.min(least, domain[0]), Math.max(most, domain[1]), 6), label: `${y_label}, %`, labelAnchor: "top", labelArrow: "none", tickSize: 0, ticks: 6 },
        marks: [
          Plot.gridY({ stroke: line, strokeOpacity: 1, ticks: 6 }),
          Plot.ruleY([0], { stroke: muted }),
          Plot.ruleY(bounds, { y: "y", stroke: muted, strokeDasharray: "4,3" }),
          Plot.text(bounds, { y: "y", frameAnchor: "left", textAnchor: "start", dx: 4, dy: -7, text: "name", fill: muted, stroke: color("paper"), strokeWidth: 4 }),
          Plot.ruleX(points.filter((d) => d.low != null), { x: "x", y1: "low", y2: "high", stroke: "color", strokeOpacity: 0.55, strokeWidth: 1.5, clip: true }),
          Plot.dot(points, { x: "x", y: "y", fill: "color", r: 4.5 }),
          Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: "tip" })),
        ],
      }, `${title}: ${points.length} configurations`)];
    },
  };

  // A bound beyond the frame has no cap: the whisker runs out of it.
  function whiskersX(rows, y, inset, [least, most] = [-Infinity, Infinity]) {
    const cap = { y, stroke: ink, strokeWidth: 1.4, insetTop: inset, insetBottom: inset };
    return [
      Plot.ruleY(rows, { y, x1: (d) => Math.max(d.low, least), x2: (d) => Math.min(d.high, most), stroke: ink, strokeWidth: 1.4 }),
      Plot.tickX(rows.filter((d) => d.low >= least), { ...cap, x: "low" }),
      Plot.tickX(rows.filter((d) => d.high <= most), { ...cap, x: "high" }),
    ];
  }

  function show(place, width) {
    const chart = charts[place.dataset.chart];
    try {
      place.replaceChildren(...draw[chart.draw](chart, width));
    } catch (error) {
      place.textContent = "This chart could not be drawn.";
      console.error(chart.title, error);
    }
  }

  const drawnAt = new WeakMap();
  const watch = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const width = Math.floor(contentRect.width);
      if (width < 1 || width === drawnAt.get(target)) continue; // hidden, or only its height changed
      drawnAt.set(target, width);
      requestAnimationFrame(() => show(target, Math.max(width, 240)));
    }
  });
  for (const place of document.querySelectorAll("[data-chart]")) watch.observe(place);
})();
