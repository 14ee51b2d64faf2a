"""``python -m replayssm_quant.kernels.bench``: correctness gate, timing, report."""

import sys

from ..._paths import drop_checkout


def main() -> int:
    drop_checkout()
    from .run import main as run_main

    return run_main()


if __name__ == "__main__":
    sys.exit(main())
