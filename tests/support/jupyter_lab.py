"""A JupyterLab of this Python on a folder, apart from whatever Jupyter the user has."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

READY = 60  # seconds until JupyterLab is up; a loaded machine takes 20
# What is typed must arrive as it was typed, and a cell that is out of sight must exist.
SETTINGS = {
    "notebook-extension/tracker": {
        "codeCellConfig": {"autoClosingBrackets": False},
        "windowingMode": "none",
    },
    "codemirror-extension/plugin": {"defaultConfig": {"autoClosingBrackets": False}},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


@contextlib.contextmanager
def serving(private: Path, shown: Path) -> Iterator[str]:
    """The address, with its token, of a JupyterLab that shows the folder ``shown``.

    All that Jupyter writes of its own goes into ``private``. Raises RuntimeError with the end of
    its log when it does not start.
    """
    for name, settings in SETTINGS.items():
        path = private / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    token = secrets.token_hex(16)
    with (private / "log").open("w") as log:
        server = subprocess.Popen(
            _command(shown, token), stdout=log, stderr=log, env=_environment(private)
        )
        try:
            yield f"{_address(server, private)}?token={token}"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _command(shown: Path, token: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        f"--notebook-dir={shown}",
        f"--IdentityProvider.token={token}",
        "--ServerApp.port=0",
        "--ServerApp.port_retries=0",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=",
    ]


def _environment(private: Path) -> dict[str, str]:
    """Nothing of the user's Jupyter: neither settings nor kernels nor running servers."""
    places = {
        "JUPYTER_CONFIG_DIR": private / "config",
        "JUPYTER_DATA_DIR": private / "data",
        "JUPYTER_RUNTIME_DIR": private / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": private / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": private / "workspaces",
    }
    return {**os.environ, **{name: str(path) for name, path in places.items()}}


def _address(server: subprocess.Popen, private: Path) -> str:
    """Waits for the file in which the server says on which free port it listens."""
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline and server.poll() is None:
        for path in (private / "runtime").glob("jpserver-*.json"):
            try:
                told = json.loads(path.read_text())
                with urllib.request.urlopen(told["url"] + "api", timeout=5):
                    return told["url"] + "lab"
            except (ValueError, URLError, OSError):
                pass  # half written, or not listening yet
        time.sleep(0.2)
    raise RuntimeError("JupyterLab did not start:\n" + (private / "log").read_text()[-2000:])
