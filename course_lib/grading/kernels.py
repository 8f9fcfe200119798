"""Kernels that talk over sockets of the file system, where the system has them.

jupyter_client chooses five free TCP ports and releases them before the kernel binds them. On a
machine that opens many sockets, as every launch of ranks does, another process may take one
meanwhile; the kernel then ends with "Address already in use".
"""

import secrets
import sys
import tempfile
from pathlib import Path

from jupyter_client.manager import AsyncKernelManager, KernelManager
from traitlets import default


class LocalKernelManager(KernelManager):
    """A kernel on this machine, for callers without an event loop (nbval)."""

    @default("transport")
    def _transport(self) -> str:
        return "ipc" if sys.platform == "linux" else "tcp"

    @default("ip")
    def _ip(self) -> str:
        if self.transport == "tcp":
            return "127.0.0.1"
        return str(Path(tempfile.gettempdir(), f"kernel-{secrets.token_hex(8)}"))


class AsyncLocalKernelManager(AsyncKernelManager, LocalKernelManager):
    """A kernel on this machine, for nbclient."""
