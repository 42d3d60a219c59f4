"""Report of the study of fleets (benchmarks/fleet.py): how much faster a session gets with more workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown

Study = Mapping[str, Any]


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each number of workers, then the facts of the run."""
    return "\n\n".join(f"{_sessions(study)}\n\n{_caption(study)}" for study in studies)


def gain(session: Mapping[str, Any], alone: Mapping[str, Any]) -> float:
    """Trials a second of a session over those of the session with one worker."""
    return float(session["trials"] / session["seconds"] * alone["seconds"] / alone["trials"])


def _sessions(study: Study) -> str:
    alone = next(one for one in study["sessions"] if one["workers"] == 1)
    rows = [
        [str(one["workers"]), str(one["trials"]), f"{one['seconds']:.1f}", f"{100 * one['busy']:.0f} %", f"{gain(one, alone):.2f}"]
        for one in study["sessions"]
    ]
    return markdown.table(["workers", "trials", "seconds", "busy", "times as fast as one"], rows)


def _caption(study: Study) -> str:
    wait = study["wait_s"]
    how = "candidates are measured" if wait is None else f"each candidate takes its worker {wait:g} s, in which nothing is measured"
    commit = f"commit {study['commit']}; " if study["commit"] else ""
    machine = f"{study['brand']} (`{study['device']}`), {study['cpus']} CPUs that build"
    return (
        f"{study['conv']} on workers of {study['workers_on']}: {how}. {machine}; "
        f"apache-tvm {study['versions']['apache-tvm']}; {commit}{study['date'][:10]}. Seconds: from the first build to the last trial. "
        "Busy: the share of them in which a worker had a job."
    )
