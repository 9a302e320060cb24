/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page of `expertctl trace export --format html`: trace_page_data.js, trace_page_summary.js and trace_page_timeline.js,
 * one after the other in one script. The figures are those of `trace report -o json` (D.report); what is clicked is in
 * the address behind '#', and render() shows it. Names come from recordings: they only ever become text.
 *
 * This file: what the page holds, and what is selected of it.
 */
'use strict';
const D = JSON.parse(document.getElementById('data').textContent),
  R = D.report;
const $ = id => document.getElementById(id);
/* Of spans and calls, as trace_html.c writes them. */
const PROCESS = 0,
  KIND = 1,
  BEGIN = 2,
  DUR = 3,
  OWNER = 4,
  JOB = 5,
  THREAD = 6,
  ROWS = 7,
  LAYER = 8,
  EXPERT = 9,
  STATUS = 10,
  UNUSED = 11,
  PEER = 12;
const C = {
  ID: 0,
  TRACE: 1,
  BEGIN: 2,
  DUR: 3,
  PROCESS: 4,
  LAYER: 5,
  TOKENS: 6,
  STATUS: 7,
  HEDGED: 8,
  PEER: 9,
  PEER_NS: 10,
  LATE_PEER: 11,
  LATE_NS: 12,
  SPANS: 13,
  STAGES: 14,
};
const STAGES = R.critical_path.map(s => s.name);
const STAGE_OF = {
  forward: 'client',
  plan: 'pack',
  pack: 'pack',
  exchange: 'wire',
  send: 'wire',
  receive: 'wire',
  serve: 'node',
  decode: 'node',
  reply: 'node',
  queue: 'queue',
  job: 'compute',
  kernel: 'compute',
  combine: 'combine',
  gateway: 'gateway',
  load: 'unserved',
};
const STAGE_TEXT = {
  pack: 'choosing nodes and gathering rows at the client',
  wire: 'frames on their way, and waiting in sockets',
  queue: 'rows wait at a node for their expert',
  compute: 'experts compute',
  node: "a node's own work: decode, reply",
  combine: 'the sum at the client',
  client: 'nothing of the others: the caller works or waits for a CPU',
  gateway: "the gateway's own work",
  late: 'waiting for an answer that was not used, until another copy was asked',
  unserved: 'on a node that was not recorded',
};
const LISTED = 100,
  LANES_MAX = 400;

const css = name =>
  getComputedStyle(document.documentElement)
    .getPropertyValue('--' + name)
    .trim();
