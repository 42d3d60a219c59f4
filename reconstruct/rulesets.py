"""The rule sets by name, and the one function that applies them: what tuning, building and the command line ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from im2win.reconstruct.fusion import llc, shmem
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.rules import barriers, hip
from im2win.reconstruct.text_rules import Match, ReconstructError
from im2win.reconstruct.validate.search import search
from im2win.reconstruct.validate.validators import Validator

log = logging.getLogger("im2win.reconstruct")


@dataclass(frozen=True)
class Settings:
    """What rules need to know.

    shared: bytes of shared memory that a block may take. wave: see `llc.fuse`. validators: they must not object to a change.
    """

    shared: int = 49152
    wave: int = 0
    validators: tuple[Validator, ...] = ()


@dataclass(frozen=True)
class Applied:
    """A rewritten unit, every change, and a line for everything that was decided."""

    unit: Unit
    matches: list[Match] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RuleSet:
    """A row of the registry.

    why: what it is for. must: whether a source that it does not fit is an error; otherwise that source stays as it is.
    """

    name: str
    why: str
    apply: Callable[[Unit, Settings], Applied]
    must: bool = False


def _barriers(unit: Unit, settings: Settings) -> Applied:
    result, matches, story = search(unit, settings.validators)
    return Applied(result, matches, [str(tried) for tried in story])


def _validated(fused: tuple[Unit, list[Match]], settings: Settings) -> Applied:
    """A fused unit that no validator objects to.

    Raises:
        ReconstructError: one does.
    """
    result, matches = fused
    for validator in settings.validators:
        objection = validator.objection(result)
        if objection is not None:
            raise ReconstructError(f"{validator.name} objects to the fused kernel: {objection}")
    return Applied(result, matches, [f"{match.rule}: {match.why}" for match in matches])


def _shared(unit: Unit, settings: Settings) -> Applied:
    return _validated(shmem.fuse(unit, settings.shared), settings)


def _cached(unit: Unit, settings: Settings) -> Applied:
    return _validated(llc.fuse(unit, settings.shared, settings.wave), settings)


def _hip(unit: Unit, settings: Settings) -> Applied:
    result, matches = hip.translate(unit)
    return Applied(result, matches, [f"line {match.line}: {match.rule}, {match.why}" for match in matches])


RULE_SETS: dict[str, RuleSet] = {
    row.name: row
    for row in (
        RuleSet(barriers.RULE, "drops or weakens barriers that an argument about indices shows to be needless", _barriers),
        RuleSet(shmem.RULE, "fuses a kernel with the one that reads its result, held in shared memory", _shared),
        RuleSet(llc.RULE, "fuses a kernel with the one that reads its result, through the last-level cache", _cached),
        RuleSet(hip.RULE, "translates to HIP", _hip, must=True),
    )
}


def split(unit: Unit) -> dict[str, Unit]:
    """Every kernel of a unit as a source of its own, by name."""
    found = {}
    for name, kernel in unit.kernels.items():
        launches = tuple(launch for launch in unit.launches if launch.kernel == name)
        used = {tensor for launch in launches for tensor in launch.arguments}
        workspace = {tensor: shape for tensor, shape in unit.workspace.items() if tensor in used}
        found[name] = Unit(f"{unit.head}{kernel.text}\n", launches, workspace)
    return found


def rule_sets(names: Sequence[str]) -> list[RuleSet]:
    """Rule sets by name.

    Raises:
        ReconstructError: an unknown name.
    """
    for name in names:
        if name not in RULE_SETS:
            raise ReconstructError(f"`rules` (={name!r}) must be among {', '.join(RULE_SETS)}.")
    return [RULE_SETS[name] for name in names]


def rewrite(unit: Unit, names: Sequence[str], settings: Settings | None = None, must: bool = False) -> Applied:
    """Applies rule sets in order; one that does not fit leaves the unit as it is, and the log says why.

    Args:
        must: every rule set must change something; what it is for is part of what the caller has promised.

    Raises:
        ReconstructError: an unknown name, or a rule set that must fit and does not.
    """
    settings, matches, notes = settings or Settings(), list[Match](), list[str]()
    for row in rule_sets(names):
        try:
            applied = row.apply(unit, settings)
        except ReconstructError as error:
            if must:
                raise ReconstructError(f"{row.name} does not apply: {error}") from error
            if row.must:
                raise
            notes.append(f"{row.name} does not apply: {error}")
            log.warning("%s does not apply, the source stays as it is: %s", row.name, error)
            continue
        if must and not applied.matches:
            raise ReconstructError(f"{row.name} changes nothing: {'; '.join(applied.notes) or 'there is nothing that it is for'}")
        unit, matches = applied.unit, matches + applied.matches
        notes += applied.notes or [f"{row.name}: nothing to do"]
    return Applied(unit, matches, notes)
