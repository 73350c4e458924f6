"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const ROW_PX = 30;
const state = { open: new Set([""]), chosen: null, rows: [], pair: [0, 0] };
const run = "against" in report ? null : report.compare; // any two of its steps can be compared
const compared = "against" in report || Boolean(run);

// -- words and numbers ---------------------------------------------------------------------------
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return `${Number(count.toPrecision(3))} ${unit}`;
    count /= 1000;
  }
  return `${Number(count.toPrecision(4))} TB`;
}
function number(value) {
  if (value === undefined || value === null) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
const numel = (tensor) => tensor.shape.reduce((a, b) => a * b, 1);
const share = (part) => (part < 1e-4 ? "< 0.01 %" : `${Number((100 * part).toPrecision(3))} %`);
const shapeOf = (tensor) => tensor.shape.join(" × ") || "scalar";
const stat = (tensor, key) => (tensor.stats ? tensor.stats[key] : undefined);
// How a tensor differs from the other checkpoint's, or between the two chosen steps. `size` is the norm of the difference,
// relative to that of the other checkpoint, or of the first step; undefined if it is not known.
function change(tensor) {
  if (run) return changeOfSteps(tensor);
  const d = tensor.diff;
  if (!d) return { kind: tensor.stats ? "absent" : "unknown" };
  return d.differing ? { kind: "changed", size: d.relative ?? d.max } : { kind: "equal", size: 0 };
}
function changeOfSteps(tensor) {
  const [from, to] = state.pair, places = run.histories[tensor.history];
  if (places[from] === -1 || places[to] === -1) return { kind: "absent", missing: run.steps[places[from] === -1 ? from : to] };
  const norm = norms(tensor, from), far = distance(tensor, from, to);
  const size = far === undefined ? undefined : norm ? far / norm : far;
  if (places[from] === -2 || places[to] === -2) return { kind: size === undefined ? "unknown" : "changed", size, far };
  return places[from] === places[to] ? { kind: "equal", size: 0 } : { kind: "changed", size, far };
}
// A tensor's norm in a step that was read; undefined in others.
const norms = (tensor, step) => (tensor.norms && run.read.includes(step) ? tensor.norms[run.read.indexOf(step)] ?? undefined : undefined);
// The norm of the difference of two steps that were read; `far` has the pairs (0, 1), (0, 2), .. (1, 2), ..
function distance(tensor, from, to) {
  const [i, j] = [run.read.indexOf(from), run.read.indexOf(to)].sort((a, b) => a - b), count = run.read.length;
  if (!tensor.far || i < 0) return undefined;
  return i === j ? 0 : tensor.far[i * count - (i * (i + 1)) / 2 + j - i - 1] ?? undefined;
}
const isChanged = (tensor) => compared && change(tensor).kind === "changed";
// The largest first; changes of unknown size before tensors that are equal.
const apart = (tensor) => { const c = change(tensor); return c.size ?? (c.kind === "changed" ? Number.MIN_VALUE : undefined); };

// -- visible rows: a tree, or a flat list -----------------------------------------------------------
const tree = new Map([["", []]]); // prefix -> [{name, prefix | tensor}]
function grow() {
  for (const tensor of report.tensors) {
    const parts = tensor.name.split(/[./]/);
    let prefix = "", at = 0;
    for (const part of parts.slice(0, -1)) {
      const inner = tensor.name.slice(0, at += part.length) + tensor.name[at];
      at += 1;
      if (!tree.has(inner)) {
        tree.set(inner, []);
        tree.get(prefix).push({ label: part, prefix: inner, bytes: 0, count: 0, nan: 0, apart: 0 });
      }
      prefix = inner;
    }
    tree.get(prefix).push({ label: parts[parts.length - 1], tensor });
  }
  sumUp();
}
function sumUp() {
  const add = (prefix) => {
    const sum = { bytes: 0, count: 0, nan: 0, apart: 0 };
    for (const node of tree.get(prefix)) {
      const t = node.tensor;
      if (node.prefix !== undefined) Object.assign(node, add(node.prefix));
      const part = t ? { bytes: t.bytes, count: 1, nan: stat(t, "nan") || 0, apart: isChanged(t) ? 1 : 0 } : node;
      for (const key of Object.keys(sum)) sum[key] += part[key];
    }
    return sum;
  };
  add("");
}
function treeRows(prefix, depth, rows) {
  for (const node of tree.get(prefix)) {
    rows.push({ node, depth });
    if (node.prefix !== undefined && state.open.has(node.prefix)) treeRows(node.prefix, depth + 1, rows);
  }
  return rows;
}
function pattern(text) {
  const parts = text.toLowerCase().split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(text.includes("*") ? `^${parts.join(".*")}$` : parts.join(".*"));
}
function update() {
  const text = $("search").value.trim(), order = $("sort").value;
  if (!text && order === "tree") state.rows = treeRows("", 0, []);
  else {
    const wanted = pattern(text);
    const matches = report.tensors.filter((tensor) => wanted.test(tensor.name.toLowerCase()));
    const key = { bytes: (t) => t.bytes, norm: (t) => stat(t, "norm"), nan: (t) => stat(t, "nan"),
      zero: (t) => (stat(t, "zero") || 0) / Math.max(1, numel(t)), diff: apart }[order];
    if (key) matches.sort((a, b) => (key(b) ?? -1) - (key(a) ?? -1));
    state.rows = matches.map((tensor) => ({ node: { label: tensor.name, tensor }, depth: 0 }));
  }
  const shown = state.rows.filter((row) => row.node.tensor).length;
  $("count").textContent = text ? `${shown} of ${report.tensors.length}` : `${report.tensors.length} tensors`;
  $("sheet").style.height = `${state.rows.length * ROW_PX}px`;
  draw();
}

// -- draw only the rows in view: a page of 100,000 tensors opens as fast as a page of ten ----------
const COLUMNS = [["dtype", ""], ["shape", ""], ["bytes", "n keep"], ["min", "n"], ["max", "n"], ["mean", "n"], ["norm", "n"], ["NaN", "n"], ["zeros", "n"]];
function cells(node) {
  const t = node.tensor;
  if (!t) return ["", `${node.count} tensors`, bytes(node.bytes), "", "", "", "", node.nan ? String(node.nan) : "", "", compared ? (node.apart ? `${node.apart} differ` : "") : ""];
  const zeros = stat(t, "zero");
  return [t.dtype, shapeOf(t), bytes(t.bytes), ...["min", "max", "mean", "norm"].map((key) => number(stat(t, key))),
    stat(t, "nan") ? String(stat(t, "nan")) : "", zeros ? share(zeros / numel(t)) : "",
    compared ? changeText(change(t)) : ""];
}
function changeText({ kind, size, missing }) {
  if (kind === "absent") return missing === undefined ? "not there" : `not in ${missing}`;
  return kind === "changed" && size !== undefined ? number(size) : kind === "unknown" ? "?" : kind;
}
function rowOf({ node, depth }, index) {
  const row = element("button", "row");
  row.style.top = `${index * ROW_PX}px`;
  const mark = node.prefix === undefined ? "" : state.open.has(node.prefix) ? "▾ " : "▸ ";
  const name = element("span", "name", mark + node.label);
  name.style.paddingLeft = `${depth * 14}px`;
  if (node.tensor && node.label === node.tensor.name) { // a whole name is cut at its start: its end says more
    name.style.direction = "rtl";
    name.textContent = `\u200e${node.label}\u200e`;
  }
  name.title = node.tensor ? node.tensor.name : node.prefix;
  row.append(name);
  cells(node).forEach((text, i) => {
    const wrong = i === 7 && text;
    row.append(element("span", (i < COLUMNS.length ? COLUMNS[i][1] : "n keep") + (wrong ? " bad" : ""), text));
  });
  if (node.tensor && node.tensor === state.chosen) row.classList.add("chosen");
  row.addEventListener("click", () => (node.tensor ? choose(node.tensor) : toggle(node.prefix)));
  return row;
}
function draw() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW_PX) - 4);
  const last = Math.min(state.rows.length, first + Math.ceil(480 / ROW_PX) + 8);
  $("sheet").replaceChildren(...state.rows.slice(first, last).map((row, i) => rowOf(row, first + i)));
}
function toggle(prefix) {
  state.open.has(prefix) ? state.open.delete(prefix) : state.open.add(prefix);
  update();
}

