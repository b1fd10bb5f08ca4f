"""Starts and ends real vLLM servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

CONNECTOR = {"kv_connector": "KvxConnector", "kv_connector_module_path": "kvx.vllm"}


@dataclass
class Setting:
    """What is the same for all servers of a run."""

    #: The virtual environment in which vLLM and kvx are installed.
    venv: Path
    model: Path
    key: Path
    #: Where logs go.
    logs: Path
    environment: dict[str, str] = field(default_factory=dict)
    #: Arguments of `vllm serve`, for all.
    arguments: tuple[str, ...] = ()
    #: How long a server may take to start, in seconds.
    patience: float = 600.0


@dataclass
class Kind:
    """What one server is like."""

    name: str
    role: str
    port: int
    side_port: int
    #: Processors, as vLLM's CPU backend wants them.
    cores: str = "0"
    arguments: tuple[str, ...] = ()
    extra: dict[str, object] = field(default_factory=dict)
    connector: dict[str, object] = field(default_factory=lambda: dict(CONNECTOR))
    environment: dict[str, str] = field(default_factory=dict)
    model: Path | None = None


class Server:
    """A server, from its start to its end."""

    def __init__(self, setting: Setting, kind: Kind) -> None:
        self.setting, self.kind = setting, kind
        self.url = f"http://127.0.0.1:{kind.port}"
        self.log = setting.logs / f"{kind.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it; does not wait."""
        kind, setting = self.kind, self.setting
        transfer = {**kind.connector, "kv_role": kind.role, **kind.extra}
        command = [
            str(setting.venv / "bin" / "vllm"), "serve", str(kind.model or setting.model),
            "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(kind.port),
            "--kv-transfer-config", json.dumps(transfer), *setting.arguments, *kind.arguments,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": kind.cores,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kind.side_port),
            "KVX_KEY_FILE": str(setting.key),
            **setting.environment,
            **kind.environment,
        }
        # A group of its own: killed as one, as a host that fails takes all of a server's processes.
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, patience: float | None = None) -> None:
        """Waits until it serves.

        Raises:
            RuntimeError: it ended, or did not serve in time; with the end of its log.
        """
        until = time.monotonic() + (self.setting.patience if patience is None else patience)
        while time.monotonic() < until:
            if self.ended():
                raise RuntimeError(f"{self.kind.name} ended:\n{self.tail()}")
            if self.serves():
                return
            time.sleep(0.5)
        raise RuntimeError(f"{self.kind.name} does not serve after {self.setting.patience} s:\n{self.tail()}")

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process is None or self._process.poll() is not None

    def serves(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def says(self, text: str) -> bool:
        """Whether its log has a text."""
        return text in self.log.read_text(errors="replace")

    def holdings(self) -> dict[str, int]:
        """What its processes hold of the system."""
        found = dict.fromkeys(("processes", "threads", "descriptors", "shared mappings"), 0)
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self._process is None or os.getpgid(int(path.name)) != self._process.pid:
                    continue
                maps = (path / "maps").read_text().splitlines()
                found["processes"] += 1
                found["threads"] += len(os.listdir(path / "task"))
                found["descriptors"] += len(os.listdir(path / "fd"))
                found["shared mappings"] += sum(line.split(maxsplit=2)[1].endswith("s") for line in maps)
            except OSError:
                # It has ended meanwhile.
                continue
        return found

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all of its processes."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """Ends it at once, without a word."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ends it as an operator would; at once, if it does not end in time."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            pass
        self.kill()


def wait_for(servers: list[Server]) -> None:
    """Waits until all serve; for none if one has ended.

    Raises:
        RuntimeError: one ended, or does not serve in time; with the end of its log.
    """
    until = time.monotonic() + max(server.setting.patience for server in servers)
    while time.monotonic() < until and not all(server.serves() for server in servers):
        for server in servers:
            if server.ended():
                server.wait()
        time.sleep(0.5)
    for server in servers:
        server.wait(5.0)
