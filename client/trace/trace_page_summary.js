/* SPDX-License-Identifier: Apache-2.0 */
/* The figures above the timeline, the list of calls, and the heat map. */
/* ---- the summary ---- */

function stack(box, parts, total, options) {
  const width = box.clientWidth || (box.parentElement || box).clientWidth || 110; /* it may still be hidden */
  box.replaceChildren(
    ...parts
      .filter(p => p.ns > 0)
      .map(p => {
        const share = p.ns / total,
          color = css(p.name),
          room = share * width - 8,
          label = `${p.name} ${percent(share)}`;
        const e = make(options.link ? 'a' : 'span', {
          style: `width:${100 * share}%;background:${color};color:${ink(color)}`,
          title: `${p.name}: ${dur(p.ns)}, ${percent(share)}: ${STAGE_TEXT[p.name]}`,
          ...(options.link ? selects('stage', p.name) : {}),
          tabindex: options.link ? -1 : undefined,
        });
        if (options.text === 2 && room > 7 * label.length) e.append(make('b', {}, label), dur(p.ns));
        else if (options.text && room > 7 * p.name.length)
          e.append(options.text === 1 && room > 7 * label.length ? label : p.name);
        return e;
      }),
  );
}
function showStages() {
  const calls = R.calls.count,
    mean = R.critical_path.map(s => ({ name: s.name, ns: s.total_ns / Math.max(calls, 1) })),
    total = R.calls.total_ns / Math.max(calls, 1);
  $('stages-note').textContent = calls ? `mean of ${plural(calls, 'call')}: ${dur(total)}` : 'no call was recorded';
  $('call-stages').hidden = $('slow-stages').hidden = !calls;
  stack($('call-stages'), mean, total, { text: 2, link: true });
  $('stage-list').replaceChildren(
    ...mean
      .filter(p => p.ns > 0)
      .map(p =>
        make(
          'li',
          {},
          make(
            'a',
            {
              ...selects('stage', p.name),
              title: STAGE_TEXT[p.name],
              'data-stage': p.name,
              'data-ns': R.critical_path.find(s => s.name === p.name).total_ns,
            },
            make('i', { style: `background:${css(p.name)}` }),
            `${p.name} `,
            make('b', {}, percent(p.ns / total)),
            ` ${dur(p.ns)}`,
          ),
        ),
      ),
  );
  const slow = R.critical_path.map(s => ({ name: s.name, ns: s.slow_total_ns })),
    all = slow.reduce((n, p) => n + p.ns, 0);
  $('slow-note').textContent = calls >= 100 ? 'the slowest 1 %:' : calls ? 'the slowest call:' : '';
  stack($('slow-stages'), slow, all, { text: 1, link: true });
}
function table(id, heads, rows) {
  const t = $(id),
    body = make(
      'tbody',
      {},
      ...rows.map(r =>
        make(
          'tr',
          r.attributes || {},
          ...r.cells.map((c, i) =>
            make(
              'td',
              { class: heads[i][0] === '<' ? 'l' + (i === 0 ? ' name' : '') : undefined },
              ...(Array.isArray(c) ? c : [c]),
            ),
          ),
        ),
      ),
    );
  t.replaceChildren(
    make(
      'thead',
      {},
      make('tr', {}, ...heads.map(h => make('th', { class: h[0] === '<' ? 'l' : undefined }, h.replace('<', '')))),
    ),
    body,
  );
}
function showNodes() {
  const slow = R.slowest_node,
    most = Math.max(...R.peers.map(p => p.waited_share + p.late_share), 0.01);
  const served = [...new Set(R.processes.filter((_, i) => serves.has(i)).map(p => p.node))].filter(
    name => name && !R.peers.some(p => p.name === name),
  );
  const badge = (p, by) =>
    slow && slow.name === p.name && slow.by === by
      ? make(
          'span',
          {
            class: 'badge',
            title:
              `${slow.times.toFixed(1)} times ` +
              `${R.peers.length > 2 ? 'the median of the other nodes' : slow.against}`,
          },
          `▲ ${slow.times.toFixed(1)}x`,
        )
      : undefined;
  table(
    'nodes',
    ['<node', 'frames', 'median', 'p99', '<waited for', 'failed', 'unused'],
    R.peers
      .map(p => ({
        attributes: {
          'data-node': p.name,
          'data-frames': p.exchange.count,
          'data-p50': p.exchange.p50_ns,
          'data-p99': p.exchange.p99_ns,
          'data-failed': p.failed,
          'data-unused': p.unused,
          'data-waited': p.waited_share,
        },
        cells: [
          [make('a', { ...selects('node', p.name), title: p.name }, p.name || '-'), p.gateway ? ' (gateway)' : ''],
          count(p.exchange.count),
          [dur(p.exchange.p50_ns), badge(p, 'p50_ns')],
          [dur(p.exchange.p99_ns), badge(p, 'p99_ns')],
          [
            make(
              'span',
              { class: 'waited', title: `${dur(p.waited_ns)} for used answers, ${dur(p.late_ns)} for late ones` },
              make('span', { style: `width:${(70 * p.waited_share) / most}px` }),
              make('span', { style: `width:${(70 * p.late_share) / most}px` }),
            ),
            percent(p.waited_share),
            p.late_share >= 0.01 ? ` + ${percent(p.late_share)} late` : '',
          ],
          p.failed ? make('span', { class: 'fail' }, '✕ ' + count(p.failed)) : '0',
          count(p.unused),
        ],
      }))
      .concat(
        served.map(name => ({
          cells: [[make('a', selects('node', name), name)], '-', '-', '-', 'no caller recorded', '-', '-'],
        })),
      ),
  );
}
function showFailures() {
  const box = $('failures'),
    n = R.calls.unused;
  const row = f => ({
    attributes: { 'data-status': f.status, 'data-of': f.of, 'data-count': f.count },
    cells: [
      [make('span', { class: 'fail' }, '✕ ' + f.status)],
      count(f.count),
      f.of + (f.saved ? `, ${count(f.saved)} of calls that succeeded` : ''),
      f.first_calls.flatMap(id =>
        callById.has(id)
          ? [
              make(
                'a',
                { href: link('list', f.of === 'calls' ? 'failed' : 'slowest', callById.get(id)), 'data-call': id },
                dur(D.calls[callById.get(id)][C.DUR]),
              ),
              ' ',
            ]
          : [],
      ),
    ],
  });
  if (R.failures.length) {
    box.append(make('div', { class: 'scroll' }, make('table', { id: 'failed' })));
    table('failed', ['<status', 'count', '<of', '<the first calls'], R.failures.map(row));
  } else {
    box.append(make('p', {}, R.calls.count ? 'Nothing: no call and no frame.' : 'No call was recorded.'));
  }
  if (n)
    box.append(
      make(
        'p',
        { class: 'dim', style: 'margin-top:4px' },
        make('a', selects('list', 'hedged'), plural(n, 'answer')),
        ` of hedged frames ${n === 1 ? 'was' : 'were'} not used: another copy had answered. That is no failure.`,
      ),
    );
}
function showWarnings() {
  const words = [],
    say = text => words.push(text),
    u = R.unmatched;
  const lost = R.recordings.reduce((n, r) => n + r.discarded_events + r.discarded_packets, 0);
  if (lost) say(`${count(lost)} events or packets were discarded while recording: some spans are missing.`);
  R.recordings.flatMap(r => r.skipped).forEach(s => say(`${s.file} was skipped: ${s.why}.`));
  if (u.begins + u.ends) say(`${plural(u.begins, 'begin')} without an end, ${plural(u.ends, 'end')} without a begin.`);
  if (R.exchanges_without_serve)
    say(
      `${plural(R.exchanges_without_serve, 'frame')} have no serve: their node was not recorded, or events were lost.`,
    );
  if (R.cut) say(`Only the first ${count(R.events)} events were read (--events-max).`);
  R.recordings
    .filter(r => r.clock_error_ns === null)
    .forEach(r => say(`The clock of ${r.path} could not be fitted to the others.`));
  $('warnings').textContent = words.join(' ');
  $('kept').textContent =
    (D.spans_kept < R.spans
      ? `This page holds ${count(D.spans_kept)} of ${count(R.spans)} spans, those of ${count(D.calls_kept)} of ` +
        `${plural(R.requests, 'call')}: the failed, the slowest, some hedged, and others evenly over time. The figures above count all. `
      : '') +
    (u.cut_begins + u.cut_ends
      ? `${plural(u.cut_begins + u.cut_ends, 'span')} cut by the edges of the recording.`
      : '');
}
function showLists() {
  $('lists').replaceChildren(
    ...[
      ['slowest', 'slowest'],
      ['failed', `failed ${count(R.calls.failed)}`],
      ['hedged', `hedged ${count(hedgedCalls)}`],
    ].map(([value, text]) => make('li', {}, make('a', selects('list', value), text))),
  );
}
function showKinds() {
  table(
    'kinds',
    ['<span', 'count', 'p50', 'p99', 'max', 'total', 'share'],
    R.stages.map(s => ({
      attributes: { 'data-kind': s.name, 'data-count': s.count },
      cells: [
        s.name,
        count(s.count),
        dur(s.p50_ns),
        dur(s.p99_ns),
        dur(s.max_ns),
        dur(s.total_ns),
        s.share === null ? '-' : (100 * s.share).toFixed(1) + ' %',
      ],
    })),
  );
}

