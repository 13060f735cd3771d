"use strict";
// Text from peers and jobs becomes text nodes only. The tree is made anew from each state and the
// one that is shown is changed to be like it, so that focus, scrolling and open parts stay.

const SVG = "http://www.w3.org/2000/svg";
const main = document.getElementById("main");
const link = document.getElementById("link");
const summary = document.getElementById("summary");
let live = null;
let newest = null;

function make(space, tag, attributes, children) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {}))
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  for (const child of children.flat(9))
    if (child !== null && child !== undefined && child !== "" && child !== false)
      node.append(child);
  return node;
}
const h = (tag, attributes, ...children) => make("", tag, attributes, children);
const s = (tag, attributes, ...children) => make(SVG, tag, attributes, children);

function become(old, wanted) {
  if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName ||
      (old.id || "") !== (wanted.id || "")) {
    old.replaceWith(wanted);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const { name } of [...old.attributes])
    if (!wanted.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of wanted.attributes)
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  fill(old, [...wanted.childNodes]);
}

function fill(parent, wanted) {
  const shown = [...parent.childNodes];
  wanted.forEach((node, i) => (i < shown.length ? become(shown[i], node) : parent.append(node)));
  shown.slice(wanted.length).forEach((node) => node.remove());
}

// ------------------------------------------------------------ words and numbers

const short = (x) => (Math.abs(x) >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toPrecision(3));
function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000) return `${unit === "B" ? Math.round(n) : short(n)} ${unit}`;
    n /= 1000;
  }
  return `${short(n)} TB`;
}
function seconds(x) {
  if (x < 1) return `${Math.round(1000 * x)} ms`;
  if (x < 100) return `${short(x)} s`;
  if (x < 5400) return `${Math.round(x / 60)} min`;
  return x < 172800 ? `${short(x / 3600)} h` : `${Math.round(x / 86400)} days`;
}
const ago = (x) => (x < 2 ? "now" : x < 100 ? `${Math.round(x)} s ago` : `${seconds(x)} ago`);
const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// ------------------------------------------------------------ a run

function figures(run) {
  const rows = [
    ["step", `${run.step} of ${run.steps}`],
    ["round", run.replicas.length > 1 ? `${run.round_number}, ${count(run.replicas.length, "replica")}` : null],
    ["loss", run.loss === undefined ? null : run.loss.toPrecision(4)],
    ["held-out", run.held_out === undefined ? null : run.held_out.toPrecision(4)],
    ["per step", run.step_s ? seconds(run.step_s) : null],
    ["planned", run.step_s && run.plans.length && run.plans[0].predicted_s ? seconds(run.plans[0].predicted_s) : null],
    ["tokens/s (samples, of arrays and chats)", run.tokens_per_s ? short(run.tokens_per_s) : null],
    ["sent per step", run.sent_bytes_per_step ? bytes(run.sent_bytes_per_step) : null],
    ["peers compute", run.busy ? `${Math.round(100 * run.busy)} %` : null],
    ["left", run.left_s ? seconds(run.left_s) : null],
    ["sent per round", run.round ? bytes(run.round.sent_bytes) : null],
    ["wait for the exchange", run.round && run.round.seconds ? `${Math.round(100 * run.round.waited_s / run.round.seconds)} %` : null],
    ["recoveries", run.recoveries || null],
  ];
  return h("dl", { class: "figures" },
    rows.filter(([, v]) => v !== null).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, String(v)))));
}

