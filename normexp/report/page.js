"use strict";
// Tables: a click on a heading sorts; the runs can be filtered; a run's link shows its curves. No library, no network.
const data = JSON.parse(document.getElementById("data").textContent);

function sortable(table) {
  table.querySelectorAll("th").forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => sort(table, heading, column));
  });
}

function sort(table, heading, column) {
  const down = heading.getAttribute("aria-sort") === "ascending";
  table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = table.tBodies[0];
  const rows = [...body.rows].map(row => [row, row.cells[column].dataset.value]);
  rows.sort((a, b) => compare(a[1], b[1], down ? -1 : 1));
  body.append(...rows.map(([row]) => row));
}

function number(text) {
  return text === "inf" ? Infinity : text === "-inf" ? -Infinity : Number(text);
}

// Numbers by size, other text by the alphabet; what is missing or not a number comes last in both directions.
function compare(a, b, sign) {
  const lacks = text => text === "" || text === "nan";
  if (lacks(a) || lacks(b)) return lacks(a) - lacks(b);
  const x = number(a), y = number(b);
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x === y ? 0 : sign * (x < y ? -1 : 1);
  return sign * a.localeCompare(b);
}

function filter() {
  const form = document.getElementById("filters");
  const table = document.getElementById("table-runs");
  if (!table) return;
  const columns = [...table.querySelectorAll("th")].map(heading => heading.dataset.column);
  const wanted = [...form.querySelectorAll("select")].filter(select => select.value)
    .map(select => [columns.indexOf(select.dataset.column), select.value]);
  const words = form.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !(wanted.every(([column, value]) => row.cells[column].dataset.value === value)
      && words.every(word => text.includes(word)));
    count += !row.hidden;
  }
  form.querySelector("output").textContent = `${count} of ${table.tBodies[0].rows.length} runs`;
}

// --- curves of one run ---------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const BOX = {width: 560, height: 200, left: 52, right: 12, top: 8, bottom: 34};

