"""Process that draws, builds and checks random kernels, one for each job."""

from __future__ import annotations

import resource
import traceback

import fuzz_cases
from fuzz_cases import WrongOutput
from fuzz_jobs import Answer, Job

from im2win.common.worker_pool import serve

_spent = [0.0]  # seconds of processor time until the last answer


def handle(job: Job) -> Answer:
    """Runs a job's case."""
    case = job.case
    try:
        case = case or fuzz_cases.drawn(job.target, job.seed, job.index)
        outcome = fuzz_cases.run(case)
        message = fuzz_cases.refusal(case) if outcome == "refused" else ""
    except WrongOutput as error:
        outcome, message = "wrong", str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome, message = "error", f"{type(error).__name__}: {str(error)[:1500]} ({place.name}, line {place.lineno})"
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    before, _spent[0] = _spent[0], sum(one.ru_utime + one.ru_stime for one in used)
    return Answer(outcome, case, message, max(one.ru_maxrss for one in used) * 1024, _spent[0] - before)


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the process."""
    serve(handle, job_fd, result_fd)
