# The documentation site: it builds, a fault in it fails the build, and Chromium shows every page without an error, on a
# phone's width too. Needs the extra `docs`, Chromium and its driver; .ci/run installs all of them.

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "mkdocs.yml").exists())
PHONE = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="the extra `docs` is not installed: make docs"
    ),
]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("Chromium or its driver is missing: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "disable-gpu",
        "window-size=1280,900",
    ):
        options.add_argument(f"--{flag}")
    # Anything from another machine fails to load, which is an error on the console.
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def wait(browser: Any, condition: Any) -> Any:
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 30, poll_frequency=0.05).until(condition)


def test_every_page_shows_without_an_error_and_does_not_scroll_sideways_on_a_phone(
    site, address, browser
) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))
    faults = {}
    index = site / "search" / "search_index.json"
    found_by_search = index.read_text()
    index.write_text(
        json.dumps(json.loads(found_by_search) | {"docs": []})
    )  # each page would digest all of it
    for page in pages:
        browser.get(f"{address}/{page}")
        found = [entry["message"] for entry in browser.get_log("browser")]
        found += browser.execute_script(
            "return [...document.images].filter(image => image.loading !== 'lazy' && !image.naturalWidth)"
            ".map(image => 'not shown: ' + image.src)"
        )
        width = browser.execute_script("return document.documentElement.scrollWidth")
        if width > PHONE["width"]:
            found.append(f"{width} pixels wide")
        if found:
            faults[page] = found
    index.write_text(found_by_search)
    browser.execute_cdp_cmd("Network.clearBrowserCache", {})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert len(pages) > 50, pages
    assert faults == {}


def test_search_finds_bytegrad(address, browser) -> None:
    from selenium.webdriver.common.by import By

    browser.get(f"{address}/index.html")
    box = wait(browser, lambda _: browser.find_element(By.CSS_SELECTOR, "input.md-search__input"))
    box.click()
    box.send_keys("ByteGrad")
    results = wait(browser, lambda _: browser.find_elements(By.CSS_SELECTOR, "a.md-search-result__link"))
    links = [result.get_attribute("href").partition("?")[0] for result in results]
    assert f"{address}/algorithms.html" in links, links
    assert f"{address}/api/algorithms.html" in links, links


def test_a_code_block_can_be_copied(address, browser) -> None:
    from selenium.webdriver.common.by import By

    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    browser.get(f"{address}/launching.html")
    block = browser.find_element(By.CSS_SELECTOR, "div.highlight")
    button = wait(browser, lambda _: block.find_elements(By.CSS_SELECTOR, "button[data-clipboard-target]"))[0]
    button.click()
    copied = "return navigator.clipboard.readText()"
    code = block.find_element(By.CSS_SELECTOR, "code").text.strip()
    assert code
    assert wait(browser, lambda _: browser.execute_script(copied)).strip() == code


def test_a_broken_link_or_anchor_or_an_undocumented_name_fails_the_build(tmp_path) -> None:
    ignored = shutil.ignore_patterns(".*", "build", "*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, tmp_path, ignore=ignored, dirs_exist_ok=True)
    with (tmp_path / "docs" / "which-one.md").open("a") as page:
        page.write("\n[a](nowhere.md) [b](codecs.md#no-such-heading) [c](../csrc/nowhere.h)\n")
    with (tmp_path / "python" / "gossamer" / "netlab" / "__init__.py").open("a") as module:
        module.write('\n\ndef bare() -> None:\n    pass\n\n\n__all__ += ["bare"]\n')
    hosts = tmp_path / "python" / "gossamer" / "netlab" / "hosts.py"
    method = "    def bare(self) -> None:\n        pass\n\n    def address("
    hosts.write_text(hosts.read_text().replace("    def address(", method))
    (tmp_path / "docs" / "api" / "topology.md").write_text("# Topologies\n")
    built = build(tmp_path, tmp_path / "built")
    assert built.returncode != 0
    for told in (
        "gossamer.netlab.bare: public, and has no docstring",
        "gossamer.netlab.Hosts.bare: public, and has no docstring",
        "gossamer.topology: has an __all__ and is on no page",
        "'nowhere.md'",
        "'codecs.md#no-such-heading'",
        "'../csrc/nowhere.h'",
    ):
        assert told in built.stderr, built.stderr
