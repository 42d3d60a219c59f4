"""The folders of tuning records that are searched and written: those that a caller names, and one of the user's own.

What was tuned once is found later by every verb and function, since all of them search the user's folder and tuning writes there. It is
`IM2WIN_LOGS`, else the platform's folder for data, such as `~/.local/share/im2win/tuning_logs` on Linux.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from im2win.common.locking import LogError, writing

Folder = str | os.PathLike[str]
Logs = Folder | Sequence[Folder] | None
"""A folder of tuning records, several in the order in which they are searched, or None."""

VARIABLE = "IM2WIN_LOGS"
PACKAGED = Path(__file__).parent.parent / "tuning_logs"  # those that ship with the package


def user_folder() -> Path:
    """The user's own folder of tuning records: `IM2WIN_LOGS`, else the platform's. It need not exist."""
    if given := os.environ.get(VARIABLE):
        return Path(given).absolute()
    import platformdirs

    return platformdirs.user_data_path("im2win", appauthor=False) / "tuning_logs"


def named_folders(logs: Logs) -> tuple[str, ...]:
    """The folders that a caller names, as absolute paths for any process; without a name, none.

    Raises:
        TypeError: `logs` is neither a path nor a sequence of paths.
    """
    if logs is None:
        return ()
    folders = [logs] if isinstance(logs, (str, os.PathLike)) else list(logs)
    for folder in folders:
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"`logs` (={logs!r}) must be a folder or a sequence of folders.")
    return tuple(os.path.realpath(folder) for folder in folders)


def own_folders(logs: Logs) -> tuple[str, ...]:
    """The folders that are searched before those of the package, in order: those that a caller names, then the user's. They need not exist.

    Raises:
        TypeError: `logs` is neither a path nor a sequence of paths.
    """
    return tuple(dict.fromkeys((*named_folders(logs), str(user_folder()))))


def folder_to_write(logs: Logs) -> Path:
    """Where tuning writes: the first folder that the caller names, else the user's. It exists when this returns.

    Raises:
        LogError: the folder cannot be made or written. The message names it and what else to choose.
    """
    named = named_folders(logs)
    folder = Path(named[0]) if named else user_folder()
    try:
        if folder.exists() and not folder.is_dir():
            raise LogError(f"`{folder}` is a file; choose a folder for the logs.")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except LogError as error:
        raise LogError(f"{error} (`logs`, or `--logs`, and the environment variable {VARIABLE} name another one.)") from None
    return folder