function make(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function element(name, text, attributes = {}) {
  const node = document.createElement(name);
  node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

// A value between two ends -> pixels between two ends; both ends of a flat curve lie in the middle.
function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : x => x;
  const span = f(high) - f(low);
  return x => span ? from + (to - from) * (f(x) - f(low)) / span : (from + to) / 2;
}

function ticks(low, high, log) {
  if (log) {
    const powers = [];
    for (let p = Math.ceil(Math.log10(low) - 1e-9); p <= Math.log10(high) + 1e-9; p++) powers.push(10 ** p);
    return powers;
  }
  const rough = (high - low) / 4 || 1, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * unit).find(s => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

function short(x) {
  return x !== 0 && (Math.abs(x) < 0.001 || Math.abs(x) >= 1e5) ? x.toExponential(0) : String(+x.toPrecision(4));
}

function frame(svg, x, y, xs, ys, label) {
  const bottom = BOX.height - BOX.bottom, right = BOX.width - BOX.right;
  for (const value of ys) {
    svg.append(make("line", {x1: BOX.left, x2: right, y1: y(value), y2: y(value), stroke: "#e6e6e6"}));
    svg.append(make("text", {x: BOX.left - 6, y: y(value) + 4, "text-anchor": "end", fill: "#444"}, short(value)));
  }
  for (const value of xs)
    svg.append(make("text", {x: x(value), y: bottom + 14, "text-anchor": "middle", fill: "#444"}, short(value)));
  svg.append(make("line", {x1: BOX.left, x2: right, y1: bottom, y2: bottom, stroke: "#555"}));
  svg.append(make("text", {x: (BOX.left + right) / 2, y: BOX.height - 4, "text-anchor": "middle", fill: "#444"}, label));
}

// series: [name, colour, [steps, values], dots]. A value that was not finite breaks the line.
function chart(title, series, log) {
  const present = series.filter(([, , points]) => points && points[1].some(value => value !== null));
  if (!present.length) return [element("h3", title), element("p", "nothing finite was logged", {class: "reading"})];
  const values = present.flatMap(([, , points]) => points[1]).filter(value => value !== null && (!log || value > 0));
  const steps = present.flatMap(([, , points]) => points[0]);
  let low = Math.min(...values), high = Math.max(...values);
  if (log) [low, high] = [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-9)];
  const x = scale(Math.min(...steps), Math.max(...steps), BOX.left, BOX.width - BOX.right);
  const y = scale(low, high, BOX.height - BOX.bottom, BOX.top, log);
  const svg = make("svg", {viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": title});
  frame(svg, x, y, ticks(Math.min(...steps), Math.max(...steps)), ticks(low, high, log), "step");
  for (const [name, color, points, dots] of present) svg.append(line(name, color, points, dots, x, y));
  const reading = element("div", "", {class: "reading"});
  tell(reading, present.map(([name, color]) => [color, name]));
  svg.addEventListener("mousemove", event => read(event, svg, x, present, reading));
  return [element("h3", title), svg, reading];
}

function line(name, color, [steps, values], dots, x, y) {
  const group = make("g", {stroke: color, fill: "none", "stroke-width": 1.4});
  let path = "", open = false;
  steps.forEach((step, i) => {
    const good = values[i] !== null && Number.isFinite(y(values[i]));
    if (good) path += `${open ? "L" : "M"}${x(step).toFixed(1)},${y(values[i]).toFixed(1)}`;
    if (good && dots) group.append(make("circle", {cx: x(step), cy: y(values[i]), r: 3, fill: color, stroke: "#fff"}));
    open = good;
  });
  group.prepend(make("path", {d: path, "stroke-dasharray": dots ? "4 3" : "none"}), make("title", {}, name));
  return group;
}

function tell(reading, parts) {
  reading.replaceChildren(...parts.map(([color, text]) => element("span", text, {style: `--key: ${color}`})));
}

function read(event, svg, x, series, reading) {
  const box = svg.getBoundingClientRect();
  const at = (event.clientX - box.left) / box.width * BOX.width;
  tell(reading, series.map(([name, color, [steps, values]]) => {
    const i = steps.reduce((best, step, k) => Math.abs(x(step) - at) < Math.abs(x(steps[best]) - at) ? k : best, 0);
    return [color, `step ${steps[i]}: ${name} ${values[i] === null ? "not finite" : short(values[i])}`];
  }));
}

// Cividis at ten places.
const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];

function color(place) {
  const i = Math.min(Math.floor(place), CIVIDIS.length - 2), part = place - i;
  return `rgb(${CIVIDIS[i].map((from, k) => Math.round(from + part * (CIVIDIS[i + 1][k] - from))).join(",")})`;
}

function heat(title, [steps, rows]) {
  const finite = rows.flat().filter(value => value !== null && value > 0);
  if (!finite.length) return [];
  const low = finite.reduce((a, b) => Math.min(a, b)), high = finite.reduce((a, b) => Math.max(a, b));
  const shade = scale(low, high, 0, CIVIDIS.length - 1, true);
  const first = Math.max(1, steps[0]);
  const x = scale(first * 0.9, steps[steps.length - 1] * 1.1, BOX.left, BOX.width - BOX.right, true);
  const tall = (BOX.height - BOX.bottom - BOX.top) / rows.length;
  const svg = make("svg", {viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": title});
  const edge = i => i === 0 ? BOX.left : i === steps.length ? BOX.width - BOX.right : x(Math.sqrt(Math.max(steps[i - 1], 1) * steps[i]));
  rows.forEach((row, block) => row.forEach((value, i) => {
    const fill = value === null ? "#000" : color(value > 0 ? shade(value) : 0);
    const top = BOX.height - BOX.bottom - (block + 1) * tall;
    const cell = make("rect", {x: edge(i), y: top, width: edge(i + 1) - edge(i) + 0.4, height: tall + 0.4, fill});
    cell.append(make("title", {}, `block ${block}, step ${steps[i]}: ${value === null ? "not finite" : short(value)}`));
    svg.append(cell);
  }));
  const middle = block => BOX.height - BOX.bottom - (block + 0.5) * tall;
  const every = Math.ceil(rows.length / 6);
  frame(svg, x, middle, ticks(first, steps[steps.length - 1], true), [], "step (log scale)");
  for (let block = 0; block < rows.length; block += every)
    svg.append(make("text", {x: BOX.left - 6, y: middle(block) + 4, "text-anchor": "end", fill: "#444"}, String(block)));
  const range = `from ${short(low)} (dark) to ${short(high)} (light); black: not finite`;
  return [element("h3", title), svg, element("div", range, {class: "reading"})];
}

function show() {
  const panel = document.getElementById("curves");
  const run = location.hash.startsWith("#run=") ? decodeURIComponent(location.hash.slice(5)) : null;
  const curves = run !== null && Object.hasOwn(data, run) ? data[run] : null;
  document.querySelectorAll("tr.shown").forEach(row => row.classList.remove("shown"));
  panel.hidden = curves === null;
  if (panel.hidden) return;
  const links = [...document.querySelectorAll("#table-runs a")];
  const row = links.find(link => link.textContent === run)?.closest("tr");
  row?.classList.add("shown");
  const close = element("button", "close", {class: "close", type: "button"});
  close.addEventListener("click", hide);
  panel.replaceChildren(close, element("h2", run));
  if (row) panel.append(element("div", row.cells[row.cells.length - 1].textContent, {class: "reading"}));
  const losses = [["training", "#0072b2", curves.train], ["validation", "#d55e00", curves.validation, true]];
  panel.append(
    ...chart("Loss (nats per token)", losses, false),
    ...chart("Gradient norm of all parameters", [["gradient norm", "#009e73", curves.gradient]], true),
    ...heat("Gradient norm by block", curves.blocks),
  );
}

function hide() {
  history.pushState(null, "", location.pathname + location.search);
  show();
}

document.querySelectorAll("table").forEach(sortable);
document.getElementById("filters").addEventListener("input", filter);
document.getElementById("filters").addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", show);
addEventListener("keydown", event => event.key === "Escape" && !document.getElementById("curves").hidden && hide());
filter();
show();
