"""`kt doctor`: what runs on this machine, and why."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ktransformers.cli.console import errors, hushed, plain_table, results
from ktransformers.cli.diagnosis import Diagnosis, diagnose
from ktransformers.cli.failures import FAILED

__all__ = ["doctor"]

_GIB = 1 << 30


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, for scripts and bug reports.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="BACKEND", help="Say how a backend, such as AMXINT8, runs on this machine.")
    ] = None,
) -> None:
    """Tiers, threads, memory, versions. Exit code 1 when something about the installation is wrong."""
    if explain is not None:
        from ktransformers.cli.explain import explain_backend

        with hushed():
            answer = explain_backend(explain)
        results().print(json.dumps(answer.as_dict(), indent=2) if as_json else str(answer), markup=False)
        return
    with hushed():
        found = diagnose()
    if as_json:
        results().print(json.dumps(found.as_dict(), indent=2), markup=False)
    else:
        _print(found)
    if found.problems:
        raise typer.Exit(FAILED)


def _print(found: Diagnosis) -> None:
    console = results()
    if found.cpu is not None:
        console.print(found.cpu["name"], style="bold", markup=False)
        console.print(_tiers(found.cpu["tiers"]))
        console.print(_threads(found.cpu["threads"]), markup=False)
    memory = found.memory
    limit = "" if memory.limit is None else f", this process may have {memory.limit / _GIB:.1f} GiB"
    console.print(f"memory: {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free{limit}")
    console.print(f"system: {found.system}, Python {found.python}", markup=False)
    console.print(_versions(found))
    console.print(_variables(found.environment), markup=False)
    for problem in found.problems:
        errors().print("problem: ", style="bold red", end="")
        errors().print(problem, markup=False)
    if not found.problems:
        console.print("The installation is in order.")


def _tiers(rows: list[dict[str, Any]]) -> object:
    table = plain_table("tier", "compiled", "CPU", "OS", "runs", "why not")
    for row in rows:
        marks = ["yes" if row[key] else "no" for key in ("compiled", "cpu", "os")]
        runs = " ".join(row["chosen_for"]) or ("on request" if row["usable"] else "no")
        table.add_row(row["name"], *marks, runs, row["why_not"])
    return table


def _threads(threads: dict[str, Any]) -> str:
    quota = threads["cgroup_quota"]
    return (
        f"threads: {threads['default']}, from the {threads['limited_by']} ({threads['physical_cores']} physical cores, "
        f"{threads['logical_cpus']} logical CPUs, {len(threads['affinity'])} allowed by affinity, "
        f"cgroup quota {'none' if quota is None else f'{quota:g}'}, {threads['numa_nodes']} NUMA node visible)"
    )


def _versions(found: Diagnosis) -> object:
    table = plain_table("package", "version", "imported from")
    for component in found.components:
        table.add_row(component.name, component.version or "not installed", component.path)
    return table


def _variables(rows: list[dict[str, str]]) -> str:
    lines = [f"{row['name']}={row['current']}: {row['meaning']}" for row in rows if row["current"]]
    if unset := [row["name"] for row in rows if not row["current"]]:
        lines.append(f"not set: {', '.join(unset)}")
    return "\n".join(lines)