// -- one tensor --------------------------------------------------------------------------------------
function svg(width, height, parts) {
  const holder = element("div");
  holder.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">${parts.join("")}</svg>`; // contains numbers only, so no markup can be injected
  return holder.firstChild;
}
function histogram(stats) {
  const [negative, positive] = stats.bins, used = [...negative, ...positive];
  if (!used.length) return element("p", "quiet", "all values are zero");
  const low = Math.min(...used.map((b) => b[0])), high = Math.max(...used.map((b) => b[0])), span = high - low + 1;
  const bars = [...negative.map(([i, n]) => [high - i, n]), ...positive.map(([i, n]) => [span + 1 + i - low, n])];
  if (stats.zero) bars.push([span, stats.zero]);
  const count = 2 * span + 1, width = 560 / count, most = Math.max(...bars.map((b) => b[1]));
  const edge = number(2 ** (2 * high - 62)); // where the last bar ends
  const parts = bars.map(([x, n]) => {
    const tall = Math.max(1, (100 * n) / most), left = x * width;
    const fill = x === span ? "var(--quiet)" : "var(--accent)";
    return `<rect x="${left + 0.5}" y="${105 - tall}" width="${Math.max(1, width - 1)}" height="${tall}" fill="${fill}"><title>${n} values</title></rect>`;
  });
  const middle = (span + 0.5) * width;
  parts.push(`<text x="0" y="122">-${edge}</text><text x="${middle}" y="122" text-anchor="middle">0</text><text x="560" y="122" text-anchor="end">${edge}</text>`);
  const figure = element("figure");
  figure.append(element("figcaption", "", "values by magnitude; a bar spans a factor of four"), svg(560, 126, parts));
  return figure;
}
function holderBar(tensor) {
  const all = numel(tensor) || 1;
  let x = 0;
  const parts = tensor.held.map(([file, count, size]) => {
    const width = (560 * count * size) / all, left = x;
    x += width;
    const names = file < 0 ? "no file (zeros)" : count > 1 ? `${fileName(file)} to ${fileName(file + count - 1)}, ${size} items each` : `${fileName(file)}, ${size} items`;
    const block = `<rect x="${left}" y="0" width="${Math.max(1, width)}" height="18" fill="${color(file)}"><title></title></rect>`;
    const ticks = count > 1 && count < 200 ? Array.from({ length: count - 1 }, (_, i) => `<line x1="${left + ((i + 1) * width) / count}" x2="${left + ((i + 1) * width) / count}" y1="0" y2="18" stroke="var(--paper)"/>`).join("") : "";
    return [block + ticks, names];
  });
  const picture = svg(560, 20, parts.map((p) => p[0]));
  picture.querySelectorAll("title").forEach((title, i) => (title.textContent = parts[i][1]));
  const list = element("p", "quiet", "stored in: " + parts.slice(0, 6).map((p) => p[1]).join("; ") + (parts.length > 6 ? " .." : ""));
  const holder = element("div");
  holder.append(picture, list);
  return holder;
}
function fileName(i) {
  const name = report.files[i] || "?", rank = /(\d{5})-of-\d{5}\.safetensors$/.exec(name);
  return rank && report.kind === "native" ? `rank ${Number(rank[1])}` : name;
}
// A rank has the color that it has in the pictures of layouts (`layout.pictures.rank_color`).
function color(file) {
  const rank = Number(/^rank (\d+)$/.exec(fileName(file))?.[1] ?? file), cycle = Math.min(Math.max(report.files.length, 3), 16);
  const hue = (0.58 + (rank % cycle) * (cycle < 7 ? 1 / cycle : 0.381966)) % 1;
  return file < 0 ? "var(--rule)" : `hsl(${360 * hue} 62% 72%)`;
}
function choose(tensor) {
  state.chosen = tensor;
  const detail = $("detail"), stats = tensor.stats;
  detail.replaceChildren(element("h3", "", tensor.name));
  const facts = element("div", "facts");
  const say = (key, text) => text !== "" && facts.append(element("span", "", `${key} ${text}`));
  say("", `${tensor.dtype}, ${shapeOf(tensor)}, ${bytes(tensor.bytes)}`);
  if (report.ties[tensor.name]) say("tied to", report.ties[tensor.name]);
  if (stats) {
    for (const key of ["min", "max", "mean", "norm"]) say(key, number(stats[key]));
    say("NaN", String(stats.nan)), say("inf", String(stats.inf)), say("zeros", String(stats.zero));
    if (stats.sampled) say("of a sample of", `${stats.sampled} values, since the file stores few of them`);
  }
  detail.append(facts);
  if (run) detail.append(element("p", "", stepsText(tensor)));
  else if (compared) {
    const d = tensor.diff;
    const text = !d ? "the other checkpoint has no tensor of this name and shape" : !d.differing ? `equal to the other checkpoint's${d.sampled ? " in a sample" : ""}`
      : `${d.differing} of ${d.sampled || numel(tensor)} values differ from the other checkpoint's` + (d.max ? `, by up to ${number(d.max)}` : "") + (!d.max || d.relative === undefined ? "" : `; relative distance ${number(d.relative)}`);
    detail.append(element("p", "", text));
  }
  detail.append(stats && stats.bins ? histogram(stats) : element("p", "quiet", stats ? "no finite values" : "codes: no statistics without their scales"));
  detail.append(holderBar(tensor));
  detail.hidden = false;
  draw();
}