const count = n => n.toLocaleString('en-US');
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? '' : 's'}`;
const percent = share =>
  share === 0 ? '0 %' : share < 0.0005 ? '<0.1 %' : (100 * share).toFixed(share >= 0.0995 ? 0 : 1) + ' %';
function dur(ns) {
  /* three digits, as the sentence above */
  let value = ns,
    unit = 0;
  while (value >= 999.5 && unit < 3) {
    value /= 1e3;
    unit++;
  }
  return value.toFixed(unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2) + ' ' + ['ns', 'µs', 'ms', 's'][unit];
}
const since = (ns, digits) => '+' + (ns / 1e9).toFixed(digits ?? 6) + ' s';
function make(tag, attributes, ...children) {
  const e = tag.startsWith('svg:')
    ? document.createElementNS('http://www.w3.org/2000/svg', tag.slice(4))
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {}))
    if (value !== undefined && value !== false) e.setAttribute(key, value);
  e.append(...children.filter(c => c !== undefined && c !== null).map(c => (c instanceof Node ? c : String(c))));
  return e;
}
/* Black or white, whichever is read better on a colour. */
function ink(color) {
  const [r, g, b] = [1, 3, 5]
    .map(i => parseInt(color.length === 4 ? color[(i + 1) / 2].repeat(2) : color.slice(i, i + 2), 16) / 255)
    .map(v => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? '#000' : '#fff';
}
const statusName = number => (number ? D.statuses[number] || 'UNKNOWN' : 'OK');

/* ---- what is kept, by call and by job ---- */

const ownSpans = D.calls.map(() => []),
  jobSpans = new Map(),
  callById = new Map(D.calls.map((c, i) => [c[C.ID], i]));
function push(map, key, value) {
  const list = map.get(key);
  if (list) list.push(value);
  else map.set(key, [value]);
}
D.spans.reduce((at, s) => {
  /* begins are written as differences */
  s[BEGIN] += at;
  if (s[OWNER] >= 0) ownSpans[s[OWNER]].push(s);
  if (s[JOB] && D.kinds[s[KIND]] !== 'queue') push(jobSpans, s[JOB], s);
  return s[BEGIN];
}, 0);
const kind = s => D.kinds[s[KIND]];
const stageNs = (call, stage) => call[C.STAGES + STAGES.indexOf(stage)];
/* All that was done for a call; a job that works for several belongs to each. */
function spansOf(index) {
  const all = new Set(ownSpans[index]);
  ownSpans[index].forEach(s => {
    if (kind(s) === 'queue') (jobSpans.get(s[JOB]) || []).forEach(j => all.add(j));
  });
  return [...all].sort((a, b) => a[BEGIN] - b[BEGIN] || b[DUR] - a[DUR]);
}
/* Callers first, then who passes calls on, then nodes. */
const serves = new Set(D.spans.filter(s => kind(s) === 'serve').map(s => s[PROCESS])),
  placeOf = [];
R.processes
  .map((p, i) => ({ i, name: p.node, rank: serves.has(i) ? 2 : p.node ? 1 : 0 }))
  .sort((a, b) => a.rank - b.rank || (a.name < b.name ? -1 : a.name > b.name ? 1 : a.i - b.i))
  .forEach((p, place) => {
    placeOf[p.i] = place;
  });
const bySize = value => (a, b) => value(D.calls[b]) - value(D.calls[a]);
const hedgedCalls = D.bins.reduce((n, b) => n + b[7], 0),
  everyCall = D.calls.map((_, i) => i);

/* ---- what is selected ---- */

const CONTEXTS = ['node', 'stage', 'expert', 'window', 'trace', 'list'];
function state() {
  const asked = new URLSearchParams(location.hash.slice(1)),
    s = { context: 'list', value: 'slowest', call: undefined, at: undefined };
  const context = CONTEXTS.find(c => asked.has(c));
  if (context) {
    s.context = context;
    s.value = asked.get(context);
  }
  if (callById.has(asked.get('call'))) s.call = callById.get(asked.get('call'));
  else s.missing = asked.get('call');
  const at = (asked.get('at') || '').split('-').map(Number);
  if (at.length === 2 && at[1] > at[0]) s.at = at;
  return s;
}
const link = (context, value, call) =>
  '#' +
  new URLSearchParams(call === undefined ? { [context]: value } : { [context]: value, call: D.calls[call][C.ID] });
const selects = (context, value) => ({ href: link(context, value), 'data-selects': context + '=' + value });

const whole = (() => {
  /* all of the recording's calls, or all of its spans */
  const ends = (list, b, d) =>
    list.reduce((m, s) => [Math.min(m[0], s[b]), Math.max(m[1], s[b] + s[d])], [Infinity, 0]);
  return D.calls.length ? ends(D.calls, C.BEGIN, C.DUR) : D.spans.length ? ends(D.spans, BEGIN, DUR) : [0, 1];
})();
/*
 * Of a context: its title and note, the calls listed, and the spans of its timeline (none: the first call's) in a window of
 * time. bright: the spans meant. null: there is no such thing in this page.
 */
const contexts = {
  list(value) {
    const lists = {
      failed: ['Failed calls', c => c[C.STATUS]],
      hedged: ['Hedged calls', c => c[C.HEDGED]],
      slowest: ['Slowest calls', () => true],
    };
    if (!Object.hasOwn(lists, value)) return null;
    const [title, wanted] = lists[value];
    const calls = everyCall.filter(i => wanted(D.calls[i])).sort(bySize(c => c[C.DUR])),
      all = { failed: R.calls.failed, hedged: hedgedCalls }[value];
    if (!D.calls.length) return { title, calls, view: 'All spans', spans: D.spans, window: whole };
    return { title: title + (calls.length < all ? `, ${count(calls.length)} of ${count(all)}` : ''), calls };
  },
  stage(value) {
    const f = R.critical_path.find(s => s.name === value);
    if (!f) return null;
    return {
      title: `Calls with the most ${value} time`,
      bright: s => STAGE_OF[kind(s)] === value || (value === 'late' && s[UNUSED]),
      note: `${value}: ${STAGE_TEXT[value]}; ${percent(f.share)} of a call.`,
      calls: everyCall.filter(i => stageNs(D.calls[i], value) > 0).sort(bySize(c => stageNs(c, value))),
    };
  },
  node(value) {
    const p = R.peers.find(x => x.name === value),
      name = D.names.indexOf(value),
      on = new Set();
    R.processes.forEach((x, i) => {
      if (x.node === value) on.add(i);
    });
    if (!p && !on.size) return null;
    const waited = c => (c[C.PEER] === name ? c[C.PEER_NS] : 0) + (c[C.LATE_PEER] === name ? c[C.LATE_NS] : 0);
    return {
      title: `Calls that waited longest for ${value}`,
      view: `Node ${value}`,
      window: whole,
      note: p
        ? `${plural(p.exchange.count, 'frame')}, median ${dur(p.exchange.p50_ns)}, p99 ${dur(p.exchange.p99_ns)}, slowest ` +
          `${dur(p.exchange.max_ns)}; calls waited for it ${percent(p.waited_share)} of their time.`
        : undefined,
      calls: everyCall.filter(i => waited(D.calls[i]) > 0).sort(bySize(waited)),
      spans: D.spans.filter(s => on.has(s[PROCESS]) || (kind(s) === 'exchange' && s[PEER] === name)),
    };
  },
  expert(value) {
    const [layer, expert] = value.split('/').map(Number),
      e = D.experts.find(x => x[0] === layer && x[1] === expert);
    if (!e) return null;
    const spans = D.spans.filter(s => s[EXPERT] === expert && s[LAYER] === layer);
    const jobs = spans.filter(s => kind(s) === 'job').sort((a, b) => b[DUR] - a[DUR]);
    return {
      title: `Calls with the longest job of layer ${layer}, expert ${expert}`,
      view: `Layer ${layer}, expert ${expert}`,
      spans,
      window: whole,
      note: `${count(e[2])} rows, busy ${dur(e[3])}; ${plural(jobs.length, 'job')} of it in this page.`,
      byExpert: true,
      calls: [...new Set(jobs.map(s => s[OWNER]).filter(i => i >= 0))],
    };
  },
  window(value) {
    const [from, to] = value.split('-').map(Number);
    if (!(to > from)) return null;
    return {
      title: `Calls begun from ${since(from)} to ${since(to)}`,
      view: `From ${since(from)} to ${since(to)}`,
      window: [from, to],
      calls: everyCall.filter(i => D.calls[i][C.BEGIN] >= from && D.calls[i][C.BEGIN] < to).sort(bySize(c => c[C.DUR])),
      spans: D.spans.filter(s => s[BEGIN] < to && s[BEGIN] + s[DUR] >= from),
    };
  },
  trace(value) {
    const calls = everyCall.filter(i => D.traces[D.calls[i][C.TRACE]] === value);
    if (!calls.length) return null;
    const end = calls.reduce((m, i) => Math.max(m, D.calls[i][C.BEGIN] + D.calls[i][C.DUR]), 0);
    return {
      title: 'Calls of the trace',
      view: `Trace ${value}`,
      calls,
      window: [D.calls[calls[0]][C.BEGIN], end],
      spans: [...new Set(calls.flatMap(spansOf))].sort((a, b) => a[BEGIN] - b[BEGIN] || b[DUR] - a[DUR]),
    };
  },
};
