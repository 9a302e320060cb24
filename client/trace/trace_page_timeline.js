/* SPDX-License-Identifier: Apache-2.0 */
/* The timeline of what is selected, and keys and buttons. */

/* ---- lanes and spans ---- */

const LABEL = 152,
  HEAD = 22,
  ROW = 18;
const GROUP = {
  forward: 0,
  gateway: 0,
  plan: 0,
  pack: 0,
  combine: 0,
  exchange: 1,
  send: 2,
  receive: 2,
  serve: 3,
  decode: 3,
  reply: 3,
  queue: 4,
  job: 4,
  kernel: 5,
  load: 6,
};
const timeline = {
  spans: [],
  lanes: [],
  rows: [],
  from: 0,
  to: 1,
  fit: [0, 1],
  bright: null,
  read: null,
  width: 0,
  height: 0,
};
function laneOf(s, byExpert) {
  const group = GROUP[kind(s)];
  return [s[PROCESS], group, group === 1 ? s[PEER] : group === 5 ? s[THREAD] : group === 4 && byExpert ? s[EXPERT] : 0];
}
const laneLabel = ([, group, which], byExpert) =>
  [
    'calls',
    `to ${D.names[which] || '?'}`,
    'frames',
    'serve',
    byExpert ? `expert ${which}` : 'experts',
    `worker ${which}`,
    'load',
  ][group];
