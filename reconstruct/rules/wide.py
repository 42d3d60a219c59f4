"""One wide access in place of several neighbouring narrow ones, on the way from global to shared memory.

Stores: a thread that stores neighbouring elements one by one keeps a few of them in registers and stores them at once:

    for i < 64                                     for group < 8
        v = inside(i) ? data[place(i)] : 0             for lane < 8: i = group * 8 + lane; values[lane] = inside(i) ? data[place(i)] : 0
        ring[first + i] = v             becomes        *(uint4*)(ring + first + group * 8) = *(uint4*)values

Copies: where neighbouring threads copy neighbouring elements asynchronously, a thread copies several of them, and the loop has fewer
iterations. Every element is copied once, as before, by another thread:

    for i < 8: copy_async<4>(ring + at(i, thread), data + place(i, thread), inside(i, thread))                          becomes

    for group < 2
        element = (group * threads + thread) * 4; i = element / threads; other = element % threads
        copy_async<16>(ring + at(i, other), data + place(i, other), inside(i, other))

Where the elements of a thread are no neighbours, but those of several threads and iterations are, they change places as copies do. Stores
with no branches between them are joined by the compiler itself, and stay as they are.

Both need indices that are neighbours and begin at multiples of what is accessed at once, and copies a condition that is the same for all of
them. `neighbours` shows that for every thread, iteration and block. Other threads then write an element; `races` shows that all of them are
ordered by the barriers that there are, or the loop stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from im2win.reconstruct.parse.expressions import Binary, Call, Cast, Expr, Index, Name, Number, names, size_of, terms, walk
from im2win.reconstruct.parse.statements import Assignment, Declaration, Effect, If, Loop, Statement, every
from im2win.reconstruct.parse.unit import AXES, Edit, Kernel, Unit
from im2win.reconstruct.rules.races import race
from im2win.reconstruct.text_rules import Match, ReconstructError
from im2win.reconstruct.trace.events import NotShown
from im2win.reconstruct.trace.neighbours import Neighbours, Run
from im2win.reconstruct.trace.values import evaluate

RULE = "wide"
WORDS = {16: "uint4", 8: "uint2", 4: "uint"}  # types of accesses, by bytes
ALIGNMENT = 16  # bytes, of arrays in shared memory and of tensors
COPY = "im2win::copy_async"
WHY_STORES, WHY_COPIES = "a thread stores neighbouring elements at once", "a thread copies neighbouring elements at once"


def rewrite(unit: Unit) -> tuple[Unit, list[Match], list[str]]:
    """Widens stores and copies to shared memory where that is shown to be right.

    Returns:
        The new unit, its changes, and a note for every kernel.
    """
    notes, matches = list[str](), list[Match]()
    for name in unit.kernels:
        kernel = unit.kernel(name)
        edits = [edit for part in every(kernel.statements) if isinstance(part, Loop) for edit in _edits(kernel, part)]
        if not edits:
            notes.append(f"{RULE}: kernel {name} has no neighbouring narrow accesses that could be one")
            continue
        changed, made = unit.edited(edits)
        try:
            reason = race(changed, name)
        except NotShown as error:
            reason = str(error)
        if reason is not None:
            raise ReconstructError(f"{RULE}: kernel {name} cannot access shared memory in wide words: {reason}")
        unit, matches = changed, matches + made
        notes.append(f"{RULE}: kernel {name} has {len(edits)} loops of wide accesses")
    return unit, matches, notes


def _edits(kernel: Kernel, loop: Loop) -> Iterator[Edit]:
    """The change to a loop, if there is one."""
    match loop:
        case Loop(start=Number(0), stop=Number(int(count)), step=1, body=(*before, Assignment(operator="") as store)):
            text = _stores(kernel, loop, count, before, store)
            why = WHY_STORES
        case Loop(start=Number(0), stop=Number(int(count)), step=1, body=(*before, Effect(value=Call() as call))):
            text = _copies(kernel, loop, count, before, call)
            why = WHY_COPIES
        case _:
            return
    if text:
        yield Edit(loop.span, text, RULE, why)


def _shared(kernel: Kernel) -> dict[str, str]:
    """Types of elements of arrays in shared memory, by name."""
    return {array.name: array.type for array in kernel.shared}


def _array(kernel: Kernel, expr: Expr) -> tuple[str, str] | None:
    """(expression, type of elements) of an array in shared memory, by its name or as another type; None for other expressions."""
    kinds = _shared(kernel)
    match expr:
        case Name(name) if name in kinds:
            return name, kinds[name]
        case Cast(type_, Name(name)) if type_.endswith("*") and name in kinds:
            return f"(({type_}){name})", type_[:-1]
    return None


def _aligned(kernel: Kernel, expr: Expr) -> bool:
    """Whether an array, or the tensor of a parameter, begins at a multiple of `ALIGNMENT` bytes.

    Shared arrays state it. Tensors begin so because TVM's host code checks it: existing vector loads of its kernels rely on that.
    """
    name = next((part.name for part in walk(expr) if isinstance(part, Name)), "")
    if name in {one.name for one in kernel.parameters if one.element}:
        return True
    stated = re.search(rf"\b(?:alignas|__align__)\((\d+)\)\s+[\w ]*?\b{name}\[", kernel.body)
    return stated is not None and int(stated[1]) % ALIGNMENT == 0


# --- stores


def _stores(kernel: Kernel, loop: Loop, count: int, before: Sequence[Statement], store: Assignment) -> str:
    """The loop with wide stores; "" where nothing is gained or shown."""
    if not isinstance(store.target, Index) or (array := _array(kernel, store.target.base)) is None:
        return ""
    size = size_of(array[1])
    if size is None or not any(isinstance(part, If) for part in before):
        return ""  # the compiler itself joins stores with no branches between them
    if not _aligned(kernel, store.target.base) or not _only_loads(kernel, [*before, store]):
        return ""
    for width in (width for width in WORDS if width > size and count % (width // size) == 0):
        lanes = width // size
        if _neighbours(Neighbours(lanes, {loop.name: Run(lanes, 1, True)}), store.target.index, 1):
            return _stored(kernel, loop, count, store, array, width, 0)
        if column := _column(kernel, loop, count, store.target.index, lanes):
            return _stored(kernel, loop, count, store, array, width, column)
    return ""


def _column(kernel: Kernel, loop: Loop, count: int, index: Expr, lanes: int) -> int:
    """Elements from one to its neighbour in shared memory, in the order of threads and iterations; 0 if there is no such number.

    In iteration i of N threads, thread t stores element ``i * N + t``. Where elements that are `column` apart in this order are neighbours,
    other threads and iterations can take them so that a thread has `lanes` of them.
    """
    x, y, z = kernel.launch.block
    threads = x * y
    own = {loop.name, "threadIdx.x", "threadIdx.y"}
    parts = [(factor, rest, names(rest) if rest is not None else set()) for factor, rest in terms(index)]
    others = [(factor, rest) for factor, rest, used in parts if not used & own]
    if z > 1 or any(used & own and not used <= own for _, _, used in parts):
        return 0
    if not _begins(others, lanes):
        return 0
    for column in (column for column in range(x, count * threads // lanes + 1, x) if count * threads % (column * lanes) == 0):
        unit = np.arange(count * threads // lanes)
        place = (unit // column * lanes + np.arange(lanes)[:, None]) * column + unit % column
        scope = {loop.name: place // threads, "threadIdx.y": place % threads // x, "threadIdx.x": place % x}
        found = np.zeros_like(place)
        for factor, rest in ((factor, rest) for factor, rest, used in parts if used & own and rest is not None):
            value = evaluate(rest, scope)
            if value is None:
                return 0
            found = found + factor * value
        if np.all(found == found[0] + np.arange(lanes)[:, None]) and not np.any(found[0] % lanes):
            return column
    return 0


def _begins(parts: Sequence[tuple[int, Expr | None]], lanes: int) -> bool:
    """Whether a sum of terms is a multiple of `lanes` whatever their variables are."""
    for factor, rest in parts:
        run = Run(1, 0, False) if rest is None else Neighbours(lanes, {}).run(rest)
        if run is None or factor * run.multiple % lanes:
            return False
    return True


def _neighbours(known: Neighbours, index: Expr, each: int) -> bool:
    """Whether lanes access runs of `each` elements that follow one another, and the first begins at a multiple of all of them."""
    run = known.run(index)
    return run is not None and run.step == each and run.multiple % (known.count * each) == 0


def _known(kernel: Kernel) -> set[str]:
    """Names whose values all threads of a block share, but for the indices of threads: tensors, indices, and variables of loops."""
    loops = {loop.name for loop in kernel.loops if isinstance(loop.start, Number) and isinstance(loop.stop, Number)}
    indices = {f"{base}.{axis}" for base in ("threadIdx", "blockIdx") for axis in AXES}
    return {one.name for one in kernel.parameters if one.element} | loops | indices


def _only_loads(kernel: Kernel, body: Sequence[Statement]) -> bool:
    """Whether statements read no shared memory, and write none but by the last of them; their values depend on indices alone.

    A value that is stored later than before is then the same, nobody of the thread misses it, and any thread can load it.
    """
    *others, last = body
    known, own = _known(kernel), set[str]()
    for part in every(others):
        match part:
            case Declaration(space="", count=None):
                read = names(part.value) if part.value is not None else set()
                own.add(part.name)
            case Assignment(target=Name(name)) if name in own:
                read = names(part.value)
            case If():
                read = names(part.condition)
            case _:
                return False
        if not read <= known | own:
            return False
    return isinstance(last, Assignment) and isinstance(last.target, Index) and names(last.value) <= known | own and (
        names(last.target.index) <= known
    )  # fmt: skip


def _stored(kernel: Kernel, loop: Loop, count: int, store: Assignment, array: tuple[str, str], width: int, column: int) -> str:
    """The loop with stores of `width` bytes; `column`: see `_column`, 0 where an iteration's neighbour is the next one."""
    (x, y, _), name, lanes, pad = kernel.launch.block, loop.name, width // (size_of(array[1]) or 1), _indent(kernel, loop)
    inner = kernel.source[loop.inner[0] : store.span[0]].strip("\n").rstrip()
    target, _, value = kernel.source[slice(*store.span)].rstrip(";").partition(" = ")
    index = target.strip()[len(_base(target.strip())) + 1 : -1]
    if column:
        inner, value, index = (_of_thread(text, f"{name}_y") for text in (inner, value, index))
        unit = f"{pad}  int {name}_unit = (({name}_group * {x * y}) + {_thread(x, y)});\n"
        first = f"(({name}_unit / {column}) * {lanes * column})"
        every_lane = _declared(f"({first} + ({name}_lane * {column})) + ({name}_unit % {column})", name, (x, y), f"{pad}    ")
        before = _declared(f"{first} + ({name}_unit % {column})", name, (x, y), f"{pad}  ")
    else:
        unit, before = "", ""
        every_lane = f"{pad}    int {name} = (({name}_group * {lanes}) + {name}_lane);\n"
        index = re.sub(rf"\b{name}\b", f"({name}_group * {lanes})", index)
    more = "\n".join(f"  {line}" for line in inner.split("\n"))
    word = WORDS[width]
    return (
        f"for (int {name}_group = 0; {name}_group < {count // lanes}; ++{name}_group) {{\n"
        f"{pad}  alignas({width}) {array[1]} {name}_values[{lanes}];\n"
        f"{unit}"
        f"{pad}  #pragma unroll\n"
        f"{pad}  for (int {name}_lane = 0; {name}_lane < {lanes}; ++{name}_lane) {{\n"
        f"{every_lane}{more}\n"
        f"{pad}    {name}_values[{name}_lane] = {value.strip()};\n"
        f"{pad}  }}\n"
        f"{before}"
        f"{pad}  *({word}*)({array[0]} + ({index})) = *({word}*)({name}_values + 0);\n"
        f"{pad}}}"
    )


