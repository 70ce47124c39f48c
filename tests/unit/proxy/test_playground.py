"""What can be said about the page without a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import dsv4_clients.proxy.playground as playground
import pytest

from tests.unit.proxy.conftest import StartProxy

SCRIPT = Path(playground.__file__).with_name("script.js")


async def test_page_runs_only_its_own_code(start_proxy: StartProxy) -> None:
    client = await start_proxy(api_keys=("k",))
    response = await client.get("/")
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", response.text), "the page names another host"
    assert not re.findall(r"\son\w+=|\sstyle=|innerHTML", response.text), "refused by the policy, or unsafe"


async def test_page_can_be_switched_off(start_proxy: StartProxy) -> None:
    client = await start_proxy(playground=False)
    assert (await client.get("/")).status_code == 404


async def test_every_text_exists_in_both_languages(start_proxy: StartProxy) -> None:
    page = (await (await start_proxy()).get("/")).text
    used = set(re.findall(r'data-(?:text|label|placeholder)="(\w+)"', page)) | set(re.findall(r'text\("(\w+)"\)', page))
    for language in ("en", "zh"):
        (table,) = re.findall(rf"  {language}: {{(.*?)\n  }}", page, re.DOTALL)
        assert used <= set(re.findall(r'(\w+): "', table)), language


async def test_every_control_has_a_label(start_proxy: StartProxy) -> None:
    page = (await (await start_proxy()).get("/")).text
    labels = re.findall(r"<label.*?</label>", page, re.DOTALL)
    for identifier in re.findall(r'<(?:input|textarea|select) id="(\w+)"', page):
        assert any(f'id="{identifier}"' in each or f'for="{identifier}"' in each for each in labels), identifier


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to parse the script")
def test_script_parses() -> None:
    subprocess.run(["node", "--check", str(SCRIPT)], check=True)
