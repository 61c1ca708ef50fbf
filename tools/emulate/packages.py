"""Fetches Debian's emulator and kernel without installing anything: apt-get with lists, cache and status of its own.

Bochs 3.0 comes from trixie with everything below it down to its own libc (Bochs 3.1 divides 64-bit numbers wrongly),
the kernel from bookworm. Signatures are checked with Debian's keyring; the archive's address is the machine's own.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tools.emulate.commands import output_of, require, say
from tools.emulate.errors import NotAvailable

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
LIBRARIES = "usr/lib/x86_64-linux-gnu"
DEBIAN_ARCHIVE = re.compile(r"/debian/?$")
# Dependencies that hold nothing Bochs loads.
UNUSED = re.compile(
    r"(systemd|libpam|openssl|dbus|fonts|adwaita|libgtk-3-common|shared-mime|debconf|mawk|procps|init-system|libdb5|"
    r"libsystemd-shared|base-files|mount|fontconfig=|gtk-update|xkb-data|libx11-data)"
)


class PrivateApt:
    """apt-get and apt-cache over one folder; the system's package state is neither read nor changed."""

    def __init__(self, folder: Path) -> None:
        self._debs = folder / "debs"
        for part in ("lists/partial", "cache/archives/partial", "debs"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        archive = _archive_address()
        sources = [f"deb [arch=amd64 signed-by={KEYRING}] {archive} {suite} main\n" for suite in ("bookworm", "trixie")]
        (folder / "sources.list").write_text("".join(sources))
        settings = {
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "Acquire::Languages": "none",
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "20",
            "APT::Install-Recommends": "false",
            "APT::Default-Release": "trixie",
            "APT::Sandbox::User": "root",  # the unprivileged user of apt-get cannot write here
            "APT::Update::Error-Mode": "any",  # lists that were not fetched are an error, not a warning
        }
        self._options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]

    def __call__(self, tool: str, *words: str) -> str:
        return output_of([tool, *self._options, *words], cwd=self._debs)

    @property
    def archives(self) -> list[Path]:
        return sorted(self._debs.glob("*.deb"))


def _archive_address() -> str:
    targets = output_of(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])
    for address in targets.split():
        if DEBIAN_ARCHIVE.search(address):
            return address
    raise NotAvailable("no Debian archive among this machine's apt sources")


def needed(uris: str) -> list[str]:
    """name=version of the packages in the output of `apt-get --print-uris`, without those that Bochs does not load."""
    files = re.findall(r"^'[^']*' (\S+\.deb) ", uris, re.M)
    names = [file.replace("%3a", ":").rsplit("_", 1)[0].replace("_", "=", 1) for file in files]
    return [name for name in names if not UNUSED.match(name)]


def fetch(work: Path, root: Path) -> list[str]:
    """Downloads into `work`, unpacks what is used into `root`; returns the versions of what matters."""
    require("apt-get", "apt-cache", "dpkg-deb", "tar")
    if not KEYRING.exists():
        raise NotAvailable(f"no {KEYRING} to check signatures with (package debian-archive-keyring)")
    apt = PrivateApt(work)
    say("reading package lists")
    apt("apt-get", "-q", "update")
    packages = needed(apt("apt-get", "--print-uris", "-q", "-y", "install", "bochs", "bochs-term", "lz4"))
    newest = apt("apt-cache", "show", "linux-image-cloud-amd64/bookworm")
    kernel = re.search(r"^Depends: (linux-image-\S+)", newest, re.M)
    if kernel is None:
        raise NotAvailable("bookworm has no linux-image-cloud-amd64")
    say(f"downloading {len(packages)} packages (80 MB) and {kernel[1]}")
    apt("apt-get", "-q", "download", f"{kernel[1]}/bookworm", *packages)
    root.mkdir()
    for archive in apt.archives:
        _unpack(archive, root)
    return [file.stem for file in apt.archives if file.name.startswith(("bochs_", "linux-image", "libc6_"))]


def _unpack(archive: Path, root: Path) -> None:
    used = [f"./{LIBRARIES}", "./lib/x86_64-linux-gnu", "./usr/bin/bochs-bin", "./usr/bin/lz4", "./usr/share/bochs"]
    members = ["./boot"] if archive.name.startswith("linux-image") else used
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as content:
        # tar complains of members a package lacks: its status says nothing, the files are looked for afterwards.
        subprocess.run(
            ["tar", "-x", "-C", str(root), "--keep-directory-symlink", *members],
            stdin=content.stdout,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if content.stdout is not None:
            content.stdout.close()
    if content.returncode not in (0, -13):  # 13: tar stopped reading
        raise NotAvailable(f"dpkg-deb cannot unpack {archive.name}")