def _declared(place: str, name: str, block: tuple[int, int], pad: str) -> str:
    """Declarations of the iteration, and of the thread along y, that take a place in the order of threads and iterations."""
    x, y = block
    return (
        f"{pad}int {name}_place = ({place});\n{pad}int {name} = ({name}_place / {x * y});\n"
        f"{pad}int {name}_y = (({name}_place % {x * y}) / {x});\n"
    )


def _of_thread(text: str, row: str) -> str:
    """Code of the thread in another row, at the same place along x."""
    return re.sub(r"\(\(int\)threadIdx\.y\)|\bthreadIdx\.y\b", row, text)


def _thread(x: int, y: int) -> str:
    return f"((((int)threadIdx.y) * {x}) + ((int)threadIdx.x))" if y > 1 else "((int)threadIdx.x)"


def _indent(kernel: Kernel, loop: Loop) -> str:
    """The blanks before a loop."""
    begin = kernel.source.rfind("\n", 0, loop.span[0]) + 1
    return " " * (len(kernel.source[begin:]) - len(kernel.source[begin:].lstrip(" ")))


def _base(target: str) -> str:
    """The text of the array in `array[index]`."""
    depth = 0
    for at in range(len(target) - 1, -1, -1):
        depth += (target[at] == "]") - (target[at] == "[")
        if depth == 0:
            return target[:at]
    return target


