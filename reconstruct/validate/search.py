"""The document's search over the barriers that are left, made safe: a barrier goes if indices show that it may, and no judge objects.

The document deletes what a test does not miss. A race can pass a test, so that alone proves nothing; `trial` reports what it would have
deleted, for comparison, and never hands that source out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from im2win.reconstruct.parse.unit import Edit, Unit
from im2win.reconstruct.rules.barriers import RULE, Verdict, changed, judge
from im2win.reconstruct.text_rules import Match
from im2win.reconstruct.validate.validators import Judge

log = logging.getLogger("im2win.reconstruct")


@dataclass(frozen=True)
class Tried:
    """One barrier: what indices show, what the judges say to the change, and whether it was made.

    objection: a judge's, with its name; None if there was none, or nobody was asked.
    """

    verdict: Verdict
    objection: str | None
    changed: bool

    def __str__(self) -> str:
        verdict = self.verdict
        done = {True: "deleted" if verdict.replacement == "" else "weakened to __syncwarp", False: "stays"}[self.changed]
        text = f"kernel {verdict.kernel}, barrier {verdict.number} in line {verdict.line}: {verdict.outcome}, {verdict.why}; {done}"
        return text + (f", although: {self.objection}" if self.objection else "")


def _objection(judges: Sequence[Judge], unit: Unit) -> str | None:
    for one in judges:
        said = one.objection(unit)
        if said is not None:
            return f"{one.name}: {said}"
    return None


def search(unit: Unit, judges: Sequence[Judge]) -> tuple[Unit, list[Match], list[Tried]]:
    """The unit without the barriers that indices show to be needless and that no judge misses, what was changed, and the whole story.

    Judges see all changes at once; if one objects, one after the other. What indices show and a judge objects to is a mistake of one of
    them: the barrier stays, and the log says so loudly.
    """
    verdicts = [verdict for kernel in unit.kernels.values() for verdict in judge(kernel)]
    shown = [verdict for verdict in verdicts if verdict.replacement is not None]
    allowed, story = list[Verdict](), list[Tried]()
    whole = not shown or _objection(judges, changed(unit, shown)[0]) is None
    for verdict in verdicts:
        if verdict.replacement is None:
            story.append(Tried(verdict, None, False))
            continue
        objection = None if whole else _objection(judges, changed(unit, [*allowed, verdict])[0])
        story.append(Tried(verdict, objection, objection is None))
        if objection is None:
            allowed.append(verdict)
    for tried in story:
        log.log(logging.ERROR if tried.objection else logging.INFO, "%s: %s", RULE, tried)
    result, matches = changed(unit, allowed)
    return result, matches, story


@dataclass(frozen=True)
class Trial:
    """What trial and error alone would do with one barrier: delete it, because no judge missed it."""

    verdict: Verdict
    deleted: bool

    @property
    def unsound(self) -> bool:
        """Whether it would delete what indices show to be needed."""
        return self.deleted and self.verdict.outcome == "needed"

    def __str__(self) -> str:
        verdict = self.verdict
        what = "would be deleted" if self.deleted else "is missed"
        text = f"kernel {verdict.kernel}, barrier {verdict.number} in line {verdict.line} {what} by trial and error"
        return text + (f", although {verdict.why}" if self.unsound else "")


def trial(unit: Unit, judges: Sequence[Judge]) -> list[Trial]:
    """Deletes barrier after barrier and keeps what no judge misses, as the document does; only what would happen is returned."""
    verdicts = [verdict for kernel in unit.kernels.values() for verdict in judge(kernel)]
    gone, story = list[Edit](), list[Trial]()
    for verdict in verdicts:
        edit = Edit(verdict.span, ";", "trial", "no judge missed it")
        deleted = _objection(judges, unit.edited([*gone, edit])[0]) is None
        story.append(Trial(verdict, deleted))
        if deleted:
            gone.append(edit)
    return story
