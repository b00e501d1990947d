"""The chat page in a headless Chromium: what a person does there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import pytest
from serving import FakeEngine, Running, fake_llm, running, until

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>&amp;'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    folder = tmp_path_factory.mktemp("chromium")
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium has none for root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    def __init__(self, browser, server: Running) -> None:
        self.browser = browser
        browser.get(server.url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get(server.url)

    def find(self, selector: str):
        return self.browser.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        found = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        return self.browser.execute_script(found, selector)

    def send(self, text: str, key: str = "\ue007") -> None:  # Enter
        self.find("#input").send_keys(text + key)

    @property
    def is_idle(self) -> bool:
        return self.find("#send").is_enabled() and not self.find("#stop").is_enabled()

    def ask(self, text: str) -> str:
        """The answer, once it is whole."""
        before = len(self.texts("article.assistant"))
        self.send(text)
        until(lambda: len(self.texts("article.assistant")) == before + 1 and self.is_idle)
        return self.texts("article.assistant .text")[-1]

    def set(self, name: str, value: str) -> None:
        if self.find("#settings").get_attribute("hidden"):
            self.find("#toggle").click()
        field = self.find(f"#{name}")
        field.clear()
        field.send_keys(value + "\t")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(b"Hello there")


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with running(fake_llm(engine), keep_alive=0.05) as server:
        yield server


def messages_of(engine: FakeEngine, server: Running) -> str:
    """What the model read last."""
    return server.post("/detokenize", {"tokens": engine.submitted[-1].prompt}).json()["content"]


def test_a_conversation(browser, server: Running, engine: FakeEngine) -> None:
    page = Page(browser, server)
    until(lambda: page.texts("#model") == ["test, context 4096"])
    assert page.ask("One") == "Hello there"
    assert re.fullmatch(r"12 tokens, first after \d+\.\d\d s(, \d+\.\d tok/s)? \[stop\]", page.texts("footer")[-1])
    page.send("first line", "\ue008\ue007\ue000")  # Shift-Enter
    assert page.find("#input").get_property("value") == "first line\n"
    assert page.ask("second") == "Hello there"
    assert page.texts("article.user .text") == ["One", "first line\nsecond"]
    assert messages_of(engine, server) == (
        "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"
        "<|im_start|>user\nfirst line\nsecond<|im_end|>\n<|im_start|>assistant\n"
    )
    page.find("#clear").click()
    assert page.texts("article") == [] and page.ask("anew") == "Hello there"
    assert "One" not in messages_of(engine, server)
    told = [entry for entry in page.browser.get_log("browser") if entry["level"] != "DEBUG"]
    assert told == []  # no script failed, nothing was asked for that is not there


def test_streaming_and_stopping(browser, server: Running, engine: FakeEngine) -> None:
    page = Page(browser, server)
    engine.held = True
    page.send("x")
    until(lambda: page.texts("footer")[-1] == "waiting")
    assert not page.find("#send").is_enabled() and page.find("#stop").is_enabled()
    engine.answer = b"y" * 4000
    engine.live[1].left = [*engine.answer, 260]
    engine.slow = 0.02
    engine.held = False
    until(lambda: len(page.texts("article.assistant .text")[-1]) > 5)  # while it comes
    until(lambda: re.search(r"^\d+ tokens, first after .* tok/s$", page.texts("footer")[-1]) is not None)
    page.find("#stop").click()
    until(lambda: page.is_idle and engine.live == {})
    assert engine.cancelled == [1] and page.texts("footer")[-1].endswith(" [stopped]")
    told = page.texts("article.assistant .text")[-1]
    assert 5 < len(told) < 4000
    engine.slow, engine.answer = 0, b"z"
    assert page.ask("go on") == "z"
    assert f"assistant\n{told}<|im_end|>" in messages_of(engine, server)  # what was read stays in the conversation


def test_settings_reach_the_engine_and_stay(browser, server: Running, engine: FakeEngine) -> None:
    page = Page(browser, server)
    for name, value in (("temperature", "0.5"), ("top_p", "0.25"), ("top_k", "7"), ("max_tokens", "3"), ("seed", "9")):
        page.set(name, value)
    page.set("system", "be brief")
    for _ in range(2):
        assert page.ask("x") == "Hel" and page.texts("footer")[-1].endswith("[length]")
        sampling = engine.submitted[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 9)
        assert messages_of(engine, server).startswith("<|im_start|>system\nbe brief<|im_end|>\n")
        page.browser.refresh()  # kept


def test_hostile_text_is_text(browser, server: Running, engine: FakeEngine) -> None:
    engine.answer = HOSTILE.encode()
    page = Page(browser, server)
    assert page.ask(HOSTILE) == HOSTILE
    assert page.texts("article.user .text") == [HOSTILE]
    assert page.browser.execute_script("return window.broken ?? null") is None
    assert page.browser.find_elements("css selector", "#chat img, #chat script") == []


def test_reasoning_is_folded_away(browser, server: Running, engine: FakeEngine) -> None:
    engine.answer = f"<think>{HOSTILE}</think>Yes".encode()
    with running(fake_llm(engine), reasoning="think") as thinking:
        page = Page(browser, thinking)
        assert page.ask("x") == "Yes" and page.texts(".assistant .thought") == [HOSTILE]
        details = page.find("article.assistant details")
        assert details.is_displayed() and details.get_attribute("open") is None


def test_failures_and_keys(browser, engine: FakeEngine) -> None:
    with running(fake_llm(engine), keys=("geheim",)) as server:
        page = Page(browser, server)
        until(lambda: page.texts("#model") == ["needs an API key (Settings)"])
        page.send("x")
        until(lambda: any("API key" in text for text in page.texts("article.error .text")))
        page.set("key", "geheim")
        until(lambda: page.texts("#model") == ["test, context 4096"])
        assert page.ask("y") == "Hello there"
        assert page.browser.execute_script("return Object.values(localStorage).join()").find("geheim") == -1
        engine.broken = True
        page.send("z")
        until(lambda: page.texts("article.error .text")[-1] == "it broke" and page.is_idle)
        engine.broken = False
        assert page.ask("again") == "Hello there"  # without the question that failed
        assert (
            "z"
            not in server.client.post(
                "/detokenize", json={"tokens": engine.submitted[-1].prompt}, headers={"x-api-key": "geheim"}
            ).json()["content"]
        )


def test_nothing_comes_from_elsewhere(browser, server: Running) -> None:
    page = Page(browser, server)
    page.ask("x")
    names = page.browser.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert names and all(name.startswith(server.url + "/v1/") for name in names), names
