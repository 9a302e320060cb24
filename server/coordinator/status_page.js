// SPDX-License-Identifier: Apache-2.0
// What nodes say of themselves is text that nobody vouches for: it goes into textContent and a canvas, nowhere else.
'use strict';
const POLL_MS = 2000, AGAIN_MS = 1000, PATIENCE_MS = 3000, ROWS_MAX = 50, SAMPLES = 4;
const $ = id => document.getElementById(id);
const STATES = ['lost', 'suspect', 'degraded', 'starting', 'draining', 'drained', 'serving'];  // the worst first
const number = n => n.toLocaleString('en-US', {maximumFractionDigits: n < 10 && n % 1 !== 0 ? 1 : 0});
const percent = x => (100 * x).toFixed(x < 0.0995 ? 2 : 1) + ' %';
const byName = new Intl.Collator('en', {numeric: true}).compare;
const countOf = (n, one, many) => `${number(n)} ${n === 1 ? one : many}`;
let now = null, placement = null, answered = performance.now(), silent = false, software = null;
const samples = new Map();

function span(seconds) {
  const units = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const [size, unit] = units.find(u => seconds >= u[0]) || units[3];
  return `${number(seconds < 10 ? Math.round(10 * seconds / size) / 10 : Math.floor(seconds / size))} ${unit}`;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function add(parent, tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
}

// ---- tables: sorted by a heading, ROWS_MAX rows at a time; cells change in place, so that readers keep theirs

// columns: {name, text(row), key(row) to sort by, left, className(row), dim(row) below}; the first names the row.
function makeTable(element, pages, caption, columns, firstSort, firstDown) {
  const table = {rows: [], sort: firstSort, down: firstDown, page: 0};
  const head = add(add(element, 'thead'), 'tr');
  element.setAttribute('aria-label', caption);
  const body = add(element, 'tbody');
  const back = add(pages, 'button', '‹'), where = add(pages, 'span', '', 'dim'), on = add(pages, 'button', '›');
  const turn = by => { table.page += by; table.draw(); };
  for (const [button, by, label] of [[back, -1, 'page before'], [on, 1, 'next page']]) {
    button.type = 'button';
    button.setAttribute('aria-label', `${caption}: ${label}`);
    button.addEventListener('click', () => turn(by));
  }
  columns.forEach((column, c) => {
    const cell = add(head, 'th', undefined, column.left ? 'l' : '');
    cell.scope = 'col';
    const button = add(cell, 'button', column.name);
    button.type = 'button';
    button.addEventListener('click', () => {
      table.down = table.sort === c ? !table.down : !column.left;
      table.sort = c;
      table.page = 0;
      table.draw();
    });
  });
  const drawRow = (line, row) => columns.forEach((column, c) => {
    const cell = line.cells[c] || add(line, c === 0 ? 'th' : 'td');
    if (c === 0) cell.scope = 'row';
    const ownClass = column.className ? column.className(row) : '';
    const classes = [column.left ? 'l' : '', column.wide ? 'wide' : '', ownClass].join(' ').trim();
    if (cell.className !== classes) cell.className = classes;
    if (!column.dim) {
      setText(cell, column.text(row));
    } else {
      setText(cell.children[0] || add(cell, 'span'), column.text(row));
      setText(cell.children[1] || add(cell, 'span', '', 'dim'), column.dim(row));
    }
    if (column.wide || column.dim) cell.title = column.text(row);
  });
  table.draw = () => {
    const {key} = columns[table.sort], sign = table.down ? -1 : 1;
    const order = (a, b) => typeof a === 'string' ? byName(a, b) : a - b;
    const sorted = table.rows.map(row => [key(row), row])
      .sort((a, b) => sign * order(a[0], b[0]) || byName(a[1].name, b[1].name));
    const count = Math.max(1, Math.ceil(sorted.length / ROWS_MAX));
    table.page = Math.min(Math.max(table.page, 0), count - 1);
    const first = table.page * ROWS_MAX, shown = sorted.slice(first, first + ROWS_MAX);
    shown.forEach(([, row], r) => drawRow(body.rows[r] || add(body, 'tr'), row));
    while (body.rows.length > shown.length) body.lastChild.remove();
    [...head.cells].forEach((cell, c) => {
      cell.setAttribute('aria-sort', c !== table.sort ? 'none' : table.down ? 'descending' : 'ascending');
      setText(cell.firstChild, columns[c].name + (c !== table.sort ? '' : table.down ? ' ▼' : ' ▲'));
    });
    setText(where, sorted.length === 0 ? 'none'
      : `${number(first + 1)} to ${number(first + shown.length)} of ${number(sorted.length)}`);
    back.hidden = on.hidden = count === 1;
    back.disabled = table.page === 0;
    on.disabled = table.page === count - 1;
  };
  return table;
}

const badIf = key => node => node[key] > 0 ? 'warn' : '';
const stateOf = node => STATES.includes(node.state) ? STATES.indexOf(node.state) : 0;
const moveText = node => [node.copies_to_load > 0 ? `${number(node.copies_to_load)} to load` : '',
  node.copies_to_drop > 0 ? `${number(node.copies_to_drop)} to give up` : ''].filter(x => x).join(', ') || '-';
const nodesTable = makeTable($('nodes'), $('nodes-pages'), 'nodes', [
  {name: 'node', left: true, text: n => n.name, key: n => n.name, dim: n => n.url.replace(/^[a-z+]*:\/\//, '')},
  {name: 'state', left: true, text: n => n.state, key: stateOf,
    className: n => n.state === 'serving' ? 'good' : stateOf(n) < 3 ? 'fail' : 'warn'},
  {name: 'last seen', text: n => n.last_seen_ms < 1000 ? 'now' : span(n.last_seen_ms / 1000) + ' ago',
    key: n => n.last_seen_ms},
  {name: 'rows/s', text: n => n.rate === null ? '-' : number(n.rate), key: n => n.rate === null ? -1 : n.rate},
  {name: 'experts', text: n => number(n.experts), key: n => n.experts},
  {name: 'moves', text: moveText, key: n => n.copies_to_load + n.copies_to_drop,
    className: n => moveText(n) === '-' ? '' : 'warn'},
  {name: 'calls failed', text: n => number(n.requests_failed), key: n => n.requests_failed,
    className: badIf('requests_failed')},
  {name: 'of them refused', text: n => number(n.requests_refused), key: n => n.requests_refused,
    className: badIf('requests_refused')},
  {name: 'calls hedged', text: n => number(n.requests_hedged), key: n => n.requests_hedged},
  {name: 'devices lost', text: n => n.devices === 0 ? '-' : `${number(n.devices_lost)} of ${number(n.devices)}`,
    key: n => n.devices_lost, className: badIf('devices_lost')},
  {name: 'TLS ends', text: n => n.tls_days === null ? '-' : n.tls_days < 0 ? 'ended' : `in ${number(n.tls_days)} d`,
    key: n => n.tls_days === null ? Infinity : n.tls_days,
    className: n => n.tls_days !== null && n.tls_days < 14 ? 'fail' : ''},
  {name: 'host', left: true, text: n => n.host.slice(0, 13) || '-', key: n => n.host},
], 1, false);

// ---- the service

function rateOf(node, at) {
  const told = at - node.last_seen_ms, list = samples.get(node.id) || [];
  const last = list[list.length - 1];
  if (last && node.rows_served < last.rows) list.length = 0;  // another process
  if (!last || told - last.told > 100) list.push({told, rows: node.rows_served});
  if (list.length > SAMPLES) list.shift();
  samples.set(node.id, list);
  const first = list[0], newest = list[list.length - 1];
  const knows = node.state !== 'lost' && newest.told > first.told;
  return knows ? 1000 * (newest.rows - first.rows) / (newest.told - first.told) : null;
}

function showProblems() {
  const list = $('problems');
  $('problems-part').hidden = now.problems.length === 0;
  list.querySelectorAll('.more').forEach(item => item.remove());
  now.problems.forEach((problem, p) => {
    const item = list.children[p] || add(list, 'li');
    if (!item.firstChild) {
      add(item, 'b');
      item.append('');
      add(item, 'span', '', 'dim');
    }
    item.className = problem.is_error ? 'error' : 'warning';
    item.firstChild.className = problem.is_error ? 'fail' : 'warn';
    setText(item.firstChild, `${problem.is_error ? 'error' : 'warning'} ${problem.code}`);
    if (item.childNodes[1].data !== problem.text) item.childNodes[1].data = problem.text;
    setText(item.lastChild, problem.advice);
  });
  while (list.children.length > now.problems.length) list.lastChild.remove();
  if (now.problems_more > 0) add(list, 'li', `${number(now.problems_more)} problems more`, 'more');
}

function showNodes() {
  const words = $('find').value.toLowerCase();
  const isFound = n => [n.name, n.state, n.host, n.url].some(text => text.toLowerCase().includes(words));
  nodesTable.rows = now.nodes.filter(isFound);
  nodesTable.draw();
  const sum = key => now.nodes.reduce((total, node) => total + node[key], 0);
  const load = sum('copies_to_load'), drop = sum('copies_to_drop');
  const wait = now.copies_waiting > 0 ? `, ${number(now.copies_waiting)} wait for move_rate` : '';
  setText($('moves'), load + drop === 0 && wait === '' ? `${number(now.nodes.length)}, no copy is moving`
    : `${number(now.nodes.length)}, ${number(load)} copies to load, ${number(drop)} to give up${wait}`);
}

function showStatus(status) {
  const at = performance.now();
  if (software !== null && software !== status.software) location.reload();  // an upgraded coordinator has another page
  software = status.software;
  for (const node of status.nodes) node.rate = rateOf(node, at);
  const here = new Set(status.nodes.map(n => n.id));
  for (const id of samples.keys()) if (!here.has(id)) samples.delete(id);
  now = status;
  setText($('about'), `${now.software} · placement ${now.policy}, ${countOf(now.copies, 'copy', 'copies')} · ` +
    `epoch ${now.epoch.number} · ${countOf(now.watchers, 'watcher', 'watchers')} · up ${span(now.uptime_ms / 1000)}`);
  setText($('sentence'), now.summary);
  $('sentence').className = now.healthy ? 'good' : now.answers ? 'warn' : 'fail';
  const problems = countOf(now.problems.length + now.problems_more, 'problem', 'problems');
  document.title = `${now.healthy ? 'healthy' : now.stopping ? 'stopping' : problems} · expertd`;
  showProblems();
  showNodes();
  offerLayers();
}

// ---- which model and layer: kept in the address

const chosen = new URLSearchParams(location.hash.slice(1));
let offered = '';

function fill(select, entries, value) {
  select.replaceChildren(...entries.map(([text, key]) => new Option(text, key, false, key === value)));
}

function offerLayers() {
  const models = now.models.filter(m => m.layers.length > 0), keyOf = m => JSON.stringify([m.name, m.version]);
  $('placement').hidden = models.length === 0;
  if (models.length === 0) return;
  const model = models.find(m => m.name === chosen.get('model') && m.version === chosen.get('version')) ||
    models.find(m => m.is_default) || models[0];
  const layer = model.layers.find(l => String(l) === chosen.get('layer')) ?? model.layers[0];
  chosen.set('model', model.name);
  chosen.set('version', model.version);
  chosen.set('layer', layer);
  const key = JSON.stringify([models.map(keyOf), model.layers, keyOf(model), layer]);
  if (key === offered) return;
  offered = key;
  fill($('model'), models.map(m => [`${m.name} ${m.version}`, keyOf(m)]), keyOf(model));
  fill($('layer'), model.layers.map(l => [String(l), String(l)]), String(layer));
}

function choose(hasLayer) {
  const [name, version] = JSON.parse($('model').value);
  chosen.set('model', name);
  chosen.set('version', version);
  chosen.set('layer', hasLayer ? $('layer').value : '');
  offerLayers();
  history.replaceState(null, '', '#' + chosen);
  poll();
}

// ---- the heat map: of the cells only those in sight are drawn

const canvas = $('heat').querySelector('canvas'), HEAD = 22;
const map = {nodes: [], rowOf: new Map(), columns: 0, loads: null, most: 0, total: 0, cell: 20, gutter: 130,
  moves: new Map(), row: 0, column: 0};

function readPlacement(p) {
  placement = p;
  map.columns = p.copies.length;
  map.loads = [p.heat, p.slots].find(list => list !== null && list.some(x => x > 0)) || null;
  const holders = new Set([...p.copies.flat(), ...p.to_load.map(m => m[1]), ...p.to_drop.map(m => m[1])]);
  const known = new Map(now.nodes.map(n => [n.id, n.name]));
  const here = now.nodes.filter(n => n.state !== 'lost').map(n => n.id);
  map.nodes = [...new Set([...here, ...holders])]
    .map(id => ({id, name: known.get(id) || `node ${id}`})).sort((a, b) => byName(a.name, b.name));
  map.rowOf = new Map(map.nodes.map((n, row) => [n.id, row]));
  map.total = map.loads === null ? 0 : map.loads.reduce((a, b) => a + b, 0);
  map.most = map.loads === null ? 0 : Math.max(...map.loads.map((x, e) => x / Math.max(1, p.copies[e].length)));
  map.moves = new Map([...p.to_load.map(m => [m.join(), 'load']), ...p.to_drop.map(m => [m.join(), 'drop'])]);
  map.row = Math.min(map.row, Math.max(0, map.nodes.length - 1));
  map.column = Math.min(map.column, Math.max(0, map.columns - 1));
  const shared = p.shared_experts > 0 ? ` and ${number(p.shared_experts)} shared` : '';
  const since = map.loads === p.heat ? 'of late, as balancing weighs them' : 'since the coordinator began';
  const of = map.loads === null ? 'no load was counted yet' : `load: slots ${since}`;
  setText($('load-note'), `${number(p.experts)} experts${shared}, ${number(p.top_k)} for each token; ${of}`);
  $('scale-part').hidden = map.loads === null;
  $('flat-part').hidden = map.loads !== null && p.shared_experts === 0;
  setText($('most'), map.loads === null ? '-' : percent(map.most / map.total) + ' of the layer');
}

const loadOf = expert => map.loads === null || expert >= placement.experts ? null : map.loads[expert];

function cellText(row, column) {
  const copies = placement.copies[column], {id, name} = map.nodes[row], load = loadOf(column);
  const move = map.moves.get(`${column},${id}`), shared = column >= placement.experts;
  const what = move === 'load' ? 'is to load it' : move === 'drop' ? 'holds a copy and is to give it up'
    : copies.includes(id) ? 'holds a copy' : 'holds no copy';
  const each = copies.length > 1 && load !== null ? `, ${percent(load / copies.length / map.total)} for each copy` : '';
  const share = load !== null ? `${percent(load / map.total)} of the layer's load${each}`
    : shared ? 'each token uses it' : 'no load known';
  return `${name}, expert ${column}${shared ? ' (shared)' : ''}: ${what}; ` +
    `${countOf(copies.length, 'copy', 'copies')}; ${share}`;
}

function drawHeat() {
  if (placement === null || map.nodes.length === 0) return;
  const box = $('heat'), narrow = box.clientWidth < 640, style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name).trim();
  map.gutter = narrow ? 76 : 150;
  map.cell = Math.max(3, Math.min(22, Math.floor((box.clientWidth - map.gutter - 8) / map.columns)));
  const width = map.gutter + map.columns * map.cell + 8, height = HEAD + map.nodes.length * map.cell + 6;
  Object.assign($('heat-size').style, {width: width + 'px', height: height + 'px'});
  const w = Math.min(width, box.clientWidth), h = Math.min(height, Math.round(innerHeight * (narrow ? 0.7 : 0.6)) - 2);
  const scale = devicePixelRatio || 1;
  canvas.width = w * scale;
  canvas.height = h * scale;
  Object.assign(canvas.style, {width: w + 'px', height: h + 'px'});
  const c = canvas.getContext('2d'), heat = colour('--heat');
  const size = map.cell - (map.cell > 8 ? 2 : map.cell > 3 ? 1 : 0), left = box.scrollLeft, top = box.scrollTop;
  const x = column => map.gutter + column * map.cell - left, y = row => HEAD + row * map.cell - top;
  c.scale(scale, scale);
  const from = Math.max(0, Math.floor(left / map.cell)), to = Math.min(map.columns, Math.ceil((left + w) / map.cell));
  let drawn = 0;
  const cell = (id, column, paint) => {
    const row = map.rowOf.get(id);
    if (row === undefined || y(row) + map.cell < HEAD || y(row) > h) return;
    drawn++;
    paint(x(column), y(row));
  };
  c.save();
  c.beginPath();
  c.rect(map.gutter - 3, HEAD - 3, w - map.gutter + 3, h - HEAD + 3);
  c.clip();
  c.strokeStyle = colour('--line');
  if (map.cell >= 12) {
    for (let column = from; column < to; column++) {
      const frame = (px, py) => c.strokeRect(px + .5, py + .5, size - 1, size - 1);
      for (const node of map.nodes) cell(node.id, column, frame);
    }
  }
  for (let column = from; column < to; column++) {
    const copies = placement.copies[column], load = loadOf(column);
    const share = load === null ? 0 : load / Math.max(1, copies.length) / map.most;
    c.fillStyle = `rgba(${heat}, ${load === null ? .4 : .35 + .65 * share})`;
    for (const id of copies) cell(id, column, (px, py) => c.fillRect(px, py, size, size));
  }
  for (const [list, name] of [[placement.to_load, '--load'], [placement.to_drop, '--drop']]) {
    const framed = name === '--load' && size > 6;
    c.strokeStyle = c.fillStyle = colour(name);
    c.lineWidth = 2;
    for (const [expert, id] of list) {
      if (expert < from || expert >= to) continue;
      cell(id, expert, (px, py) => {
        if (framed) c.strokeRect(px + 1, py + 1, size - 2, size - 2); else c.fillRect(px, py, size, size);
      });
    }
  }
  if (document.activeElement === box) {
    c.strokeStyle = colour('--text');
    c.lineWidth = 2;
    c.strokeRect(x(map.column) - 2, y(map.row) - 2, size + 4, size + 4);
  }
  c.restore();
  drawAxes(c, {w, h, x, y, from, to, colour});
  Object.assign(canvas.dataset, {nodes: map.nodes.length, experts: map.columns, drawn});
}

// Names at the left where rows are high enough, or at every so many rows; numbers of experts above.
function drawAxes(c, {w, h, x, y, from, to, colour}) {
  c.fillStyle = colour('--dim');
  c.font = '12px system-ui, sans-serif';
  c.textBaseline = 'middle';
  const step = Math.max(1, Math.ceil(14 / map.cell)), every = [1, 2, 4, 8].find(n => n * map.cell >= 30) || 16;
  c.save();
  c.beginPath();
  c.rect(0, HEAD, map.gutter - 6, h - HEAD);
  c.clip();
  for (let row = 0; row < map.nodes.length; row += step) {
    if (y(row) > -20 && y(row) < h) c.fillText(map.nodes[row].name.slice(0, 40), 6, y(row) + Math.max(7, map.cell / 2));
  }
  c.restore();
  c.save();
  c.beginPath();
  c.rect(map.gutter, 0, w - map.gutter, HEAD);
  c.clip();
  for (let column = Math.ceil(from / every) * every; column < to; column += every) {
    c.fillText(column < placement.experts ? String(column) : `s${column - placement.experts}`, x(column), HEAD / 2);
  }
  c.restore();
}

function cellAt(event) {
  const box = canvas.getBoundingClientRect(), {scrollLeft, scrollTop} = $('heat');
  const px = event.clientX - box.x - map.gutter, py = event.clientY - box.y - HEAD;
  const column = Math.floor((px + scrollLeft) / map.cell), row = Math.floor((py + scrollTop) / map.cell);
  const isInside = px >= 0 && py >= 0 && column < map.columns && row < map.nodes.length;
  return placement !== null && isInside ? {row, column} : null;
}

function readCell() {
  if (placement !== null && map.nodes.length > 0) setText($('cell'), cellText(map.row, map.column));
}

function onKey(event) {
  const moves = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
    PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -Infinity], End: [0, Infinity]};
  const move = moves[event.key], box = $('heat');
  if (!move || event.ctrlKey || event.altKey || event.metaKey || placement === null) return;
  event.preventDefault();
  map.row = Math.max(0, Math.min(map.nodes.length - 1, map.row + move[0]));
  map.column = Math.max(0, Math.min(map.columns - 1, map.column + move[1]));
  const px = map.gutter + map.column * map.cell, py = HEAD + map.row * map.cell;
  box.scrollLeft = Math.max(px + map.cell + 8 - box.clientWidth, Math.min(box.scrollLeft, px - map.gutter));
  box.scrollTop = Math.max(py + map.cell + 6 - box.clientHeight, Math.min(box.scrollTop, py - HEAD));
  drawHeat();
  readCell();
}

