"""split_docs.py SOURCES TRAIN HELDOUT: cut reST sources into training and held-out text.

SOURCES is the ``_sources`` folder of Debian's python3.11-doc (``apt-get download python3.11-doc``,
``dpkg -x``; 3.11.2-6+deb12u8 was used): Python's documentation, PSF licence version 2. Whole files
are held out, the ones named below; all others are the training corpus.
"""

import argparse
import os
from pathlib import Path

HELD_OUT = (
    "library/bisect.rst.txt",
    "library/heapq.rst.txt",
    "library/fractions.rst.txt",
    "library/statistics.rst.txt",
    "library/textwrap.rst.txt",
    "library/shelve.rst.txt",
    "library/queue.rst.txt",
    "library/zipapp.rst.txt",
    "howto/sorting.rst.txt",
    "tutorial/floatingpoint.rst.txt",
    "c-api/buffer.rst.txt",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("sources", "train", "heldout"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    missing = [name for name in HELD_OUT if not (args.sources / name).is_file()]
    if missing:
        parser.error(f"{args.sources} lacks {missing[0]}: pass the package's _sources folder")
    files = sorted(p for p in args.sources.rglob("*.rst.txt") if p.is_file())
    train = [p for p in files if p.relative_to(args.sources).as_posix() not in HELD_OUT]
    for target, parts in (
        (args.train, train),
        (args.heldout, [args.sources / n for n in HELD_OUT]),
    ):
        data = b"\n".join(p.read_bytes() for p in parts)
        temporary = target.with_name(target.name + ".tmp")
        temporary.write_bytes(data)
        os.replace(temporary, target)
        print(f"{target}: {len(data)} bytes of {len(parts)} files")


if __name__ == "__main__":
    main()
