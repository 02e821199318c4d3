"""The pages in a real browser: no console errors, nothing beyond the edge, sorting, tooltips, the chooser.

Needs Chromium on the PATH (Debian: `apt-get install chromium`), and fails without it: `make test-browser`.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pdconvert.cli import main
from pdconvert.report.page import PAGE

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHECKS = Path(__file__).parent / "browser_checks.html"
SCHEMES = {"dark": 0, "light": 1}
PHONE_SCREEN = 860


def browse(page: Path, folder: Path, width: int, scheme: str) -> tuple[dict[str, Any], list[str]]:
    """Open a page in a frame, look at it, and return what was found and the console's lines."""
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert browser, f"no browser found: install one of {', '.join(NAMES)}"
    checks = folder / "checks.html"
    content = CHECKS.read_text(encoding="utf-8").replace("WIDTH", str(width)).replace("PAGE", page.as_uri())
    checks.write_text(content, encoding="utf-8")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--window-size=1500,1300",
        "--dump-dom",
        checks.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the page was not looked at: {done.stderr[-2000:]}"
    return json.loads(unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="session")
def compared(passing: Path, failing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "compare.html"
    assert CliRunner().invoke(main, ["compare", str(passing), str(failing), "--out", str(out)]).exit_code == 0
    return out


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("which", ["passing", "failing", "compared"])
def test_a_page_in_a_browser(
    which: str, width: int, scheme: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page = request.getfixturevalue(which)
    found, console = browse(page / PAGE if page.is_dir() else page, tmp_path, width, scheme)
    assert console == []
    assert found["overflow"] == 0 and found["outside"] == []
    assert found["plots"] == (4 if which == "compared" else 9) and found["empty_plots"] == []
    assert found["small_text"] == 0
    assert found["pale"] == []
    assert found["kept"]
    if which != "compared":
        numbers = [float(value.replace("inf", "1e999")) for value in found["ascending"]]
        assert numbers == sorted(numbers) and found["descending"] == found["ascending"][::-1]
        assert found["chooser"] == {"bars": True, "facts": True}
    assert found["tip"] == {"shown": True, "same": True, "inside": True, "gone": True}
    assert found["first_screen"] < PHONE_SCREEN