const nodeName = id => map.nodes[map.rowOf.get(id)].name;
const expertsTable = makeTable($('experts'), $('experts-pages'), 'experts of the layer', [
  {name: 'expert', left: true, text: e => e.name, key: e => e.index},
  {name: 'share of load', text: e => e.load === null ? '-' : percent(e.load / map.total),
    key: e => e.load === null ? -1 : e.load},
  {name: 'for each copy', key: e => e.load === null ? -1 : e.load / Math.max(1, e.nodes.length),
    text: e => e.load === null || e.nodes.length === 0 ? '-' : percent(e.load / e.nodes.length / map.total)},
  {name: 'copies', text: e => number(e.nodes.length), key: e => e.nodes.length,
    className: e => e.nodes.length === 0 ? 'fail' : ''},
  {name: 'on nodes', left: true, wide: true, key: e => e.nodes.length === 0 ? '' : nodeName(e.nodes[0]),
    text: e => e.nodes.map(nodeName).join(', ') || 'none: calls that need it fail'},
], 1, true);

function showPlacement() {
  expertsTable.rows = placement.copies.map((nodes, index) =>
    ({index, nodes, load: loadOf(index), name: index < placement.experts ? String(index) : `${index} (shared)`}));
  expertsTable.draw();
  drawHeat();
  if (document.activeElement === $('heat')) readCell();
}