function chart(run) {
  const all = [...run.losses, ...run.held_outs];
  if (run.losses.length < 2) return null;
  const width = window.innerWidth < 700 ? 340 : 520, height = window.innerWidth < 700 ? 170 : 230;
  const [left, right, top, low] = [42, 8, 8, 20];
  let least = Math.min(...all.map((p) => p[1])), most = Math.max(...all.map((p) => p[1]));
  if (most - least < 1e-9) [least, most] = [least - 0.5, most + 0.5];
  const last = Math.max(...all.map((p) => p[0]), 1);
  const x = (v) => left + ((width - left - right) * v) / last;
  const y = (v) => top + ((height - top - low) * (most - v)) / (most - least);
  const line = (points, kind) => points.length < 2 ? null
    : s("polyline", { class: kind, points: points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") });
  const ticks = [0, 1, 2, 3].map((i) => least + ((most - least) * i) / 3);
  const say = `Loss from ${run.losses[0][1]} to ${run.losses.at(-1)[1]}`;
  return s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": say },
    ticks.map((v) => [
      s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
      s("text", { x: left - 5, y: y(v) + 4, "text-anchor": "end" }, v.toPrecision(3)),
    ]),
    s("text", { x: left, y: height - 4 }, "step 0"),
    s("text", { x: width - right, y: height - 4, "text-anchor": "end" }, `step ${last}`),
    line(run.losses, "loss"), line(run.held_outs, "held"));
}

function stages(run, plan, peers, links) {
  const apart = run.replicas.length > 1 ? run.replicas[plan.replica] : null;
  const term = apart ? apart.term : run.term;
  const working = !["done", "failed", "cancelled", "waiting"].includes(run.phase);
  const holder = (id) => {
    const peer = peers.get(id);
    const here = peer && peer.run === run.run;
    const idle = plan.bubble[id];
    const facts = peer ? [peer.device, peer.place, peer.relayed && "by relay"].filter(Boolean).join(" · ") : "";
    return [
      h("b", { class: working && !here ? "gone" : null }, peer ? peer.name : id,
        working && !here ? " (away)" : ""),
      h("span", { class: "small" }, facts, idle ? `${facts ? " · " : ""}idle ${Math.round(100 * idle)} % by plan` : ""),
    ];
  };
  const between = plan.links.map(([a, b, size]) => {
    const known = links.get(`${a}>${b}`);
    const name = (id) => (peers.get(id) || { name: id }).name;
    const way = known ? `, ${short(known[2])} ms, ${bytes(known[3])}/s` : "";
    return h("li", {}, `${name(a)} → ${name(b)}: ${bytes(size)} per step${way}`);
  });
  const warm = plan.warm.filter((id) => !plan.stages.some((g) => g.holders.includes(id)));
  return h("div", {},
    h("h4", {}, `Who holds what${apart ? ` of replica ${plan.replica} (${apart.phase}, its step ${apart.step})` : ""}${term ? `, term ${term}` : ""}`),
    h("ol", { class: "stages" }, plan.stages.map((g, i) => h("li", {},
      h("span", { class: "small" }, `stage ${i} · operators ${g.operators[0]} to ${g.operators[1] - 1}`),
      g.holders.map(holder)))),
    warm.length ? h("p", { class: "small" }, `Keeps snapshots, ready to take over: ${warm.map((id) => (peers.get(id) || { name: id }).name).join(", ")}`) : null,
    between.length ? h("details", {}, h("summary", {}, `${count(between.length, "link")} in use`), h("ul", { class: "plain" }, between)) : null);
}

function held(run) {
  if (!run.plans.length || run.phase !== "running") return null;
  const each = (of) => [...new Set(run.plans.flatMap(of))];
  const rows = each((p) => p.bottlenecks).map((b) => `by the plan: ${b}`);
  if (run.busy) rows.unshift(`measured: peers compute ${Math.round(100 * run.busy)} % of the time, and wait for links and each other otherwise`);
  const spares = run.plans.flatMap((p) => p.spares).map(([id, why]) => h("li", {}, `${id}: ${why}`));
  return h("div", {},
    rows.length ? [h("h4", {}, "What holds it back"), h("ul", { class: "plain" }, rows.map((b) => h("li", {}, b)))] : null,
    h("details", {}, h("summary", {}, "Why this plan"),
      h("ul", { class: "plain" }, each((p) => p.reasons).map((r) => h("li", {}, r)), spares)));
}

function moments(run, now) {
  const rows = [...run.moments].reverse();
  return h("div", {}, h("h4", {}, "What happened"),
    h("ol", { class: "moments", tabindex: "0", "aria-label": `Events of run ${run.name}` },
      rows.map((m) => h("li", { class: m.kind }, h("time", {}, ago(now - m.at_s)), m.text))));
}

function card(run, state, peers, links) {
  const over = ["done", "failed", "cancelled"].includes(run.phase);
  const curve = chart(run);
  const parts = [
    curve ? h("div", {}, h("h4", {}, run.held_outs.length > 1 ? "Loss, and held-out loss (dashed)" : "Loss"), curve) : null,
    h("div", {}, run.plans.map((plan) => stages(run, plan, peers, links)), held(run)),
  ];
  return h("article", { class: "card", id: `run-${run.run}` },
    h("div", { class: "title" },
      h("h3", {}, run.name || run.run), h("span", { class: `pill ${run.phase}` }, run.phase),
      h("span", { class: "soft" }, run.run)),
    run.reason ? h("p", { class: `why ${run.phase}` }, run.phase === "waiting" ? "Waits: " : "", run.reason) : null,
    h("progress", { value: run.step, max: run.steps || 1, "aria-label": "steps done" }),
    figures(run),
    over ? h("details", {}, h("summary", {}, "Details"), h("div", { class: "halves" }, parts), moments(run, state.now_s))
      : [h("div", { class: "halves" }, parts), moments(run, state.now_s)]);
}

// ------------------------------------------------------------ what a lender has given

function given(state) {
  if (!state.shares.length) return null;
  const sum = (key) => state.shares.reduce((total, share) => total + share[key], 0);
  const totals = [
    ["hours in steps", short(sum("hours"))],
    ["samples", sum("samples").toLocaleString("en")],
    ["sent", bytes(sum("sent_bytes"))],
    ["runs", state.shares.some((share) => !share.run) ? `over ${state.shares.length - 1}` : state.shares.length],
  ];
  return h("section", { "aria-label": "What your peer has given" }, h("h2", {}, "What your peer has given"),
    h("article", { class: "card" },
      h("dl", { class: "figures" },
        totals.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, String(v))))),
      hoursOverTime(state.shares, state.now_s),
      h("table", {},
        h("thead", {}, h("tr", {}, ["run", "samples", "sent", "hours", "when"].map((k) => h("th", { scope: "col" }, k)))),
        h("tbody", {}, [...state.shares].reverse().map((share) => gave(share, state.now_s))))));
}

