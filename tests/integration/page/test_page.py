#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The coordinator's status page: what its documents hold and refuse, what a browser shows of a service whose node dies, whose copies
move and whose coordinator is stopped, and of a made-up service of 1,024 nodes, 512 experts and 61 layers."""
import http.client, http.server, json, re, signal, socket, sys, threading, time, urllib.parse

from browser import Browser
import peer
from door_cluster import EXPERTCTL, EXPERTS, LAYER, Cluster, wait_for

CHROMIUM = sys.argv[3] if len(sys.argv) > 3 else None
TOKEN = "a-token-that-no-page-may-show"
EVIL = "<img/src=x/onerror=document.title=1>"  # names have no blanks
NODES, MANY_EXPERTS, LAYERS = 1024, 512, 61
ELEMENTS_MAX = 2500
NODE = {"id": int, "name": str, "url": str, "host": str, "state": str, "last_seen_ms": int, "behind_ms": int, "rows_served": int,
        "requests_failed": int, "requests_hedged": int, "requests_refused": int, "weight_bytes": int,
        "weight_quant_error": (float, type(None)), "weight_quant_output_error": (float, type(None)), "experts": int, "copies_to_load": int, "copies_to_drop": int,
        "devices": int, "devices_lost": int, "tls_days": (int, type(None))}
PROBLEM = {"code": str, "is_error": bool, "ends_service": bool, "text": str, "advice": str}
MODEL = {"name": str, "version": str, "is_default": bool, "layers": [int]}
EPOCH = {"term": str, "number": int}
STATUS = {"software": str, "stopping": bool, "healthy": bool, "answers": bool, "summary": str, "problems": [PROBLEM], "problems_more": int,
          "epoch": EPOCH, "policy": str, "copies": int, "copies_waiting": int, "watchers": int, "uptime_ms": int, "nodes": [NODE], "models": [MODEL]}
PLACEMENT = {"model": str, "version": str, "layer": int, "epoch": EPOCH, "experts": int, "shared_experts": int, "top_k": int, "copies": [[int]],
             "heat": ([int], type(None)), "slots": ([int], type(None)), "to_load": [[int]], "to_load_more": int, "to_drop": [[int]],
             "to_drop_more": int}


def fits(value, form):
    """All of form's keys and no others, each of its type."""
    if isinstance(form, tuple):
        return any(fits(value, one) for one in form)
    if isinstance(form, dict):
        return isinstance(value, dict) and value.keys() == form.keys() and all(fits(value[k], form[k]) for k in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(one, form[0]) for one in value)
    return type(value) is form