function stepsText(tensor) {
  const [from, to] = state.pair, { kind, size, far, missing } = change(tensor), pair = `steps ${run.steps[from]} and ${run.steps[to]}`;
  if (kind === "absent") return `step ${missing} has no such tensor`;
  if (kind === "unknown") return `${pair}: not known, see above`;
  if (kind === "equal") return `${pair}: equal bit for bit`;
  if (size === undefined) return `${pair}: not equal`;
  return `${pair}: norm ${number(norms(tensor, from))} and ${number(norms(tensor, to))}, norm of the difference ${number(far)}, which is ${share(size)} of step ${run.steps[from]}'s`;
}

// As shlex.quote of Python: a word of a shell's command.
function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}

// -- two steps ---------------------------------------------------------------------------------------
function choosePair() {
  state.pair = [Number($("from").value), Number($("to").value)];
  const counts = { changed: 0, equal: 0, absent: 0, unknown: 0 };
  for (const tensor of report.tensors) counts[change(tensor).kind] += 1;
  const words = { changed: "changed", equal: "equal", absent: "in one of the two only", unknown: "not known" };
  const parts = Object.entries(counts).filter(([, count]) => count).map(([kind, count]) => `${count} ${words[kind]}`);
  const command = `vescale-convert report ${quoted(report.url.replace(/\/step-\d+$/, ""))} --steps ${[...new Set(state.pair.map((step) => run.steps[step]))].join(",")} --out report.html`;
  const hint = counts.unknown ? `: the saves recorded no fingerprints (fingerprint=True). To compare the values: ${command}`
    : state.pair.every((step) => run.read.includes(step)) ? ". Distance: the norm of the difference, relative to the norm in the first of the two"
    : `, by recorded fingerprints. For distances: ${command}`;
  $("verdict").textContent = parts.join(", ") + hint;
  sumUp();
  update();
  if (state.chosen) choose(state.chosen);
}
function showPair() {
  if (!run) return;
  $("pair").hidden = false;
  const read = run.read.length > 1 ? run.read : [run.steps.length - 2, run.steps.length - 1];
  const chosen = { from: run.steps.indexOf(parseInt(wanted.get("from"), 10)), to: run.steps.indexOf(parseInt(wanted.get("to"), 10)) };
  const preset = { from: read[0], to: read[read.length - 1] };
  for (const id of ["from", "to"]) {
    run.steps.forEach((step, place) => $(id).add(new Option(run.read.includes(place) ? `${step} (read)` : step, place)));
    $(id).value = chosen[id] < 0 ? preset[id] : chosen[id];
    $(id).addEventListener("change", choosePair);
  }
  choosePair();
}

