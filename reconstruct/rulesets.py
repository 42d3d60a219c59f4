"""Registry of rule sets by name, and `rewrite`, which applies them for the tuner, the build and the command line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from im2win.reconstruct.fusion import llc, shmem
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.rules import barriers, bounds, copies, hip, pipelines, unroll, wide
from im2win.reconstruct.text_rules import Match, ReconstructError
from im2win.reconstruct.validate.search import search
from im2win.reconstruct.validate.validators import Validator

log = logging.getLogger("im2win.reconstruct")


@dataclass(frozen=True)
class Settings:
    """Parameters of the rule sets.

    shared: bytes of shared memory that a block may take. wave: consumer blocks in a wave, see `llc.fuse`.
    validators: a change is refused if one of them objects.
    sizes: of a multiprocessor, which `bounds` divides among thread blocks.
    """

    shared: int = 49152
    wave: int = 0
    validators: tuple[Validator, ...] = ()
    sizes: bounds.Multiprocessor = bounds.HOPPER


@dataclass(frozen=True)
class Applied:
    """A rewritten unit, its changes, and a line of text for every decision."""

    unit: Unit
    matches: list[Match] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RuleSet:
    """A row of the registry.

    why: its purpose. must: whether it is an error if it does not apply; otherwise the source stays unchanged.
    """

    name: str
    why: str
    apply: Callable[[Unit, Settings], Applied]
    must: bool = False


def _barriers(unit: Unit, settings: Settings) -> Applied:
    result, matches, story = search(unit, settings.validators)
    return Applied(result, matches, [str(tried) for tried in story])


def _validated(changed: tuple[Unit, list[Match]], settings: Settings) -> Applied:
    """Passes a changed unit to all validators.

    Raises:
        ReconstructError: a validator objects.
    """
    result, matches = changed
    for validator in settings.validators:
        objection = validator.objection(result)
        if objection is not None:
            raise ReconstructError(f"{validator.name} objects to the changed kernel: {objection}")
    return Applied(result, matches, [f"{match.rule}: {match.why}" for match in matches])


def _shared(unit: Unit, settings: Settings) -> Applied:
    return _validated(shmem.fuse(unit, settings.shared), settings)


def _cached(unit: Unit, settings: Settings) -> Applied:
    return _validated(llc.fuse(unit, settings.shared, settings.wave), settings)


def _steps(rewrite: Callable[[Unit], tuple[Unit, list[Match], list[str]]]) -> Callable[[Unit, Settings], Applied]:
    """A rule set that proves each of its changes and reports them; validators judge the result."""

    def apply(unit: Unit, settings: Settings) -> Applied:
        result, matches, notes = rewrite(unit)
        checked = _validated((result, matches), settings) if matches else Applied(result)
        return Applied(checked.unit, matches, notes)

    return apply


def _bounds(unit: Unit, settings: Settings) -> Applied:
    return _steps(lambda unit: bounds.rewrite(unit, settings.sizes))(unit, settings)


def _hip(unit: Unit, settings: Settings) -> Applied:
    result, matches = hip.translate(unit)
    return Applied(result, matches, [f"line {match.line}: {match.rule}, {match.why}" for match in matches])


RULE_SETS: dict[str, RuleSet] = {
    row.name: row
    for row in (
        RuleSet(barriers.RULE, "drops or weakens barriers that an argument about indices shows to be needless", _barriers),
        RuleSet(pipelines.RULE, "takes one barrier a step, not two, in pipelined loops", _steps(pipelines.rewrite)),
        RuleSet(copies.RULE, "copies from global to shared memory asynchronously", _steps(copies.rewrite)),
        RuleSet(wide.RULE, "accesses several neighbouring elements at once", _steps(wide.rewrite)),
        RuleSet(bounds.RULE, "states how many thread blocks a multiprocessor is to run", _bounds),
        RuleSet(unroll.RULE, "unrolls the steps of a pipeline by its ring of buffers", _steps(unroll.rewrite)),
        RuleSet(shmem.RULE, "fuses a kernel with the one that reads its result, held in shared memory", _shared),
        RuleSet(llc.RULE, "fuses a kernel with the one that reads its result, through the last-level cache", _cached),
        RuleSet(hip.RULE, "translates to HIP", _hip, must=True),
    )
}


def split(unit: Unit) -> dict[str, Unit]:
    """Splits a unit into one unit a kernel, by kernel name."""
    found = {}
    for name, kernel in unit.kernels.items():
        launches = tuple(launch for launch in unit.launches if launch.kernel == name)
        used = {tensor for launch in launches for tensor in launch.arguments}
        workspace = {tensor: shape for tensor, shape in unit.workspace.items() if tensor in used}
        found[name] = Unit(f"{unit.head}{kernel.text}\n", launches, workspace)
    return found


def rule_sets(names: Sequence[str]) -> list[RuleSet]:
    """Looks up rule sets by name.

    Raises:
        ReconstructError: a name is unknown.
    """
    for name in names:
        if name not in RULE_SETS:
            raise ReconstructError(f"`rules` (={name!r}) must be among {', '.join(RULE_SETS)}.")
    return [RULE_SETS[name] for name in names]


def rewrite(unit: Unit, names: Sequence[str], settings: Settings | None = None, must: bool = False) -> Applied:
    """Applies rule sets in order. One that does not apply leaves the unit unchanged and logs a warning.

    Args:
        must: whether every rule set must change the unit.

    Raises:
        ReconstructError: a name is unknown, or a rule set that must apply does not.
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