def ask(ports, path, method="GET"):
    url = urllib.parse.urlsplit(ports["probe_url"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    connection.request(method, path)
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply.headers


def document(ports, path, form):
    status, text, headers = ask(ports, path)
    assert status == 200 and headers["Content-Type"] == "application/json", (path, status, text)
    assert TOKEN not in text and fits(json.loads(text), form), text
    return json.loads(text)


def check_documents(ports):
    status = document(ports, "/status.json", STATUS)
    assert status["healthy"] and status["answers"] and {n["name"] for n in status["nodes"]} == {"alpha", "beta", EVIL}, status
    model = status["models"][0]
    assert model["name"] == "demo" and model["is_default"] and LAYER in model["layers"], model
    ids = {n["id"] for n in status["nodes"]}
    layer = f"/placement.json?model=demo&layer={LAYER}"
    for path in layer, f"{layer}&version={model['version']}":
        placed = document(ports, path, PLACEMENT)
        assert placed["experts"] == EXPERTS == len(placed["copies"]) and all(len(c) == 2 and set(c) <= ids for c in placed["copies"]), placed
        assert sum(placed["slots"]) > 0 and placed["to_load"] == placed["to_drop"] == [], placed
    assert sum(n["experts"] for n in status["nodes"]) == 2 * EXPERTS * len(model["layers"])
    assert all(n["weight_bytes"] > 0 for n in status["nodes"]), status
    status, page, headers = ask(ports, "/status")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8" and "unsafe" not in policy and "default-src 'none'" in policy
    assert "http:" not in page and "https:" not in page and " on" + "click" not in page and "innerHTML" not in page
    return page, policy


def check_refusals(ports):
    """Each with a word that says what to do, and the server goes on."""
    for path, code, word in (("/placement.json?model=nobody&layer=0", 404, "there are: demo "), ("/placement.json?model=demo&layer=99", 404, "has no layer 99"),
                             ("/placement.json?model=demo&version=v9&layer=0", 404, "there are: demo "), ("/placement.json", 400, "model=NAME"),
                             ("/placement.json?model=demo", 400, "layer=N"), ("/placement.json?model=demo&layer=-1", 400, "layer=N"),
                             ("/placement.json?model=demo&layer=1e9", 400, "layer=N"), ("/placement.json?model=demo&layer=4294967296", 400, "layer=N"),
                             ("/placement.json?model=%3Cscript%3E%ff%0a&layer=0", 404, "<script>\\xff\\x0a"), ("/placement.json?model=" + "x" * 4000 + "&layer=0", 404, "xxx"),
                             ("/nothing", 404, "there are /status /livez")):
        status, text, headers = ask(ports, path)
        assert status == code and word in text and headers["Content-Type"].startswith("text/plain") and len(text) < 2000, (path, status, text)
    for path in "/", "/status", "/status.json", "/placement.json?model=demo&layer=0":
        for method in "POST", "PUT", "DELETE", "OPTIONS":
            assert ask(ports, path, method)[0] == 405, (method, path)
        status, text, headers = ask(ports, path, "HEAD")
        assert status in (200, 302) and text == "" and int(headers["Content-Length"]) > 0, (path, status)
    status, text, headers = ask(ports, "/")
    assert status == 302 and headers["Location"] == "status" and text.startswith("expertd: the coordinator: calls go to tcp://"), (status, text)
    url = urllib.parse.urlsplit(ports["probe_url"])
    with socket.create_connection((url.hostname, url.port), timeout=60) as huge:
        try:
            huge.sendall(b"GET /status.json?" + b"q" * 100000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = huge.recv(100)
        except ConnectionError:
            answer = b""
        assert b" 200 " not in answer, answer
    assert ask(ports, "/status.json")[0] == 200


def text_of(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).textContent")


def rows(browser, table):
    """By heading, the arrow of the sorted one left out."""
    return browser.run(f"(() => {{ const t = document.getElementById('{table}'), heads = [...t.tHead.rows[0].cells].map(c => c.textContent.replace(/ [▲▼]$/, ''));"
                       "return [...t.tBodies[0].rows].map(r => Object.fromEntries([...r.cells].map((c, i) => [heads[i], (c.firstElementChild || c).textContent]))); })()")


def row(browser, node):
    return next((r for r in rows(browser, "nodes") if r["node"] == node), None)


def see(browser, condition):
    """Waits for it, and lets the page ask at once rather than at its own pace, as when somebody turns to it."""
    browser.wait(f"(document.dispatchEvent(new Event('visibilitychange')), {condition})")


def check_sizes(browser):
    """Nothing wider than the page, no small text, in both themes."""
    for width, height in ((1280, 800), (400, 800)):
        browser.size(width, height)
        for dark in (False, True):
            browser.dark(dark)
            assert browser.run("document.documentElement.scrollWidth") <= width
            small = browser.run("[...document.querySelectorAll('main *')].filter(e => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML.slice(0, 99))")
            assert not small, small
    browser.size(1280, 800)
    browser.dark(False)


def check_harmless(browser):
    """Names are text: no element came of them, and no script ran."""
    assert browser.run("document.querySelectorAll('img, body script + script').length") == 0 and browser.run("document.title") != "1"


def use_heat_map(browser):
    """Its cells are read by keys alone."""
    browser.run(f"(() => {{ const s = document.getElementById('layer'); s.value = '{LAYER}'; s.dispatchEvent(new Event('change')); }})()")
    browser.wait("document.getElementById('load-note').textContent.includes('since the coordinator began')")
    assert f"layer={LAYER}" in browser.run("location.hash")
    assert browser.run("({...document.querySelector('#heat canvas').dataset})")["nodes"] == "3"
    browser.run("document.getElementById('heat').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    shown = text_of(browser, "#cell")
    assert shown.startswith("alpha, expert 1: holds ") and "2 copies" in shown and "of the layer's load" in shown, shown
    browser.press("ArrowUp")
    assert text_of(browser, "#cell").startswith(EVIL + ", expert 1: ")
    experts = rows(browser, "experts")
    shares = [float(e["share of load"].split(" ")[0]) for e in experts]
    assert len(experts) == EXPERTS and abs(sum(shares) - 100) < 1 and shares == sorted(shares, reverse=True), experts


def watch_service(c, ports, browser):
    browser.open(ports["probe_url"] + "/")
    assert browser.run("location.pathname") == "/status"
    assert text_of(browser, "#sentence").startswith("Healthy: 3 nodes") and browser.run("document.title") == "healthy · expertd"
    for name in "alpha", "beta", EVIL:
        shown = row(browser, name)
        assert shown["state"] == "serving" and shown["moves"] == "-" and int(shown["experts"]) > 0, shown
    see(browser, "[...document.querySelectorAll('#nodes tbody tr')].every(r => r.cells[3].textContent !== '-')")
    check_sizes(browser)
    use_heat_map(browser)
    check_harmless(browser)

    process = dict(c.processes)["evil"]
    process.kill()
    process.wait()
    c.processes = [(n, p) for n, p in c.processes if n != "evil"]
    see(browser, "document.querySelector('#nodes tbody td').textContent === 'lost'")
    assert row(browser, EVIL)["state"] == "lost", rows(browser, "nodes")
    assert text_of(browser, "#sentence").startswith("Calls are answered, with 1 error"), text_of(browser, "#sentence")
    assert f"error node-lostnode {EVIL} at tcp://" in text_of(browser, "#problems")
    check_harmless(browser)


def watch_move(c, ports, browser):
    """Drained, a node gives up what the other one has; it drops nothing yet, so the page must come to see it."""
    c.run(EXPERTCTL, "drain", "alpha", "--admin", ports["admin_url"], "--admin-token-file", c.path("admin-token"))
    see(browser, r"/, 0 copies to load, [1-9]\d* to give up$/.test(document.getElementById('moves').textContent)")
    shown = row(browser, "alpha")
    assert re.fullmatch(r"\d+ to give up", shown["moves"]) and shown["state"] in ("draining", "drained"), shown
    assert row(browser, "beta")["moves"] == "-"
    see(browser, "placement.to_drop.length > 0")
    browser.run("document.getElementById('heat').focus()")
    browser.press("Home")
    browser.wait("document.getElementById('cell').textContent.includes('alpha, expert 0: holds a copy and is to give it up')")


def watch_calls(nodes, browser):
    """What a node counts comes by its heartbeats."""
    with peer.Peer(nodes["beta"]["rpc_url"]) as caller:
        assert caller.hello(token=TOKEN).status == 0
        for _ in range(3):
            assert caller.call(peer.FORWARD, peer.message((1, "nothing"))).status != 0
    see(browser, "[...document.querySelectorAll('#nodes tbody tr')].some(r => r.cells[6].textContent === '3')")
    assert row(browser, "beta")["calls failed"] == "3" and row(browser, "alpha")["calls failed"] == "0"


def watch_liar(ports, browser):
    """An error that is markup, with blanks, and counts beyond all bounds."""
    error = "<img src=x onerror=\"document.title=1\"> \x1b[31m </script><svg onload=document.title=1>"
    with peer.Peer(ports["rpc_url"]) as liar:
        assert liar.hello(role="node", node="liar", token=TOKEN, incarnation=7).status == 0
        assert liar.call(peer.REGISTER, peer.register_body("liar", "tcp://127.0.0.1:9", 7)).status == 0
        beat = peer.message((1, "liar"), (2, 7), (4, "serving"), (5, 2**64 - 1), (10, 2**64 - 1), (11, 2**32 - 1), (12, 2**64 - 1),
                            (13, error), (14, 2**64 - 1), (15, 2**64 - 1), (16, 2**64 - 1))
        problems = "document.getElementById('problems').textContent"
        wait_for("the error", lambda: liar.call(peer.HEARTBEAT, beat).status == 0 and browser.run(
            f"(document.dispatchEvent(new Event('visibilitychange')), {problems}.includes('<img src=x'))"))
        assert error.replace("\x1b", "\\x1b") in browser.run(problems), browser.run(problems)
        shown = row(browser, "liar")
        assert shown["calls hedged"].startswith("9,223,372,036,854,77") and shown["devices lost"] == "64 of 4,294,967,295", shown
    check_harmless(browser)


def watch_silence(c, browser, meanwhile):
    """The page waits a while for an answer before it says that there is none."""
    coordinator = dict(c.processes)["coordinator"]
    coordinator.send_signal(signal.SIGSTOP)
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    meanwhile()
    browser.wait("document.body.classList.contains('stale')")
    assert text_of(browser, "#sentence") == "The coordinator does not answer." and text_of(browser, "#silence").startswith("No answer for ")
    assert row(browser, "alpha") is not None, "what was known stays"
    coordinator.send_signal(signal.SIGCONT)
    see(browser, "!document.body.classList.contains('stale')")
    assert browser.run("document.getElementById('silence').hidden") and "answer" in text_of(browser, "#sentence")


def made_up():
    """(status, placement) of a large service, with all a node can say badly."""
    name = lambda n: EVIL if n == 77 else f"node-{n}"
    nodes = [{"id": n, "name": name(n), "url": f"tcp://10.0.{n // 256}.{n % 256}:7420", "host": "h" * 60, "state": "suspect" if n == 500 else "serving",
              "last_seen_ms": 2**63 - 1 if n == 500 else 300, "behind_ms": 0, "rows_served": 2**63 - 1 - n, "requests_failed": n, "requests_hedged": n,
              "requests_refused": 0, "weight_bytes": n << 30,
              "weight_quant_error": None, "weight_quant_output_error": None, "experts": 61, "copies_to_load": n % 3, "copies_to_drop": 1, "devices": 8, "devices_lost": 1,
              "tls_days": (None, -1, 2**40)[n % 3]} for n in range(NODES)]
    problem = {"code": "tls-refused", "is_error": True, "ends_service": False, "text": f"node {EVIL}: {'<svg onload=document.title=1>' * 9}", "advice": "repair it"}
    status = {"software": "s", "stopping": False, "healthy": False, "answers": True, "summary": "Calls are answered, with 64 errors.", "problems": [problem] * 64,
              "problems_more": 9, "epoch": {"term": "1", "number": 2}, "policy": "balanced", "copies": 2, "copies_waiting": 3, "watchers": 1, "uptime_ms": 1, "nodes": nodes,
              "models": [{"name": "large", "version": "v1", "is_default": True, "layers": list(range(3, 3 + LAYERS))}]}
    heat = [1000 // (e + 1) for e in range(MANY_EXPERTS)]
    placement = {"model": "large", "version": "v1", "layer": 3, "epoch": {"term": "1", "number": 2}, "experts": MANY_EXPERTS, "shared_experts": 0, "top_k": 8,
                 "copies": [[e, (e * 7 + 512) % NODES] for e in range(MANY_EXPERTS)], "heat": heat, "slots": heat, "to_load": [[5, 900], [6, 4000]],
                 "to_load_more": 0, "to_drop": [[5, 5]], "to_drop_more": 0}
    assert fits(status, STATUS) and fits(placement, PLACEMENT)
    return status, placement


class MadeUp:
    """The real page, with its policy, over made-up documents."""

    def __init__(self, page, policy):
        status, placement = (json.dumps(part) for part in made_up())
        files = {"/status": ("text/html; charset=utf-8", page), "/status.json": ("application/json", status), "/placement.json": ("application/json", placement)}
        self.asked = asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                kind, text = files.get(self.path.split("?")[0], ("text/plain", ""))
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Security-Policy", policy)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def watch_many(browser, there):
    """In a tab of its own."""
    first = browser.tab()
    start = time.monotonic()
    browser.open(there.url + "/status")
    elements = browser.run("document.querySelectorAll('*').length")
    canvas = browser.run("({...document.querySelector('#heat canvas').dataset})")
    pixels = browser.run("(() => { const c = document.querySelector('#heat canvas'); return c.width * c.height; })()")
    print(f"{NODES} nodes, {MANY_EXPERTS} experts: {elements} elements, {canvas['drawn']} cells drawn, {pixels} pixels, {1000 * (time.monotonic() - start):.0f} ms")
    assert elements <= ELEMENTS_MAX and int(canvas["nodes"]) == NODES + 1 and int(canvas["experts"]) == MANY_EXPERTS, (elements, canvas)
    assert 0 < int(canvas["drawn"]) <= 2 * MANY_EXPERTS + 3 and pixels <= 1280 * 800, (canvas, pixels)
    assert {path.split("&layer=")[-1] for path in there.asked if path.startswith("/placement")} == {"3"}, "one layer at a time"
    check_sizes(browser)
    assert text_of(browser, "#nodes-pages span") == "1 to 50 of 1,024" and rows(browser, "nodes")[0]["node"] == "node-500", "trouble first"
    for _ in range(2):
        browser.click("#nodes-pages button:last-child")
    assert text_of(browser, "#nodes-pages span") == "101 to 150 of 1,024" and row(browser, "node-101")["devices lost"] == "1 of 8"
    assert row(browser, EVIL) is None
    browser.run("(() => { const f = document.getElementById('find'); f.value = '<IMG'; f.dispatchEvent(new Event('input')); })()")
    assert [r["node"] for r in rows(browser, "nodes")] == [EVIL]
    browser.run("document.getElementById('heat').focus()")
    for key in "End", "PageDown", "PageDown":
        browser.press(key)
    assert ", expert 511: holds " in text_of(browser, "#cell"), text_of(browser, "#cell")
    assert browser.run("document.getElementById('heat').scrollLeft") >= 0 and rows(browser, "experts")[0]["expert"] == "0"
    check_harmless(browser)
    browser.show(first)
    there.server.shutdown()


def main():
    with Cluster() as c:
        token = "--token-file=" + c.write("token", TOKEN.encode())
        ports = c.coordinator(token, "--heartbeat-ms=100", "--heartbeat-dead-count=20", "--restore-ms=300", "--copies=2", "--min-nodes=3",
                              "--admin-listen=tcp://127.0.0.1:0", "--admin-token-file=" + c.write("admin-token", b"admin-" + TOKEN.encode()))
        nodes = {name: c.node(name, token, f"--node-name={called}", "--coordinator-url=" + ports["rpc_url"], "--drop-grace-ms=600000")
                 for name, called in (("alpha", "alpha"), ("beta", "beta"), ("evil", EVIL))}
        where = ("--coordinator", ports["rpc_url"], "--token-file", c.path("token"))
        c.wait_serving(*where)
        c.run(EXPERTCTL, "forward", *where, "--model", "demo", "--layer", str(LAYER), "--in", c.batch("batch", 64, 1), "--out", c.path("y"))
        wait_for("the load to be told", lambda: json.loads(ask(ports, f"/placement.json?model=demo&layer={LAYER}")[1])["slots"])
        page, policy = check_documents(ports)
        check_refusals(ports)
        if CHROMIUM is None:
            print("skipped: chromium is not installed")
            return
        many = MadeUp(page, policy)
        browser = Browser(CHROMIUM, c.folder, origins=(ports["probe_url"], many.url))
        try:
            watch_service(c, ports, browser)
            watch_move(c, ports, browser)
            watch_calls(nodes, browser)
            watch_liar(ports, browser)
            watch_silence(c, browser, lambda: watch_many(browser, many))
            assert not browser.errors, browser.errors
        finally:
            browser.close()
        c.stop()


main()