/* Spans of one lane either nest within one call or do not overlap. */
function layLanes(spans, byExpert) {
  const groups = new Map();
  spans.forEach(s => {
    const key = laneOf(s, byExpert),
      name = key.join('/'),
      group = groups.get(name) || { key, lanes: [] };
    groups.set(name, group);
    let lane = group.lanes.find(l => {
      while (l.open.length && l.open[l.open.length - 1].end <= s[BEGIN]) l.open.pop();
      const outer = l.open[l.open.length - 1];
      return !outer || (outer.owner === s[OWNER] && outer.end >= s[BEGIN] + s[DUR]);
    });
    if (!lane) {
      lane = { open: [], spans: [], process: key[0], label: laneLabel(key, byExpert) };
      group.lanes.push(lane);
    }
    lane.open.push({ end: s[BEGIN] + s[DUR], owner: s[OWNER] });
    lane.spans.push({ span: s, depth: lane.open.length - 1 });
  });
  return [...groups.values()]
    .sort((a, b) => placeOf[a.key[0]] - placeOf[b.key[0]] || a.key[1] - b.key[1] || a.key[2] - b.key[2])
    .flatMap(g => g.lanes);
}
const isVisible = s => s[BEGIN] <= timeline.to && s[BEGIN] + s[DUR] >= timeline.from;
/* Only lanes with something to see in the window have a row. */
function layRows() {
  const t = timeline,
    rows = [],
    labels = [];
  let y = 0,
    process = -1,
    used = 0,
    left = 0,
    visible = 0;
  t.lanes.forEach(lane => {
    const seen = lane.spans.filter(x => isVisible(x.span));
    if (!seen.length) return;
    if (used >= LANES_MAX) {
      left++;
      return;
    }
    if (lane.process !== process) {
      process = lane.process;
      labels.push(
        make('div', { class: 'head', style: `height:${ROW + 1}px`, title: D.processes[process] }, D.processes[process]),
      );
      y += ROW + 1;
    }
    const depth = seen.reduce((m, x) => Math.max(m, x.depth), 0) + 1,
      height = depth * ROW + 2;
    labels.push(
      make(
        'div',
        {
          class: 'lane',
          style: `height:${height}px`,
          title: lane.label,
          'data-process': D.processes[process],
          'data-lane': lane.label,
          'data-spans': seen.length,
          'data-y': y,
          'data-depth': depth,
        },
        lane.label,
      ),
    );
    rows.push({ seen, y, depth, height });
    y += height;
    used++;
    visible += seen.length;
  });
  Object.assign(t, { rows, height: y + 4, visible, left });
  $('rows').replaceChildren(...labels);
  Object.assign($('timeline').dataset, { lanes: rows.length, visible, spans: t.spans.length });
}
function sizeCanvas(canvas, height) {
  const ratio = Math.min(devicePixelRatio || 1, 16000 / Math.max(height, 1)),
    width = timeline.width;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = width + 'px';
  canvas.style.height = height + 'px';
  const ctx = canvas.getContext('2d');
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.font = '12px system-ui, sans-serif';
  ctx.textBaseline = 'middle';
  return ctx;
}
const px = t => LABEL + ((t - timeline.from) / (timeline.to - timeline.from)) * (timeline.width - LABEL);
const timeAt = x => timeline.from + ((x - LABEL) / (timeline.width - LABEL)) * (timeline.to - timeline.from);
function drawAxis(ctx) {
  const { from, to, width, height } = timeline,
    head = sizeCanvas($('axis'), HEAD),
    start = timeline.zero;
  const raw = (to - from) / Math.max((width - LABEL) / 110, 1),
    unit = 10 ** Math.floor(Math.log10(raw)),
    step = [1, 2, 5, 10].find(m => m * unit >= raw) * unit;
  head.fillStyle = css('dim');
  ctx.strokeStyle = head.strokeStyle = css('line');
  head.fillText(`from ${since(start)}`, 6, HEAD / 2);
  for (let k = Math.ceil((from - start) / step); start + k * step < to; k++) {
    const x = Math.round(px(start + k * step)) + 0.5,
      text = k ? (k < 0 ? '-' : '') + dur(Math.abs(k) * step).replace(/(\.\d*[1-9])0+ |\.0+ /, '$1 ') : '0';
    if (x < LABEL) continue;
    ctx.beginPath();
    ctx.moveTo(x, 0);
    ctx.lineTo(x, height);
    ctx.stroke();
    if (x + 6 + head.measureText(text).width < width) head.fillText(text, x + 3, HEAD / 2);
  }
}
function spanText(s) {
  const name = kind(s) === 'forward' ? 'call' : kind(s);
  return (
    (s[UNUSED] ? 'unused ' : '') +
    (s[STATUS] && !s[UNUSED] ? '✕ ' : '') +
    name +
    (s[EXPERT] >= 0 && name === 'job' && !timeline.byExpert ? ` e${s[EXPERT]}` : '') +
    (['job', 'queue'].includes(name) ? `, ${plural(s[ROWS], 'row')}` : '')
  );
}
function drawSpan(ctx, s, x, y, w, colors) {
  const failed = s[STATUS] && !s[UNUSED],
    fill = failed ? colors.fail : colors[kind(s)];
  ctx.globalAlpha = timeline.bright && !timeline.bright(s) ? 0.25 : s[UNUSED] ? 0.55 : 1;
  ctx.fillStyle = fill;
  ctx.fillRect(x, y, w, ROW - 2);
  if (s[UNUSED] && w > 4) {
    /* hatched: an answer nobody used */
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, y, w, ROW - 2);
    ctx.clip();
    ctx.strokeStyle = css('bg');
    ctx.lineWidth = 2;
    ctx.beginPath();
    for (let k = x - ROW; k < x + w; k += 8) {
      ctx.moveTo(k, y + ROW);
      ctx.lineTo(k + ROW, y);
    }
    ctx.stroke();
    ctx.restore();
  }
  if (s === timeline.read) {
    ctx.globalAlpha = 1;
    ctx.strokeStyle = css('text');
    ctx.lineWidth = 2;
    ctx.strokeRect(x + 1, y + 1, Math.max(w - 2, 1), ROW - 4);
  }
  if (w > 34) {
    ctx.globalAlpha = 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, y, w - 3, ROW);
    ctx.clip();
    const text = spanText(s);
    if (s[UNUSED]) {
      ctx.fillStyle = css('panel');
      ctx.fillRect(x + 2, y + 2, ctx.measureText(text).width + 6, ROW - 6);
      ctx.fillStyle = css('text');
    } else ctx.fillStyle = timeline.bright && !timeline.bright(s) ? css('text') : ink(fill);
    ctx.fillText(text, x + 4, y + (ROW - 2) / 2 + 1);
    ctx.restore();
  }
  ctx.globalAlpha = 1;
}
function draw() {
  const t = timeline,
    colors = { fail: css('fail') };
  t.width = $('timeline-box').clientWidth;
  layRows();
  const ctx = sizeCanvas($('timeline'), t.height);
  D.kinds.forEach(k => {
    colors[k] = css(STAGE_OF[k]);
  });
  drawAxis(ctx);
  t.rows.forEach(r => {
    const edge = new Array(r.depth).fill(-1);
    r.seen.forEach(({ span, depth }) => {
      const b = px(span[BEGIN]),
        e = px(span[BEGIN] + span[DUR]),
        x = Math.max(b, LABEL),
        w = Math.max(Math.min(e, t.width) - x - (e - b > 3 ? 0.5 : 0), 1);
      if (x + w <= edge[depth] && span !== t.read) return;
      edge[depth] = x + w;
      drawSpan(ctx, span, x, r.y + depth * ROW + 1, w, colors);
    });
  });
  if (t.left) $('span-detail').textContent = `${plural(t.left, 'lane')} more have no room: zoom in.`;
}
function showSpan(s) {
  timeline.read = s;
  $('span-detail').textContent = s
    ? [
        `${kind(s)} ${dur(s[DUR])}`,
        `from ${since(s[BEGIN])}`,
        D.processes[s[PROCESS]],
        `thread ${s[THREAD]}`,
        ['send', 'receive'].includes(kind(s)) ? `${count(s[ROWS])} bytes` : plural(s[ROWS], 'row'),
        s[LAYER] >= 0 ? `layer ${s[LAYER]}` : '',
        s[EXPERT] >= 0 ? `expert ${s[EXPERT]}` : '',
        s[PEER] ? `with ${D.names[s[PEER]]}` : '',
        s[UNUSED] ? 'not used: another copy had answered' : '',
        s[STATUS] ? `status ${statusName(s[STATUS])}` : '',
      ]
        .filter(x => x)
        .join(', ')
    : 'Point at a span to read it, or press n and p in the timeline.';
}
function move(from, to) {
  const t = timeline,
    most = (t.all[1] - t.all[0]) * 4 + 10;
  if (to - from < 10) to = from + 10;
  if (to - from > most) {
    const middle = (from + to) / 2;
    from = middle - most / 2;
    to = middle + most / 2;
  }
  t.from = from;
  t.to = to;
  draw();
  clearTimeout(move.later);
  move.later = setTimeout(() => {
    /* the address keeps the window too */
    const asked = new URLSearchParams(location.hash.slice(1));
    asked.set('at', `${Math.max(Math.round(from), 0)}-${Math.max(Math.round(to), 1)}`);
    history.replaceState(null, '', '#' + asked);
  }, 200);
}
function zoom(by, x) {
  const t = timeAt(x ?? (LABEL + timeline.width) / 2);
  move(t - (t - timeline.from) * by, t + (timeline.to - t) * by);
}
function spanUnder(ev) {
  const box = $('timeline').getBoundingClientRect(),
    x = ev.clientX - box.left,
    y = ev.clientY - box.top,
    r = timeline.rows.find(k => y >= k.y && y < k.y + k.height);
  if (!r || x < LABEL) return null;
  const depth = Math.floor((y - r.y) / ROW),
    t = timeAt(x),
    slack = ((timeline.to - timeline.from) / timeline.width) * 2;
  const near = r.seen.filter(
    k => k.depth === depth && k.span[BEGIN] - slack <= t && k.span[BEGIN] + k.span[DUR] + slack >= t,
  );
  return near.length ? near[near.length - 1].span : null;
}
function step(by) {
  /* the spans of the window one after the other */
  const seen = timeline.rows.flatMap(r => r.seen.map(x => x.span)),
    at = seen.indexOf(timeline.read);
  if (!seen.length) return;
  showSpan(seen[at < 0 ? (by > 0 ? 0 : seen.length - 1) : (at + by + seen.length) % seen.length]);
  draw();
  const row = timeline.rows.find(r => r.seen.some(x => x.span === timeline.read)),
    box = $('timeline-box');
  if (row.y < box.scrollTop) box.scrollTop = row.y;
  else if (HEAD + row.y + row.height > box.scrollTop + box.clientHeight)
    box.scrollTop = HEAD + row.y + row.height - box.clientHeight;
}