function gave(share, now) {
  const cell = (of, ...what) => h("td", { "data-of": of }, what);
  return h("tr", { id: `share-${share.run || "before"}` },
    cell("", h("b", {}, share.run ? share.name || share.run : "all before"), h("div", { class: "small" }, share.run)),
    cell("samples", share.samples.toLocaleString("en")), cell("sent", bytes(share.sent_bytes)),
    cell("hours", short(share.hours)), cell("when", share.last_s ? ago(now - share.last_s) : ""));
}

// Hours as they add up: each run's evenly between its first and its last step.
function hoursOverTime(shares, now) {
  const known = shares.filter((share) => share.last_s > share.first_s);
  if (!known.length) return null;
  const width = window.innerWidth < 700 ? 340 : 900, height = 150;
  const [left, right, top, low] = [48, 8, 8, 20];
  const first = Math.min(...known.map((share) => share.first_s));
  const until = (t) => known.reduce((total, share) =>
    total + share.hours * Math.min(1, Math.max(0, (t - share.first_s) / (share.last_s - share.first_s))), 0);
  const times = [...new Set([...known.flatMap((share) => [share.first_s, share.last_s]), now])].sort((a, b) => a - b);
  const most = until(now) || 1;
  const x = (t) => left + ((width - left - right) * (t - first)) / Math.max(1, now - first);
  const y = (v) => top + ((height - top - low) * (most - v)) / most;
  return s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${short(most)} hours since ${ago(now - first)}` },
    [0, most / 2, most].map((v) => [
      s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
      s("text", { x: left - 5, y: y(v) + 4, "text-anchor": "end" }, `${v ? short(v) : 0} h`),
    ]),
    s("text", { x: left, y: height - 4 }, ago(now - first)),
    s("text", { x: width - right, y: height - 4, "text-anchor": "end" }, "now"),
    s("polyline", { class: "loss", points: times.map((t) => `${x(t).toFixed(1)},${y(until(t)).toFixed(1)}`).join(" ") }));
}

// ------------------------------------------------------------ the peers

function row(peer, runs, names, links) {
  const run = runs.get(peer.run);
  const plan = run && run.plans.find((p) => p.stages.some((g) => g.holders.includes(peer.peer)));
  const held = plan ? plan.stages.flatMap((g, i) => (g.holders.includes(peer.peer) ? [i] : [])) : [];
  const of = plan && run.plans.length > 1 ? ` of replica ${plan.replica}` : "";
  const part = !run ? peer.run
    : held.length ? `stage ${held.join(", ")}${of} of ${run.name || run.run}`
    : run.plans.some((p) => p.warm.includes(peer.peer)) ? `keeps snapshots of ${run.name || run.run}` : run.name || run.run;
  const ways = links.filter(([a]) => a === peer.peer)
    .map(([, b, ms, rate]) => h("li", {}, `to ${names.get(b) ? names.get(b).name : b}: ${short(ms)} ms, ${bytes(rate)}/s`));
  const cell = (of, ...what) => h("td", { "data-of": of }, what);
  return h("tr", { id: `peer-${peer.peer}` },
    cell("", h("b", {}, peer.name), h("div", { class: "small" }, peer.peer === peer.name ? "" : peer.peer)),
    cell("", h("span", { class: `pill ${peer.state}` }, peer.state), peer.closed ? h("div", { class: "small" }, peer.closed) : ""),
    cell("holds", part),
    cell("device", peer.device, h("div", { class: "small" }, bytes(peer.memory_bytes))),
    cell("place", [peer.place, peer.owner].filter(Boolean).join(" · ")),
    cell("links", ways.length ? h("details", {}, h("summary", {}, `${count(ways.length, "link")}`), h("ul", { class: "plain" }, ways)) : "",
      peer.relayed ? h("div", { class: "small" }, "by relay") : ""),
    cell("heard", ago(peer.silent_s)));
}

function draw(state) {
  newest = state;
  const peers = new Map(state.peers.map((p) => [p.peer, p]));
  const runs = new Map(state.runs.map((r) => [r.run, r]));
  const links = new Map(state.links.map((k) => [`${k[0]}>${k[1]}`, k]));
  const rank = (r) => (["done", "failed", "cancelled"].includes(r.phase) ? 2 : r.phase === "waiting" ? 1 : 0);
  const order = [...state.runs].reverse().sort((a, b) => rank(a) - rank(b));
  const phases = {};
  for (const r of state.runs) phases[r.phase] = (phases[r.phase] || 0) + 1;
  const by = Object.entries(phases).map(([k, n]) => `${n} ${k}`).join(", ");
  summary.textContent = `${count(state.peer_count, "peer")} · ${count(state.run_count, "run")}${by ? ` (${by})` : ""}`;
  document.title = `${by || count(state.peer_count, "peer")} · Shoal`;
  const warning = state.public && state.public.problem
    ? h("p", { class: "why waiting" }, `Nobody has reached the public address ${state.public.address} so far: ${state.public.problem}`) : null;
  const heads = ["peer", "state", "holds", "device", "place", "links", "heard"];
  fill(main, [
    h("div", {}, warning),
    h("div", {}, given(state)),
    h("section", { "aria-label": "Runs" }, h("h2", {}, "Runs"),
      order.length ? order.map((r) => card(r, state, peers, links))
        : h("p", { class: "card soft" }, "No run yet: ", h("code", {}, "shoal train job.toml"))),
    h("section", { "aria-label": "Peers" }, h("h2", {}, "Peers"),
      state.peers.length ? h("table", {},
        h("thead", {}, h("tr", {}, heads.map((k) => h("th", { scope: "col" }, k)))),
        h("tbody", {}, state.peers.map((p) => row(p, runs, peers, state.links))))
        : h("p", { class: "card soft" }, "Nobody has joined: paste the line that ", h("code", {}, "shoal broker"), " printed on every GPU."),
      state.peers.length < state.peer_count ? h("p", { class: "soft" }, `and ${state.peer_count - state.peers.length} more`) : null),
  ]);
}

// ------------------------------------------------------------ coming in, and staying

function status(text, kind) {
  link.textContent = text;
  link.className = kind;
}

function ask(text) {
  const field = h("input", { id: "key", "aria-label": "Key", placeholder: "shp1.…", autocomplete: "off", spellcheck: "false" });
  const form = h("form", {}, field, h("button", {}, "Open"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    enter(field.value.trim().replace(/^.*#/, ""));
  });
  fill(main, [h("div", { class: "card notice" }, h("p", {}, text), form)]);
  status("closed", "lost");
}

// Behind a proxy it may have a prefix.
const here = location.pathname.replace(/\/?$/, "/");

async function enter(key) {
  let answer;
  try {
    answer = await fetch(here + "enter", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
  } catch {
    status("the broker does not answer", "lost");
    setTimeout(() => enter(key), 3000);
    return;
  }
  if (key) history.replaceState(null, "", location.pathname);
  if (answer.ok) follow();
  else if (answer.status === 401) ask("This page needs a key: open the link that `shoal page` prints, or paste its last part here.");
  else setTimeout(() => enter(key), 3000);
}

function follow() {
  if (live) live.close();
  live = new EventSource(here + "live");
  live.onmessage = (event) => {
    draw(JSON.parse(event.data));
    status("live", "live");
  };
  live.onerror = () => {
    status("reconnecting", "lost");
    if (live.readyState === EventSource.CLOSED) setTimeout(() => enter(""), 3000);
  };
}

window.addEventListener("resize", () => newest && draw(newest));
enter(location.hash.slice(1));
