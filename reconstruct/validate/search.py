"""Search over the barriers of a unit: a barrier is deleted if the index analysis allows it and no validator objects.

The PKF-Reconstructor (see `im2win.reconstruct`) deletes every barrier whose absence no test notices. A race can pass a test, so a pass
proves nothing. `trial` reports what that search would delete, for comparison, and never returns the resulting source.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from im2win.reconstruct.parse.unit import Edit, Unit
from im2win.reconstruct.rules.barriers import RULE, Verdict, barrier_verdicts, changed
from im2win.reconstruct.text_rules import Match
from im2win.reconstruct.validate.validators import Validator

log = logging.getLogger("im2win.reconstruct")


@dataclass(frozen=True)
class Tried:
    """The decision on one barrier: the verdict of the index analysis, the validators' answer, and whether the source was changed.

    objection: the first objection, after its validator's name; None if no validator objected or none was asked.
    """

    verdict: Verdict
    objection: str | None
    changed: bool

    def __str__(self) -> str:
        verdict = self.verdict
        done = {True: "deleted" if verdict.replacement == "" else "weakened to __syncwarp", False: "stays"}[self.changed]
        text = f"kernel {verdict.kernel}, barrier {verdict.number} in line {verdict.line}: {verdict.outcome}, {verdict.why}; {done}"
        return text + (f", although: {self.objection}" if self.objection else "")


def _objection(validators: Sequence[Validator], unit: Unit) -> str | None:
    for validator in validators:
        said = validator.objection(unit)
        if said is not None:
            return f"{validator.name}: {said}"
    return None


def search(unit: Unit, validators: Sequence[Validator]) -> tuple[Unit, list[Match], list[Tried]]:
    """Deletes or weakens the barriers that the index analysis shows to be needless, unless a validator objects.

    The validators first see all changes at once. If one objects, they see the changes one by one. An objection contradicts the analysis, so
    one of the two has a bug: the barrier stays, and the log reports an error.

    Returns:
        The new unit, its changes, and the decision on every barrier.

    Raises:
        ReconstructError: the launch of a kernel with barriers is not known.
    """
    verdicts = [verdict for kernel in unit.kernels.values() for verdict in barrier_verdicts(kernel)]
    shown = [verdict for verdict in verdicts if verdict.replacement is not None]
    allowed, story = list[Verdict](), list[Tried]()
    whole = not shown or _objection(validators, changed(unit, shown)[0]) is None
    for verdict in verdicts:
        if verdict.replacement is None:
            story.append(Tried(verdict, None, False))
            continue
        objection = None if whole else _objection(validators, changed(unit, [*allowed, verdict])[0])
        story.append(Tried(verdict, objection, objection is None))
        if objection is None:
            allowed.append(verdict)
    for tried in story:
        log.log(logging.ERROR if tried.objection else logging.INFO, "%s: %s", RULE, tried)
    result, matches = changed(unit, allowed)
    return result, matches, story


@dataclass(frozen=True)
class Trial:
    """What trial and error alone decides about one barrier."""

    verdict: Verdict
    deleted: bool

    @property
    def unsound(self) -> bool:
        """Whether trial and error deletes a barrier that the index analysis shows to be needed."""
        return self.deleted and self.verdict.outcome == "needed"

    def __str__(self) -> str:
        verdict = self.verdict
        what = "would be deleted" if self.deleted else "is missed"
        text = f"kernel {verdict.kernel}, barrier {verdict.number} in line {verdict.line} {what} by trial and error"
        return text + (f", although {verdict.why}" if self.unsound else "")


def trial(unit: Unit, validators: Sequence[Validator]) -> list[Trial]:
    """Deletes barrier after barrier and keeps each deletion that no validator notices, as the PKF-Reconstructor does.

    Only the decisions are returned, never the source.
    """
    verdicts = [verdict for kernel in unit.kernels.values() for verdict in barrier_verdicts(kernel)]
    gone, story = list[Edit](), list[Trial]()
    for verdict in verdicts:
        edit = Edit(verdict.span, ";", "trial", "no validator objected")
        deleted = _objection(validators, unit.edited([*gone, edit])[0]) is None
        story.append(Trial(verdict, deleted))
        if deleted:
            gone.append(edit)
    return story
