"""Makes what the virtual machine boots of Debian's kernel: `pack.py KERNEL SHELL INIT INTO`.

INTO gets `vmlinux`, unpacked, so that nothing need be unpacked in the machine, and `initramfs`: a shell, `init`, and the modules that
the machine needs, with a list of them in the order in which they are loaded.
"""

import lzma
import os
import re
import sys
import zlib
from pathlib import Path

# Of the machine itself: its disk is a folder of the host, and its output a port.
BOOT = ["virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"]
# The verbs, two kinds of devices in software, and interfaces for them.
VERBS = ["crc32c_generic", "crc32_generic", "crc32_pclmul", "ib_uverbs", "rdma_ucm", "rdma_rxe", "siw", "dummy", "veth", "sch_netem"]
ELF = b"\x7fELF"
SIGNATURE = b"~Module signature appended~\n"


def unpacked_kernel(image: bytes) -> bytes:
    """The kernel inside of the file that a machine would boot."""
    for magic, unpack in [
        (b"\xfd7zXZ\0", lambda data: lzma.LZMADecompressor().decompress(data)),
        (b"\x1f\x8b\x08", lambda data: zlib.decompressobj(31).decompress(data)),
    ]:
        at = image.find(magic)
        while at >= 0:
            try:
                kernel = unpack(image[at:])
            except (lzma.LZMAError, zlib.error):
                kernel = b""
            if kernel.startswith(ELF):
                return kernel
            at = image.find(magic, at + 1)
    raise SystemExit("no kernel is found in the image")


def module(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        data = lzma.decompress(data)
    # Verifying a signature takes an emulated processor a long time.
    if data.endswith(SIGNATURE):
        trailer = len(SIGNATURE) + 12
        signature = int.from_bytes(data[-len(SIGNATURE) - 4 : -len(SIGNATURE)], "big")
        data = data[: -trailer - signature]
    return data


def modules(kernel: Path) -> list[tuple[str, bytes]]:
    """The modules, each after those that it needs."""
    there = {}
    for path in kernel.rglob("*.ko*"):
        there[path.name.split(".")[0].replace("-", "_")] = path
    ordered: dict[str, bytes] = {}

    def add(name: str) -> None:
        # What is not there is part of the kernel.
        if name in ordered or name not in there:
            return
        data = module(there[name])
        needs = re.search(rb"(?:^|\0)depends=([^\0]*)\0", data)
        for other in (needs[1].decode().split(",") if needs else []):
            add(other.replace("-", "_"))
        ordered[name] = data

    for name in BOOT + VERBS:
        add(name)
    return list(ordered.items())


class Archive:
    """A `cpio` archive of the kind that the kernel reads (its Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.count = 0

    def add(self, name: str, mode: int, data: bytes = b"") -> None:
        self.count += 1
        path = name.encode() + b"\0"
        fields = [self.count, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0]
        self.data += b"070701" + b"".join(b"%08x" % field for field in fields) + path
        self._pad()
        self.data += data
        self._pad()

    def _pad(self) -> None:
        self.data += bytes(-len(self.data) % 4)

    def folder(self, name: str) -> None:
        self.add(name, 0o040755)

    def file(self, name: str, data: bytes, executable: bool = False) -> None:
        self.add(name, 0o100755 if executable else 0o100644, data)

    def finished(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return bytes(self.data)


def main() -> None:
    kernel, shell, init, into = map(Path, sys.argv[1:])
    into.mkdir(parents=True)
    image = next(path for path in kernel.rglob("vmlinuz*") if path.is_file())
    (into / "vmlinux").write_bytes(unpacked_kernel(image.read_bytes()))
    archive = Archive()
    for folder in ["bin", "dev", "proc", "sys", "modules", "host", "changes", "whole"]:
        archive.folder(folder)
    busybox = next(path for path in shell.rglob("busybox") if os.access(path, os.X_OK) and path.is_file())
    archive.file("bin/busybox", busybox.read_bytes(), executable=True)
    archive.file("init", init.read_bytes(), executable=True)
    loaded = modules(kernel)
    for name, data in loaded:
        archive.file(f"modules/{name}", data)
    archive.file("modules/order", "".join(f"{name}\n" for name, _ in loaded).encode())
    (into / "initramfs").write_bytes(archive.finished())
    print("modules:", " ".join(name for name, _ in loaded), file=sys.stderr)


main()