/* ---- the view: a call, or what a context has many of ---- */

function showView(s, context) {
  const one = s.call !== undefined ? s.call : context.spans ? undefined : context.calls[0],
    c = one === undefined ? null : D.calls[one];
  const byExpert = c !== null || context.byExpert === true,
    spans = c ? spansOf(one) : context.spans || [];
  const pad = w => [w[0] - (w[1] - w[0]) * 0.01 - 1, w[1] + (w[1] - w[0]) * 0.01 + 1],
    t = timeline;
  t.all = pad(
    spans.length
      ? spans.reduce((m, x) => [Math.min(m[0], x[BEGIN]), Math.max(m[1], x[BEGIN] + x[DUR])], [Infinity, 0])
      : whole,
  );
  t.fit = c ? pad([c[C.BEGIN], c[C.BEGIN] + c[C.DUR]]) : context.window ? pad(context.window) : t.all;
  const outside = c ? spans.filter(x => x[BEGIN] > t.fit[1]).length : 0;
  t.zero = c ? c[C.BEGIN] : context.window ? context.window[0] : whole[0];
  [t.from, t.to] = s.at || t.fit;
  Object.assign(t, { spans, lanes: layLanes(spans, byExpert), byExpert, bright: context.bright || null, call: one });
  const asked = s.call !== undefined || s.context !== 'list' || (s.value !== 'slowest' && context.calls.length > 0);
  $('back').hidden = !asked;
  $('view-title').textContent = c
    ? `${asked ? 'Call' : 'The slowest call'} ${c[C.ID]}: ${dur(c[C.DUR])}, ${statusName(c[C.STATUS])}`
    : context.view || context.title;
  $('view-note').replaceChildren(
    ...(c
      ? [
          `layer ${c[C.LAYER]}, ${plural(c[C.TOKENS], 'token')}, of ${D.processes[c[C.PROCESS]]}, `,
          make('a', { href: link('trace', D.traces[c[C.TRACE]]) }, `trace ${D.traces[c[C.TRACE]]}`),
          `. ${context.bright ? context.note : ''}`,
          outside ? ` ${plural(outside, 'span')} of it began after it had ended.` : '',
          ownSpans[one].length < c[C.SPANS]
            ? ` This page has room for ${count(ownSpans[one].length)} of its ${plural(c[C.SPANS], 'span')}.`
            : '',
        ]
      : [context.note || '', spans.length ? ` ${plural(spans.length, 'span')}.` : ' None of its spans is in this page.']),
  );
  if (c)
    stack(
      $('view-stages'),
      STAGES.map(name => ({ name, ns: stageNs(c, name) })),
      Math.max(c[C.DUR], 1),
      { text: 1 },
    );
  else $('view-stages').replaceChildren();
  s.shown = one;
  Object.assign($('view').dataset, { call: c ? c[C.ID] : '', context: s.context, value: s.value });
  showSpan(null);
  draw();
}
let first = true;
function render() {
  clearTimeout(move.later); /* the window of what was shown before */
  let s = state(),
    context = contexts[s.context](s.value);
  $('find-note').textContent = !context
    ? `this page has no ${s.context} ${s.value}`
    : s.missing
      ? `this page has no call ${s.missing}`
      : '';
  if (!context) {
    s = { ...s, context: 'list', value: 'slowest' };
    context = contexts.list('slowest');
  }
  showView(s, context);
  showCalls(s, context);
  document.querySelectorAll('[data-selects]').forEach(a => {
    if (a.dataset.selects === s.context + '=' + s.value) a.setAttribute('aria-current', 'true');
    else a.removeAttribute('aria-current');
  });
  if (!first || location.hash) $('view').scrollIntoView({ block: 'nearest' });
  first = false;
}
function find(ev) {
  ev.preventDefault();
  const id = $('find-id').value.trim().toLowerCase(),
    trace = id && D.traces.find(t => t.startsWith(id)),
    call = id && D.calls.findIndex(c => c[C.ID].startsWith(id));
  $('find-note').textContent = !id || trace || call >= 0 ? '' : 'no call in this page has it';
  if (trace) location.hash = link('trace', trace);
  else if (id && call >= 0) location.hash = link('list', 'slowest', call);
}

