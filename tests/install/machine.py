"""A made-up machine for install.sh: a PATH that holds only given commands, so nothing of the real one shows through."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_TOOLS = (
    *("awk", "basename", "bash", "cat", "cut", "df", "dirname", "env", "find", "head", "mkdir", "mktemp", "rm"),
    *("sed", "sha256sum", "sort", "tail", "touch", "tr", "xargs"),
)

X86_FLAGS = {
    "amx": "avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16",
    "zen4": "avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16",
    "avx2": "avx avx2 fma f16c bmi2",
    "avx": "sse4_2 avx f16c",
}


@dataclass
class Outcome:
    """What one run of install.sh answered."""

    code: int
    out: str
    err: str

    def row(self, tier: str) -> str:
        """The line of the tier table that begins with `tier`."""
        return next(line for line in self.out.splitlines() if line.split()[:1] == [tier])

    def line(self, title: str) -> str:
        """The line of the plan that begins with `title`, without the title."""
        return next(line for line in self.out.splitlines() if line.startswith(f"{title} ")).removeprefix(title).strip()


@dataclass
class Machine:
    """Commands are shell scripts in one folder; `environ` is the whole environment of a run."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    other_sources: Path | None = None

    @property
    def commands(self) -> Path:
        return self.folder / "bin"

    @property
    def sources(self) -> Path:
        """Where install.sh is started from: not this checkout itself, which may have a .venv of its own."""
        return self.other_sources or self.folder / "sources"

    def command(self, name: str, script: str) -> Path:
        path = self.commands / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        return path

    def compiler(self, name: str, version: str, *, family: str = "gcc", refuses: str = "") -> Path:
        """A compiler that takes every program, except with an option that contains `refuses`."""
        refusal = f"*{refuses}*) exit 1 ;;" if refuses else ""
        return self.command(
            name,
            f"""case "$*" in
              -dumpfullversion) [[ {family} == gcc ]] && echo {version} ;;
              -dumpversion) echo {version} ;;
              --version) echo "{family} version {version}" ;;
              {refusal}
            esac""",
        )

    def python(self, name: str, version: str, *, venv: bool = True, headers: bool = True, prefix: str = "") -> Path:
        """A Python that answers install.sh's questions; with `prefix` it belongs to a virtual environment there."""
        path = self.commands / name if not prefix else Path(prefix) / "bin" / name
        yes = {True: "yes", False: "no"}
        facts = [version, str(path), yes[bool(prefix)], yes[venv], "yes", yes[headers], f"/usr/include/python{version}"]
        answer = "|".join([*facts, prefix or "/usr"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\n[[ "$*" == "-I -" ]] && echo "{answer}"\n')
        path.chmod(0o755)
        return path

    def distribution(self, text: str) -> None:
        path = self.folder / "os-release"
        path.write_text(text)
        self.environ["KT_OS_RELEASE"] = str(path)

    def cpu(self, text: str, *, machine: str = "x86_64") -> None:
        """What `lscpu` prints, and what `uname` says."""
        listing = self.folder / "lscpu.txt"
        listing.write_text(text)
        self.command("lscpu", f'cat "{listing}"')
        self.command("uname", f'[[ "$1" == -s ]] && echo Linux || echo {machine}')

    def install(self, *arguments: str, **environ: str) -> Outcome:
        """One dry run of install.sh."""
        run = subprocess.run(
            [str(self.commands / "bash"), str(self.sources / "install.sh"), "--dry-run", *arguments],
            env={"PATH": str(self.commands), "HOME": str(self.folder), **self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Outcome(run.returncode, run.stdout, run.stderr)


def make_machine(folder: Path, *, flags: str = X86_FLAGS["avx2"], bare: bool = False) -> Machine:
    """A Debian with g++ 12 and Python 3.11 on an x86 CPU with `flags`; `bare` leaves compiler and Python out."""
    machine = Machine(folder)
    machine.commands.mkdir(parents=True)
    for tool in _TOOLS:
        found = shutil.which(tool)
        assert found is not None, f"this machine has no {tool}"
        (machine.commands / tool).symlink_to(found)
    machine.sources.mkdir()
    for part in ("install.sh", "tools"):
        (machine.sources / part).symlink_to(ROOT / part)
    machine.distribution("ID=debian\n")
    machine.cpu(f"Architecture:  x86_64\nFlags:         fpu sse2 {flags}\n")
    if not bare:
        machine.compiler("g++", "12.2.0")
        machine.python("python3", "3.11")
    return machine