// -- layouts: drawn by the library, as `vescale-convert plan` draws them -------------------------------
function showLayouts() {
  if (!report.layouts.length) return;
  $("layouts").hidden = false;
  report.layouts.forEach((layout, i) => {
    const option = element("option", "", layout.title);
    option.value = i;
    $("layout").append(option);
  });
  const show = () => ($("picture").innerHTML = report.layouts[$("layout").value].svg); // all texts in it are escaped
  $("layout").addEventListener("change", show);
  show();
}

// -- steps, values, head ---------------------------------------------------------------------------------
function curve(title, key, show) {
  const points = report.history.filter((step) => step[key] !== null).map((step) => [step.step, step[key]]);
  if (!points.length) return null;
  const [x0, x1] = [points[0][0], points[points.length - 1][0]], ys = points.map((p) => p[1]);
  // Seconds and bytes start at zero. A metric has at least a tenth of its size as its range: noise is no cliff.
  const high = Math.max(...ys), least = Math.min(...ys), size = Math.max(Math.abs(high), Math.abs(least));
  const low = key === "metric" ? Math.min(least, high - 0.1 * size) : 0, spread = high - low || 1;
  const at = ([x, y]) => [60 + (320 * (x - x0)) / (x1 - x0 || 1), 110 - (90 * (y - low)) / spread];
  const line = points.map((p) => at(p).join(",")).join(" ");
  const dots = points.length > 200 ? [] : points.map((p) => `<circle cx="${at(p)[0]}" cy="${at(p)[1]}" r="2.5" fill="var(--accent)"><title>step ${p[0]}: ${show(p[1])}</title></circle>`);
  const figure = element("figure");
  figure.append(element("figcaption", "", title), svg(400, 132, [
    `<polyline points="${line}" fill="none" stroke="var(--accent)" stroke-width="1.5"/>`, ...dots,
    `<line x1="60" x2="380" y1="110" y2="110" stroke="var(--rule)"/>`,
    high === low ? "" : `<text x="54" y="24" text-anchor="end">${show(high)}</text>`,
    `<text x="54" y="112" text-anchor="end">${show(low)}</text>`,
    `<text x="60" y="128">step ${x0}</text><text x="380" y="128" text-anchor="end">${x1}</text>`]));
  return figure;
}
function head() {
  $("where").textContent = `${report.kind} at ${report.url}` + ("against" in report ? `, compared with ${report.against}` : "");
  const totals = { tensors: String(report.tensors.length), "of tensors": bytes(report.tensors.reduce((sum, t) => sum + t.bytes, 0)), [report.files.length === 1 ? "file" : "files"]: String(report.files.length) };
  Object.assign(totals, report.facts);
  if (!run && compared) totals["tensors differ"] = String(report.tensors.filter((t) => t.diff && t.diff.differing).length);
  for (const [key, value] of Object.entries(totals)) {
    const box = element("div", "", key);
    box.prepend(element("b", "", value));
    $("totals").append(box);
  }
  const some = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;
  const bad = report.tensors.filter((t) => stat(t, "nan") || stat(t, "inf")).length;
  const against = "against" in report;
  const lacking = against ? report.tensors.filter((t) => !t.diff && t.stats).length : 0, more = against ? report.only_there.length : 0;
  const notes = [bad && `NaN or infinity in ${some(bad, "tensor")}`, lacking && `no match in the other checkpoint for ${some(lacking, "tensor")}`,
    more && `only in the other checkpoint: ${report.only_there.slice(0, 8).join(", ")}${more > 8 ? ` and ${more - 8} more` : ""}`,
    run && run.num_elsewhere && `only in other steps of this run: ${run.elsewhere.join(", ")}${run.num_elsewhere > run.elsewhere.length ? ` and ${run.num_elsewhere - run.elsewhere.length} more` : ""}`].filter(Boolean);
  $("notice").hidden = !notes.length;
  $("notice").textContent = notes.join("; ");
  $("head").append(element("span", "name", "name"), ...COLUMNS.map(([name, kind]) => element("span", kind, name)), element("span", "n keep", compared ? "distance" : ""));
  if (compared) document.documentElement.style.setProperty("--diff", "90px");
  else $("sort").querySelector("[value=diff]").remove();
}
function rest() {
  const curves = [curve("metric", "metric", number), curve("bytes", "bytes", bytes), curve("seconds of a save", "seconds", number)].filter(Boolean);
  $("history").hidden = !curves.length;
  $("curves").append(...curves);
  const values = Object.entries(report.values);
  $("values").hidden = !values.length;
  $("valuelist").append(...values.slice(0, 500).flatMap(([key, value]) => [element("dt", "", key), element("dd", "", value)]));
}
const wanted = new URLSearchParams(location.hash.slice(1)); // #q=text&sort=bytes&tensor=name&from=10&to=20: a link to this view
head();
grow();
let only = tree.get(""); // folders with a single entry start open
while (only.length === 1 && only[0].prefix !== undefined) state.open.add(only[0].prefix), (only = tree.get(only[0].prefix));
$("search").value = wanted.get("q") || "";
if (wanted.get("sort")) $("sort").value = wanted.get("sort");
$("search").addEventListener("input", () => { $("list").scrollTop = 0; update(); });
$("sort").addEventListener("change", () => { $("list").scrollTop = 0; update(); });
$("list").addEventListener("scroll", draw);
addEventListener("resize", draw);
update();
showPair();
showLayouts();
rest();
const named = report.tensors.find((tensor) => tensor.name === wanted.get("tensor"));
if (named) choose(named);
document.documentElement.dataset.readyMs = Math.round(performance.now());