# --- copies


def _copies(kernel: Kernel, loop: Loop, count: int, before: Sequence[Statement], call: Call) -> str:
    """The loop with wide copies; "" where nothing is gained or shown."""
    if call.function != COPY or not call.template.isdigit() or not all(isinstance(part, Declaration) for part in before):
        return ""
    x, y, z = kernel.launch.block
    match call.arguments:
        case (Binary("+", array, at), Binary("+", Name(tensor), place), *condition) if z == 1:
            found = _array(kernel, array)
            if not set().union(*map(names, (at, *call.arguments[1:]))) <= _known(kernel):
                return ""
        case _:
            return ""
    size, bytes_each = size_of(found[1]) if found else None, int(call.template)
    if size is None or not (_aligned(kernel, array) and _aligned(kernel, Name(tensor))):
        return ""
    for width in (16, 8):
        lanes = width // bytes_each
        if lanes < 2 or count % lanes or x % lanes:
            continue
        # of the copy with the number `group * threads * lanes + thread * lanes + lane`: its iteration, and its thread along y and x
        known = Neighbours(lanes, {"threadIdx.x": Run(lanes, 1, True), loop.name: Run(1, 0, True), "threadIdx.y": Run(1, 0, True)})
        each = bytes_each // size
        if _neighbours(known, at, each) and _neighbours(known, place, each) and all(map(known.same, condition)):
            return _copied(kernel, loop, count // lanes, (x, y), lanes, width)
    return ""


def _copied(kernel: Kernel, loop: Loop, groups: int, block: tuple[int, int], lanes: int, width: int) -> str:
    (x, y), name, pad = block, loop.name, _indent(kernel, loop)
    text = kernel.source[slice(*loop.body[-1].span)]
    text = re.sub(r"(?<=^im2win::copy_async<)\d+", str(width), text)
    for axis in "xy":
        text = re.sub(rf"\(\(int\)threadIdx\.{axis}\)|\bthreadIdx\.{axis}\b", f"{name}_{axis}", text)
    rows = f"{pad}  int {name}_y = (({name}_copy % {x * y}) / {x});\n" if f"{name}_y" in text else ""
    return (
        f"for (int {name}_group = 0; {name}_group < {groups}; ++{name}_group) {{\n"
        f"{pad}  int {name}_copy = ((({name}_group * {x * y}) + {_thread(x, y)}) * {lanes});\n"
        f"{pad}  int {name} = ({name}_copy / {x * y});\n"
        f"{rows}"
        f"{pad}  int {name}_x = ({name}_copy % {x});\n"
        f"{pad}  {text}\n"
        f"{pad}}}"
    )
