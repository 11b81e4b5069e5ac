"""The status page in headless Chromium, on a real server."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from aotllm import Executor
from aotllm.manager import ManagerRequest
from aotllm.serving import app_of
from aotllm.serving.server import listen
from tests.aotllm.fake_manager import FakeManager, says

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs the Debian packages chromium and chromium-driver"
)

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1400,1100"
)
EVIL = "<img src=x onerror=\"document.title='owned'\"><b>bold</b> & <script>document.title='owned'</script>"


class Page:
    """The page, and what people do there."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get_log("browser")  # of the page before
        driver.get(url)

    def __getitem__(self, element_id: str) -> Any:
        return self.driver.find_element(By.ID, element_id)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, 30, poll_frequency=0.05).until(lambda _: condition())

    def ask(self, text: str) -> None:
        self["prompt"].send_keys(text + Keys.ENTER)

    @property
    def answers(self) -> list[str]:
        return [found.text.strip() for found in self.all(".message.assistant .text")]

    @property
    def idle(self) -> bool:
        return self["log"].get_attribute("aria-busy") == "false" and not self["stop"].is_enabled()

    @property
    def complaints(self) -> list[str]:
        """Of the console: errors of scripts, breaches of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def visit(start: Callable[..., Executor], driver: Any) -> Iterator[Callable[..., Page]]:
    """Serves models on fake managers and opens the page."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def visit(managers: dict[str, FakeManager], **options: Any) -> Page:
        app = app_of({name: start(manager) for name, manager in managers.items()}, log_requests=False, **options)
        listener = listen("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        servers.append((server, thread))
        return Page(driver, f"http://127.0.0.1:{listener.getsockname()[1]}/")

    yield visit
    driver.get("about:blank")
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def test_a_chat_streams_and_remembers(visit: Callable[..., Page]):
    manager = FakeManager(says("Deep blue."))
    page = visit({"m": manager})
    page.ask("What colour is the sea?")
    page.until(lambda: page.idle and page.answers == ["Deep blue."])
    note = page.all(".message.assistant .note")[0].text
    assert "11 tokens" in note
    page.ask("Really?")
    page.until(lambda: page.idle and page.answers == ["Deep blue.", "Deep blue."])
    prompt = bytes(token for token in manager.submitted[1].prompt_token_ids if token < 256).decode()
    asked = [prompt.index(text) for text in ("What colour is the sea?", "Deep blue.", "Really?")]
    assert asked == sorted(asked), "the second question came with what was said before"
    page["clear"].click()
    assert page.answers == []
    assert page.complaints == []


def test_what_a_model_writes_is_text(visit: Callable[..., Page]):
    page = visit({"<b>m</b>": FakeManager(says(EVIL))})
    page.ask(EVIL)
    page.until(lambda: page.idle and page.answers == [EVIL])
    assert page.driver.title == "aotllm"
    assert page.all(".log img, .log b, .log script, #models b, #model b") == []
    assert page.complaints == []


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_request_and_keeps_the_text(visit: Callable[..., Page], how: str):
    def endless(_: ManagerRequest) -> Iterator[int]:
        return itertools.cycle(b"on and ")

    manager = FakeManager(endless, stepping="by hand")
    page = visit({"m": manager})
    page.ask("go")
    manager.wait_until(lambda m: bool(m.running))
    manager.step(7)
    page.until(lambda: page.answers == ["on and"])
    page["stop"].click() if how == "button" else page["prompt"].send_keys(Keys.ESCAPE)
    manager.wait_until(lambda m: not m.running)
    page.until(lambda: page.idle)
    assert page.answers == ["on and"]
    assert "stopped" in page.all(".message.assistant .note")[0].text


def test_the_chat_is_used_with_the_keyboard_alone(visit: Callable[..., Page]):
    page = visit({"one": FakeManager(says("1")), "two": FakeManager(says("2"))})
    page.until(lambda: len(page.all("#model option")) == 2)
    page["model"].send_keys("two")
    page["prompt"].send_keys("a" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "b")
    assert page["prompt"].get_attribute("value") == "a\nb"
    page["prompt"].send_keys(Keys.TAB + Keys.NULL)
    order = []
    for _ in range(3):
        focused = page.driver.switch_to.active_element
        order.append(focused.get_attribute("id"))
        focused.send_keys(Keys.TAB)
    assert order == ["max-tokens", "temperature", "send"]
    page["send"].send_keys(Keys.ENTER)
    page.until(lambda: page.idle and page.answers == ["2"])


def test_a_key_is_asked_for_where_one_is_needed(visit: Callable[..., Page]):
    page = visit({"m": FakeManager(says("yes"))}, api_key=["secret-key"])
    page.until(lambda: page["key-row"].is_displayed())
    page.ask("may I?")
    page.until(lambda: page.idle)
    assert page.answers == ["Unauthorized"]
    page["key"].send_keys("secret-key" + Keys.ENTER)
    page.until(lambda: page.all("#model option"))
    page.ask("may I?")
    page.until(lambda: page.idle and page.answers == ["Unauthorized", "yes"])
    page.driver.execute_script("sessionStorage.clear()")


def test_refusals_are_shown(visit: Callable[..., Page]):
    page = visit({"m": FakeManager(max_seq_len=10)})
    page.ask("far too long a question for so small a context")
    page.until(lambda: page.idle and page.answers)
    assert "maximum context length is 10 tokens" in page.answers[0]


def test_figures_come_alive(visit: Callable[..., Page]):
    page = visit({"m": FakeManager(says("some words"))})
    page.until(lambda: page["state"].text == "ready")
    page.ask("go")
    tiles = lambda: {t.text.split("\n")[0]: t.text.split("\n")[1] for t in page.all(".tile")}  # noqa: E731
    page.until(lambda: tiles()["Next tokens"] not in ("–", ""))
    assert tiles()["KV cache"] == "25%"
    (row,) = page.all("#models tr")
    assert row.text.split() == ["m", "ready", "0", "0", "25%", "4,096"]
    charts = page.all(".chart svg")
    assert len(charts) == 6
    assert "p50" in (charts[2].get_attribute("aria-label") or "")
    page.until(lambda: "L" in (page.all(".chart path.series-1")[1].get_attribute("d") or ""))
    assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_text_is_legible_and_fits(visit: Callable[..., Page], scheme: str, width: int):
    page = visit({"m": FakeManager(says("words " * 40))})
    driver = page.driver
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.ask("go")
        page.until(lambda: page.idle and page.answers)
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        contrasts = driver.execute_script(CONTRASTS)
        assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}
        assert len(contrasts) > 8
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


# WCAG's contrast ratio of texts and the nearest background behind them.
CONTRASTS = """
const light = (colour) => {
  const [r, g, b] = colour.match(/[0-9.]+/g).map((c) => c / 255).map(
    (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
const ratios = {};
for (const selector of ["h1", ".state", "nav a", "#version", ".tile dt", ".tile dd", ".tile small", ".unit", "th", "td",
    ".good", ".who", ".user .text", ".assistant .text", ".note", ".hint", "#send", "#clear"]) {
  const node = document.querySelector(selector);
  const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
  ratios[selector] = (a + 0.05) / (b + 0.05);
}
return ratios;
"""
