"""Which commit the sources of this package are."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def source_commit() -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it); each None where that is not known.

    ``REPLAYSSM_COMMIT`` names the commit where the sources lie outside git, or in a copy of it that
    is not whole; git is not asked then.
    """
    if named := os.environ.get("REPLAYSSM_COMMIT"):
        return named, None
    status = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "HEAD"), None if status is None else bool(status)


def _git(*args: str) -> str | None:
    """Output of git in the checkout that this package runs from; None in an installed wheel."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