// ---- asking

// {json}, {missing: why} or, without an answer to use, null.
async function ask(path) {
  try {
    const reply = await fetch(path, {cache: 'no-store', signal: AbortSignal.timeout(PATIENCE_MS)});
    if (reply.status === 404) return {missing: (await reply.text()).slice(0, 500).trim()};
    return reply.ok ? {json: await reply.json()} : null;
  } catch {
    return null;
  }
}

async function askPlacement() {
  const wanted = chosen.toString();
  const answer = $('placement').hidden ? {} : await ask('placement.json?' + wanted);
  if (answer === null || wanted !== chosen.toString()) return answer !== null;
  if (answer.json) {
    readPlacement(answer.json);
    showPlacement();
  }
  setText($('placement-error'), answer.missing || '');  // a table came between the two questions: the next status knows
  return true;
}

function showSilence() {
  document.body.classList.toggle('stale', silent);
  $('silence').hidden = !silent;
  if (!silent) return;
  setText($('silence'), `No answer for ${span((performance.now() - answered) / 1000)}. What is below is of then; ` +
    'the question is asked again every second.');
  setText($('sentence'), 'The coordinator does not answer.');
  $('sentence').className = 'fail';
  document.title = 'no answer · expertd';
}

let asking = false, timer = 0;
async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    const answer = await ask('status.json');
    silent = !(answer && answer.json);
    if (!silent) {
      answered = performance.now();
      showStatus(answer.json);
      silent = !await askPlacement();
      $('report').dataset.ready = '1';
    }
    showSilence();
  } finally {
    asking = false;
    timer = setTimeout(poll, silent ? AGAIN_MS : POLL_MS);
  }
}