/* ---- calls over time ---- */

/* One stop of the Tab key for many small links; arrows go on from there. */
function rove(box, cells, columns) {
  cells.forEach((c, i) => c.setAttribute('tabindex', i ? -1 : 0));
  box.onkeydown = ev => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[ev.key],
      next = cells[cells.indexOf(document.activeElement) + by];
    if (by && cells.includes(document.activeElement) && next) {
      ev.preventDefault();
      next.focus();
    }
  };
}
function showChart() {
  const width = $('chart').clientWidth,
    height = 158,
    left = 62,
    top = 22,
    bottom = 20,
    bins = D.bins.filter(b => b[2]);
  if (!bins.length) {
    $('chart').replaceChildren(make('p', { class: 'dim' }, 'No call was recorded.'));
    return;
  }
  const low = Math.log10(Math.min(...bins.map(b => b[3])) * 0.8),
    high = Math.log10(Math.max(...bins.map(b => b[5])) * 1.25);
  const y = ns => top + ((high - Math.log10(Math.max(ns, 1))) / (high - low)) * (height - top - bottom);
  const first = D.bins[0][0],
    last = D.bins[D.bins.length - 1][1],
    x = ns => left + ((ns - first) / (last - first)) * (width - left - 8);
  const within = factors =>
    [...Array(12).keys()].flatMap(d => factors.map(f => f * 10 ** d)).filter(m => m >= 10 ** low && m <= 10 ** high);
  const marks =
    [[1, 2, 3, 4, 5, 6, 8], [1, 2, 5], [1]].map(within).find(m => m.length <= 6) ||
    within([1]).filter((_, i) => i % 2 === 0);
  const svg = make(
    'svg:svg',
    {
      role: 'group',
      'aria-label': 'calls over time; arrows go from moment to moment',
      viewBox: `0 0 ${width} ${height}`,
    },
    ...marks.map(m =>
      make(
        'svg:g',
        {},
        make('svg:line', { class: 'grid', x1: left, x2: width, y1: y(m), y2: y(m) }),
        make('svg:text', { x: left - 6, y: y(m) + 4, 'text-anchor': 'end' }, dur(m)),
      ),
    ),
    make('svg:text', { x: left, y: height - 5 }, since(first, 3)),
    make('svg:text', { x: width - 8, y: height - 5, 'text-anchor': 'end' }, since(last, 3)),
  );
  const links = bins.map(b => {
    const [from, to, n, p50, p99, max, failed, hedged] = b,
      w = Math.max(x(to) - x(from), 2),
      words =
        `${since(from)}: ${plural(n, 'call')}, median ${dur(p50)}, ` +
        `p99 ${dur(p99)}, slowest ${dur(max)}${failed ? `, ${count(failed)} failed` : ''}${hedged ? `, ${count(hedged)} hedged` : ''}`;
    return make(
      'svg:a',
      { ...selects('window', `${from}-${to}`), 'aria-label': words },
      make('svg:title', {}, words),
      make('svg:rect', { class: 'hit', x: x(from), width: w, y: 0, height: height - bottom }),
      make('svg:rect', {
        class: 'range',
        x: x(from) + w * 0.15,
        width: w * 0.7,
        y: y(max),
        height: Math.max(y(p50) - y(max), 2),
      }),
      make('svg:rect', { class: 'middle', x: x(from) + w * 0.05, width: w * 0.9, y: y(p50) - 1.5, height: 3 }),
      failed ? make('svg:text', { class: 'mark bad', x: x(from) + w / 2, y: 14 }, '✕') : undefined,
      hedged && !failed ? make('svg:text', { class: 'mark hedge', x: x(from) + w / 2, y: 14 }, '◇') : undefined,
    );
  });
  svg.append(...links);
  $('chart').replaceChildren(
    svg,
    make(
      'div',
      { class: 'chips plain' },
      make('span', {}, '✕ with a failed call'),
      make('span', {}, '◇ with a hedged call'),
    ),
  );
  rove(svg, links, 1);
}