/* ---- input ---- */

let drag = null,
  dragged = false;
$('timeline').onmousedown = ev => {
  drag = ev.clientX;
  dragged = false;
};
addEventListener('mouseup', () => {
  drag = null;
});
$('timeline').onmousemove = ev => {
  if (drag === null) {
    const s = spanUnder(ev);
    if (s) showSpan(s);
    return;
  }
  const by = ((drag - ev.clientX) / (timeline.width - LABEL)) * (timeline.to - timeline.from);
  dragged = dragged || Math.abs(drag - ev.clientX) > 2;
  drag = ev.clientX;
  move(timeline.from + by, timeline.to + by);
};
$('timeline').onclick = ev => {
  /* of many calls, one is chosen; of one, a span */
  const s = dragged ? null : spanUnder(ev);
  if (s && timeline.call === undefined && s[OWNER] >= 0) {
    const now = state();
    location.hash = link(now.context, now.value, s[OWNER]);
  } else if (s) {
    showSpan(s);
    draw();
  }
};
$('timeline-box').addEventListener(
  'wheel',
  ev => {
    if (!ev.ctrlKey) return;
    ev.preventDefault();
    zoom(ev.deltaY > 0 ? 1.25 : 0.8, ev.clientX - $('timeline').getBoundingClientRect().left);
  },
  { passive: false },
);
$('timeline-box').onkeydown = ev => {
  const by = (timeline.to - timeline.from) * 0.15,
    keys = {
      ArrowLeft: () => move(timeline.from - by, timeline.to - by),
      ArrowRight: () => move(timeline.from + by, timeline.to + by),
      '+': () => zoom(0.7),
      '=': () => zoom(0.7),
      '-': () => zoom(1.4),
      Home: () => move(...timeline.fit),
      n: () => step(1),
      p: () => step(-1),
    };
  if (keys[ev.key] && !ev.ctrlKey && !ev.altKey && !ev.metaKey) {
    ev.preventDefault();
    keys[ev.key]();
  }
};
$('zoom-in').onclick = () => zoom(0.5);
$('zoom-out').onclick = () => zoom(2);
$('zoom-fit').onclick = () => move(...timeline.fit);
$('zoom-all').onclick = () => move(...timeline.all);
addEventListener('keydown', ev => {
  if (ev.key === 'Escape' && ev.target.tagName !== 'INPUT') location.hash = '#list=slowest';
});
$('find').onsubmit = find;
$('heat-by').onchange = showHeat;