$('find').addEventListener('input', () => now !== null && showNodes());
$('model').addEventListener('change', () => choose(false));
$('layer').addEventListener('change', () => choose(true));
$('heat').addEventListener('keydown', onKey);
$('heat').addEventListener('scroll', drawHeat);
$('heat').addEventListener('focus', () => { drawHeat(); readCell(); });
$('heat').addEventListener('blur', drawHeat);
canvas.addEventListener('mousemove', event => {
  const at = cellAt(event), tip = $('tip');
  tip.hidden = at === null;
  if (at === null) return;
  setText(tip, cellText(at.row, at.column));
  const right = event.clientX > innerWidth / 2;
  Object.assign(tip.style, {top: Math.min(event.clientY + 14, innerHeight - 90) + 'px',
    left: right ? 'auto' : event.clientX + 14 + 'px', right: right ? innerWidth - event.clientX + 14 + 'px' : 'auto'});
});
canvas.addEventListener('mouseleave', () => { $('tip').hidden = true; });
canvas.addEventListener('click', event => {
  const at = cellAt(event);
  if (at === null) return;
  Object.assign(map, at);
  drawHeat();
  readCell();
});
addEventListener('resize', drawHeat);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawHeat);
document.addEventListener('visibilitychange', () => { if (!document.hidden) poll(); });
setInterval(() => { if (silent) showSilence(); }, 1000);
poll();