/* ---- experts ---- */

function showHeat() {
  const by = $('heat-by').value,
    box = $('heat'),
    value = e => (by === 'rows' ? e[2] : e[3]),
    at = new Map(D.experts.map(e => [e[0] + '/' + e[1], e]));
  const layers = [...new Set(D.experts.map(e => e[0]))].sort((a, b) => a - b),
    experts = D.experts.reduce((m, e) => Math.max(m, e[1] + 1), 0);
  const shown = Math.min(experts, 1024),
    tall = Math.min(layers.length, Math.floor(32768 / Math.max(shown, 1))),
    most = D.experts.reduce((m, e) => Math.max(m, value(e)), 1);
  const axis = make('div', { class: 'heat-row axis' }, make('b', {}, 'expert'));
  for (let x = 0; x < shown; x++) axis.append(make('span', {}, shown <= 32 || x % 4 === 0 ? x : ''));
  box.className = shown <= 32 ? 'wide' : '';
  const cells = [];
  box.replaceChildren(
    axis,
    ...layers.slice(0, tall).map(layer => {
      const row = make('div', { class: 'heat-row' }, make('b', {}, 'layer ' + layer));
      for (let x = 0; x < shown; x++) {
        const e = at.get(layer + '/' + x),
          n = e ? value(e) : 0,
          words = `layer ${layer}, expert ${x}: ${e ? `${count(e[2])} rows, busy ${dur(e[3])}` : 'no rows'}`;
        const cell = make(e ? 'a' : 'span', {
          class: 'cell',
          title: words,
          'aria-label': e ? words : undefined,
          'data-layer': layer,
          'data-expert': x,
          'data-rows': e ? e[2] : 0,
          'data-busy-ns': e ? e[3] : 0,
          style: `background:rgba(var(--heat),${n ? 0.08 + (0.92 * n) / most : 0})`,
          ...(e ? selects('expert', `${layer}/${x}`) : {}),
        });
        if (e) cells.push(cell);
        row.append(cell);
      }
      return row;
    }),
  );
  rove(box, cells, Math.max(shown, 1));
  Object.assign(box.dataset, { layers: layers.length, experts, by });
  $('heat-most').textContent = by === 'rows' ? `${count(most)} rows` : dur(most);
  $('heat-note').textContent = D.experts.length
    ? `${plural(layers.length, 'layer')} x ${plural(experts, 'expert')}` +
      (shown < experts || tall < layers.length || D.experts_total > D.experts.length
        ? ` (shown: ${tall} layers, ${shown} experts, ${count(D.experts.length)} of ${count(D.experts_total)} that worked)`
        : '')
    : 'no job was recorded';
}