function showAll() {
  /* what depends on width or colours */
  showCalls.key = null;
  showStages();
  showChart();
  showHeat();
  const used = new Set(D.spans.map(s => STAGE_OF[kind(s)]));
  $('legend').replaceChildren(
    ...STAGES.filter(n => used.has(n)).map(n => make('span', {}, make('i', { style: `background:${css(n)}` }), n)),
    make('span', {}, make('i', { style: `background:${css('fail')}` }), '✕ failed'),
    make(
      'span',
      {},
      make('i', {
        style: `background:repeating-linear-gradient(135deg, ${css('dim')} 0 3px, ${css('panel')} 3px 6px)`,
      }),
      'hatched: answer not used',
    ),
    make('span', {}, 'Ctrl + wheel zooms, dragging moves'),
  );
  render();
}
$('sentence').textContent = R.summary;
$('where').textContent =
  R.recordings.map(r => `${r.path} (${r.host || 'unknown host'})`).join(', ') +
  (R.spans
    ? `, ${new Date(D.start_ns / 1e6).toISOString().slice(0, 19).replace('T', ' ')} UTC, ${dur(whole[1] - whole[0])}`
    : '');
showWarnings();
showNodes();
showFailures();
showLists();
showKinds();
showAll();
addEventListener('hashchange', render);
let later;
addEventListener('resize', () => {
  clearTimeout(later);
  later = setTimeout(showAll, 100);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', showAll);
Object.assign($('report').dataset, {
  ready: '1',
  spans: R.spans,
  calls: R.calls.count,
  p50: R.calls.p50_ns,
  p99: R.calls.p99_ns,
  failed: R.calls.failed,
  unused: R.calls.unused,
});