/* ---- the list of calls ---- */

function showCalls(s, context) {
  const shown = context.calls.slice(0, LISTED),
    key = s.context + '=' + s.value,
    current = i => (i === s.shown ? 'true' : undefined);
  if (showCalls.key === key) {
    /* the same rows: the focus stays where it is */
    [...$('calls').querySelectorAll('tr[data-call]')].forEach((tr, k) => {
      if (current(shown[k])) tr.setAttribute('aria-current', 'true');
      else tr.removeAttribute('aria-current');
    });
    return;
  }
  showCalls.key = key;
  $('calls-title').textContent = context.title;
  table(
    'calls',
    ['<took', 'began', '<where its time went', '<waited longest for', '<status'],
    shown.map(i => {
      const c = D.calls[i];
      const bar = make('div', { class: 'stack mini' });
      stack(
        bar,
        STAGES.map(name => ({ name, ns: stageNs(c, name) })),
        Math.max(c[C.DUR], 1),
        {},
      );
      return {
        attributes: { 'data-call': c[C.ID], 'data-ns': c[C.DUR], 'aria-current': current(i) },
        cells: [
          make('a', { href: link(s.context, s.value, i) }, dur(c[C.DUR])),
          since(c[C.BEGIN], 3),
          bar,
          c[C.PEER_NS] >= c[C.LATE_NS]
            ? c[C.PEER]
              ? `${D.names[c[C.PEER]]} ${dur(c[C.PEER_NS])}`
              : '-'
            : `${D.names[c[C.LATE_PEER]]} ${dur(c[C.LATE_NS])} (late)`,
          c[C.STATUS]
            ? make('span', { class: 'fail' }, '✕ ' + statusName(c[C.STATUS]))
            : c[C.HEDGED]
              ? 'OK, hedged'
              : 'OK',
        ],
      };
    }),
  );
  if (!shown.length) $('calls').append(make('tbody', {}, make('tr', {}, make('td', { class: 'l' }, 'none'))));
}
